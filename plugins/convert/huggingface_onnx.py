"""Imports folders of Hugging Face that have an ONNX file, as its hub and optimum have them: no PyTorch is needed.

config.json, onnx/model.onnx ─> a copy; of sentence-transformers: pooling, Dense and Normalize of modules.json behind it
tokenizer.json ─> as for a model that is converted (convert.huggingface)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.held import import_onnx
from millstream.plugins.convert.huggingface import PADDED_MAX, TOKENS_PADDED, padding_notes, tokenizer_files
from millstream.plugins.convert.huggingface_folder import (
    Dense,
    Folder,
    Pipeline,
    is_folder,
    member_patterns,
    positions_of,
    read_folder,
    read_linear,
)
from millstream.plugins.convert.huggingface_model import IDS, LOGITS, MASK, TYPES, Task, answer_of
from millstream.plugins.convert.huggingface_processors import PIXELS, SAMPLES, steps_of
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.external_data import weights_of
from millstream.services.ingest.file_kind import why_not_onnx
from millstream.services.ingest.importers import Array, ImportOptions, Members, Sample, Source
from millstream.services.ingest.layout import OnnxFile, find_onnx, notes_on_others
from millstream.services.model.datatypes import NUMPY

_EMBEDDING = "sentence_embedding"
_CLASSIFIERS: Mapping[str, Task] = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
}
#: outputs that hold a vector for each token
_STATES = ("last_hidden_state", "token_embeddings")
_TINY = 1e-9


class HuggingFaceOnnxImporter(Importer):
    """The importer of folders with config.json and an ONNX file."""

    name = "Hugging Face ONNX"
    modules = ("onnx", "onnxruntime")
    described = True
    executes = False

    def recognises(self, source: Source) -> bool:
        return is_folder(source.path) and find_onnx(source.path) is not None

    def members(self, folder: Path) -> Members:
        onnx = _onnx(folder)
        place = onnx.path.parent
        files = [onnx.path, *(place / location for location in weights_of(onnx.path))]
        names = [escape(path.relative_to(folder).as_posix()) for path in files]
        return Members([*member_patterns(folder, exported=True), *names], notes_on_others(folder, onnx))

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        folder = read_folder(source.path, options, exported=True)
        imported = import_onnx(source, _onnx(source.path).path, ())
        outputs = imported.samples[0].outputs
        if folder.pipeline is not None and _EMBEDDING not in outputs:
            imported = _pooled(imported, folder.pipeline)
        elif len(outputs) == 1 and set(outputs) <= {*_STATES, _EMBEDDING}:
            imported = imported._replace(embeddings=tuple(outputs))
        elif list(outputs) == [LOGITS] and folder.architecture.endswith(tuple(_CLASSIFIERS)):
            imported = _classified(imported, folder, outputs[LOGITS].shape[-1])
        if given := next((name for name in (PIXELS, SAMPLES) if name in imported.samples[0].inputs), None):
            prepare, note = steps_of(folder.path, given)
            return imported._replace(prepare=prepare, notes=(*imported.notes, *([note] if note else [])))
        if IDS not in imported.samples[0].inputs:
            return imported
        vocabulary, positions = folder.config.get("vocab_size"), positions_of(folder.config)
        tokens = vocabulary if type(vocabulary) is int else 0
        padding = _padding_notes(imported, folder, tokens)
        padded_max = (positions or PADDED_MAX) if padding == [] else 0
        notes = list(padding or ())
        files, note = _tokenizer(source, folder, tokens, positions)
        notes += [note] if note else []
        return imported._replace(
            notes=(*imported.notes, *notes), files=(*imported.files, *files), padded_max=padded_max
        )


def _classified(imported: Imported, folder: Folder, count: int) -> Imported:
    task = next(task for ending, task in _CLASSIFIERS.items() if folder.architecture.endswith(ending))
    named = folder.config.get("id2label")
    if isinstance(named, dict):
        labels = {int(key): label for key, label in named.items() if str(key).isdecimal()}
    else:
        labels = {at: f"LABEL_{at}" for at in range(count)}  # as transformers calls them
    config = SimpleNamespace(id2label=labels, problem_type=folder.config.get("problem_type"))
    head = answer_of(config, task, count)
    return imported._replace(notes=(*imported.notes, *head.notes), classes=head.classes, labels=head.labels)


def _padding_notes(imported: Imported, folder: Folder, vocabulary: int) -> list[str] | None:
    """Return a note if padding changes the answers: an export without the mask; None: it could not be tried.

    Raises Failure(INVALID).
    """
    from millstream.services.ingest.graph import read_model
    from millstream.services.ingest.model_io import read_tensors
    from millstream.services.ingest.trial_session import Session, TrialError

    names = list(imported.samples[0].inputs)
    positions = positions_of(folder.config)
    if not {IDS, MASK} <= set(names) <= {IDS, MASK, TYPES} or 0 < positions < TOKENS_PADDED:
        return None
    inputs, outputs = read_tensors(read_model(imported.path))
    session = Session(imported.path, inputs, outputs)
    order = [tensor.name for tensor in inputs]

    def answer(arrays: Sequence[Array]) -> Array:
        return session.run([array.astype(NUMPY[one.datatype]) for one, array in zip(inputs, arrays, strict=True)])[0]

    try:
        return padding_notes(answer, order, vocabulary, embeds=bool(imported.embeddings))
    except Failure as failure:
        advice = "export it with an example that is padded, or push the ONNX file by itself for token ids"
        raise invalid(f"{failure.message}: {advice}") from failure
    except TrialError:  # of fixed shapes, for example: the check says what runs
        return None


def _onnx(folder: Path) -> OnnxFile:
    found = find_onnx(folder)
    if found is None:
        raise invalid("the folder has no ONNX file")
    if (why := why_not_onnx(found.path)) is not None:  # a pointer of Git LFS, for example
        raise invalid(f"{found.path.relative_to(folder)}: {why}")
    return found


def _tokenizer(source: Source, folder: Folder, vocabulary: int, positions: int) -> tuple[Sequence[Path], str]:
    if find_spec("tokenizers") is None:
        return (), "Its tokenizer is left out, since `pip install 'millstream[embeddings]'` is missing at the gateway."
    return tokenizer_files(source, folder, vocabulary, positions)


def _pooled(imported: Imported, pipeline: Pipeline) -> Imported:
    """Put what sentence-transformers does behind the encoder behind the model; numpy answers its sample."""
    sample = imported.samples[0]
    vectors = [name for name, array in sample.outputs.items() if array.ndim == 3]
    states = next((name for name in _STATES if name in vectors), vectors[0] if len(vectors) == 1 else None)
    if states is None or MASK not in sample.inputs:
        raise invalid(
            f"modules.json pools the vectors of tokens, and the ONNX file has no {_STATES[0]} or no {MASK}: export it "
            "again with optimum, or push the ONNX file by itself"
        )
    layers = [(_linear(dense), dense.activation) for dense in pipeline.dense]
    _append(imported.path, states, pipeline, layers)
    answer = _answer(np.asarray(sample.outputs[states], np.float32), sample.inputs[MASK], pipeline, layers)
    return imported._replace(
        samples=[Sample(sample.inputs, {_EMBEDDING: answer})], embeddings=(_EMBEDDING,), rtol=1e-3, atol=1e-4
    )


Linear = tuple[Array, Array | None]


def _linear(dense: Dense) -> Linear:
    weight, bias = read_linear(dense)
    return np.ascontiguousarray(weight.T), bias


def _answer(states: Array, mask: Array, pipeline: Pipeline, layers: Sequence[tuple[Linear, str]]) -> Array:
    weights = mask[:, :, None].astype(np.float32)
    total, count = (states * weights).sum(1), np.maximum(weights.sum(1), _TINY)
    by_mode = {
        "cls": states[:, 0],
        "max": np.where(weights > 0, states, np.float32(-1e9)).max(1),
        "mean": total / count,
        "mean_sqrt_len_tokens": total / np.sqrt(count),
    }
    vectors = np.concatenate([by_mode[mode] for mode in pipeline.pooling], 1)
    for (weight, bias), activation in layers:
        vectors = vectors @ weight + (0 if bias is None else bias)
        vectors = _activated(vectors, activation)
    if pipeline.normalize:
        vectors = vectors / np.maximum(np.sqrt((vectors * vectors).sum(1, keepdims=True)), 1e-12)
    return np.asarray(vectors, np.float32)


def _activated(vectors: Array, activation: str) -> Array:
    if activation == "ReLU":
        return np.maximum(vectors, 0)
    if activation == "Tanh":
        return np.tanh(vectors)
    sigmoid = 1 / (1 + np.exp(-vectors))
    if activation == "GELU":
        from math import erf

        return np.asarray(vectors * 0.5 * (1 + np.vectorize(erf)(vectors / np.sqrt(2.0))), np.float32)
    return {"Sigmoid": sigmoid, "SiLU": vectors * sigmoid}.get(activation, vectors)


def _append(path: Path, states: str, pipeline: Pipeline, layers: Sequence[tuple[Linear, str]]) -> None:
    """Add the nodes to the ONNX file at `path`, and make their result its only output. Its weights are not read."""
    import onnx

    model = onnx.load_model(str(path), load_external_data=False)
    graph = _Nodes(onnx, model)
    output = next(value for value in model.graph.output if value.name == states)
    width = output.type.tensor_type.shape.dim[-1].dim_value or None
    tokens = graph.node("Cast", states, to=onnx.TensorProto.FLOAT)
    mask = graph.node("Cast", MASK, to=onnx.TensorProto.FLOAT)
    weights = graph.over("Unsqueeze", mask, 2, since=13)
    total = graph.over("ReduceSum", graph.node("Mul", tokens, weights), 1, since=13, keepdims=0)
    count = graph.node("Max", graph.over("ReduceSum", weights, 1, since=13, keepdims=0), graph.value(_TINY))
    by_mode = {
        "cls": lambda: graph.node("Gather", tokens, graph.value(0, np.int64), axis=1),
        "max": lambda: graph.over(
            "ReduceMax",
            graph.node("Where", graph.node("Greater", weights, graph.value(0.0)), tokens, graph.value(-1e9)),
            1,
            since=18,
            keepdims=0,
        ),
        "mean": lambda: graph.node("Div", total, count),
        "mean_sqrt_len_tokens": lambda: graph.node("Div", total, graph.node("Sqrt", count)),
    }
    vectors = graph.node("Concat", *(by_mode[mode]() for mode in pipeline.pooling), axis=1)
    for (weight, bias), activation in layers:
        vectors = graph.node("MatMul", vectors, graph.value(weight))
        vectors = vectors if bias is None else graph.node("Add", vectors, graph.value(bias))
        vectors, width = graph.activated(vectors, activation), weight.shape[1]
    if pipeline.normalize:
        squares = graph.over("ReduceSum", graph.node("Mul", vectors, vectors), 1, since=13, keepdims=1)
        vectors = graph.node("Div", vectors, graph.node("Max", graph.node("Sqrt", squares), graph.value(1e-12)))
    graph.node("Identity", vectors, result=_EMBEDDING)
    width = width if layers or width is None else width * len(pipeline.pooling)
    rows = next(value for value in model.graph.input if value.name == MASK).type.tensor_type.shape.dim[0]
    del model.graph.output[:]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(_EMBEDDING, onnx.TensorProto.FLOAT, [rows.dim_param or "rows", width])
    )
    path.write_bytes(model.SerializeToString())


class _Nodes:
    """Adds nodes to a graph, whose values get names that it has not."""

    def __init__(self, onnx: Any, model: Any) -> None:
        self._onnx = onnx
        self._graph = model.graph
        self._opset = next(one.version for one in model.opset_import if one.domain in {"", "ai.onnx"})
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"millstream_pooling_{self._count}"

    def value(self, value: Any, dtype: Any = np.float32) -> str:
        """Return the name of a constant. It is a node, since before IR 4 initializers are inputs, too."""
        tensor = self._onnx.numpy_helper.from_array(np.asarray(value, dtype), self._name())
        return self.node("Constant", value=tensor)

    def node(self, kind: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        name = result or self._name()
        self._graph.node.append(self._onnx.helper.make_node(kind, inputs, [name], **attributes))
        return name

    def over(self, kind: str, operand: str, axis: int, *, since: int, **attributes: Any) -> str:
        """Add a node over an axis, which is an input since an operator set, and an attribute before it."""
        if self._opset >= since:
            return self.node(kind, operand, self.value([axis], np.int64), **attributes)
        return self.node(kind, operand, axes=[axis], **attributes)

    def activated(self, vectors: str, activation: str) -> str:
        """Add an activation of torch.nn."""
        if activation == "GELU":
            error = self.node("Erf", self.node("Mul", vectors, self.value(0.5**0.5)))
            return self.node(
                "Mul", self.node("Mul", vectors, self.value(0.5)), self.node("Add", error, self.value(1.0))
            )
        if activation == "SiLU":
            return self.node("Mul", vectors, self.node("Sigmoid", vectors))
        operators: Mapping[str, str] = {"ReLU": "Relu", "Tanh": "Tanh", "Sigmoid": "Sigmoid"}
        return self.node(operators[activation], vectors) if activation in operators else vectors
