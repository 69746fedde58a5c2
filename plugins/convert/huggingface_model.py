"""Loads an encoder of Hugging Face, as a module of PyTorch that takes token ids and returns what is served.

architecture in config.json ─> tables of transformers' auto classes ─> Head, or a refusal that names the task
id2label, problem_type ─> classes and their labels, as transformers' pipelines answer them
input_ids, attention_mask [, token_type_ids] ─> encoder ─> states ─> pooling, dense layers, length 1 ─> vectors
For the checker process only: it imports PyTorch and transformers.
"""

from __future__ import annotations

import inspect
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from millstream.plugins.convert.huggingface_folder import Folder, Pipeline, positions_of, read_linear
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.importers import ImportOptions
from millstream.services.model.signature import ANSWERED_MAX, Classes

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
LOGITS = "logits"
LABEL_CHARACTERS_MAX = 512
#: control characters, surrogates, separators of lines and paragraphs: a label is a line of text
_NO_TEXT = frozenset({"Cc", "Cs", "Zl", "Zp"})
_LABELS_NOTED = 20

Task = Literal[
    "embeddings", "sequence-classification", "token-classification", "image-classification", "audio-classification"
]
#: what is imported: auto classes that load it, and their tables of the classes of each model_type
_LOADERS: Mapping[str, tuple[Task, str]] = {
    "AutoModel": ("embeddings", "MODEL_MAPPING_NAMES"),
    "AutoModelForTextEncoding": ("embeddings", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"),
    "AutoModelForSequenceClassification": (
        "sequence-classification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "AutoModelForTokenClassification": ("token-classification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForImageClassification": ("image-classification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "AutoModelForAudioClassification": ("audio-classification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
}


class Encoder(NamedTuple):
    """A loaded model.

    Args:
        config: as transformers read it.
        answer: called with the tensors of `inputs`; returns the one output.
        module: computes the same in a form whose rows the model check can prove independent, where there is one.
    """

    task: Task
    config: Any
    inputs: tuple[str, ...]
    output: str
    answer: Any
    module: Any
    vocabulary: int
    positions: int
    versions: str
    notes: Sequence[str]


def import_transformers() -> Any:
    """Return the module transformers. Raises Failure(INVALID) with what to install."""
    try:
        import safetensors.torch  # noqa: F401 - transformers imports it late
        import transformers
    except ImportError as error:
        raise invalid(
            f"transformers cannot be loaded where the gateway runs ({error}): install millstream[huggingface]"
        ) from error
    return transformers


def load_encoder(torch: Any, transformers: Any, folder: Folder, head: Head) -> Encoder:
    """Load a model of text. Raises Failure(INVALID) if it is incomplete, or no encoder."""
    model, notes = load_model(torch, transformers, folder, head)
    parameters = inspect.signature(model.forward).parameters
    if IDS not in parameters or MASK not in parameters:
        raise invalid(f"the model takes no {IDS} and {MASK}: only encoders of text are imported")
    types = TYPES in parameters and (getattr(model.config, "type_vocab_size", 0) or 0) > 1
    names = (IDS, MASK, TYPES) if types else (IDS, MASK)
    output, finish = _finish(torch, folder, head)
    answer = _wrapped(torch, model, finish, types=types, wide=False)
    module = _wrapped(torch, model, finish, types=types, wide=True)
    return Encoder(
        head.task,
        model.config,
        names,
        output,
        answer,
        module if _agree(torch, answer, module, len(names)) else answer,
        int(getattr(model.config, "vocab_size", 0) or 0),
        positions_of(model.config.to_dict()),
        f"transformers {transformers.__version__}, torch {torch.__version__}",
        notes,
    )


def load_model(torch: Any, transformers: Any, folder: Folder, head: Head) -> tuple[Any, Sequence[str]]:
    """Return the model and notes. Raises Failure(INVALID) unless the class has a place for each weight of the folder,
    and the folder a weight for each place.
    """
    try:
        model, found = getattr(transformers, head.loader).from_pretrained(
            str(folder.path),
            local_files_only=True,
            use_safetensors=not folder.pickled,
            trust_remote_code=head.code,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        if "ignore_mismatched_sizes" in text:
            raise invalid("the folder's weights are not those of its config.json: some have other shapes") from error
        raise invalid(f"transformers {transformers.__version__} cannot load the model: {text}") from error
    name = type(model).__name__
    if not head.code and folder.pipeline is None and folder.architecture not in {"", name}:
        raise invalid(f"config.json names the architecture {folder.architecture[:80]!a}, and transformers loads {name}")
    # The states are computed without the pooler, which many files lack.
    pooler = "pooler." if head.task == "embeddings" else None
    missing = [key for key in found["missing_keys"] if pooler is None or not key.startswith(pooler)]
    wrong = [str(key) for key in (*missing, *(entry[0] for entry in found["mismatched_keys"]))]
    if wrong:  # transformers gives such weights random values
        raise invalid(
            f"the folder's weights are not those of its config.json: {min(wrong)[:80]!a} is missing or of another shape"
        )
    dropped = sorted(map(str, found["unexpected_keys"]))
    if dropped and folder.pipeline is None:
        raise invalid(
            f"the folder has {len(dropped)} weights that {name} has no place for, {dropped[0][:80]!a} among them: a "
            "head would be left out; config.json has to name the architecture that was saved"
        )
    notes = [f"{len(dropped)} weights that modules.json does not use are left out, as {dropped[0]}."] if dropped else []
    return model.eval(), notes


def _wrapped(torch: Any, model: Any, finish: Callable[[Any, Any], Any], *, types: bool, wide: bool) -> Any:
    """Return a module of the inputs' tensors.

    Some heads find the end of a text, and some models number positions, by the padding token alone: where the mask is
    0 the model is given that token, whatever a caller padded with.

    `wide`: gives the model the mask that it adds to attention scores, so that it does not build one. The graph of that
    is long, and the analysis of rows does not follow it.
    """
    padding = getattr(model.config, "pad_token_id", None)
    padding = padding if type(padding) is int and 0 < padding < (getattr(model.config, "vocab_size", 0) or 0) else 0

    class Served(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            mask = attention_mask
            if padding:
                input_ids = torch.where(mask > 0, input_ids, padding)
            if wide:
                mask = (1.0 - mask[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
            named = {TYPES: token_type_ids} if types else {}
            return finish(self.model(**{IDS: input_ids, MASK: mask}, **named, return_dict=True), attention_mask)

    return Served().eval()


def _agree(torch: Any, one: Any, other: Any, inputs: int) -> bool:
    """Return whether two modules give equal answers for a masked row, and the second takes what the first does."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 4, 4]])
    arguments = (ids, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), torch.zeros_like(ids))[:inputs]
    try:
        with torch.inference_mode():
            return bool(torch.allclose(one(*arguments), other(*arguments), rtol=1e-4, atol=1e-5))
    except Exception:  # a model that takes no such mask raises what its author chose
        return False


def _finish(torch: Any, folder: Folder, head: Head) -> tuple[str, Callable[[Any, Any], Any]]:
    if head.task != "embeddings":
        return LOGITS, lambda found, _: found.logits
    if folder.pipeline is None:
        return "last_hidden_state", lambda found, _: found.last_hidden_state
    pipeline = folder.pipeline
    layers = _layers(torch, pipeline)

    def embed(found: Any, mask: Any) -> Any:
        states = found.last_hidden_state
        vectors = torch.cat([_pooled(torch, states, mask, mode) for mode in pipeline.pooling], 1)
        for layer in layers:
            vectors = layer(vectors)
        if pipeline.normalize:
            vectors = vectors / (vectors * vectors).sum(1, keepdim=True).sqrt().clamp(min=1e-12)
        return vectors

    return "sentence_embedding", embed


def _pooled(torch: Any, states: Any, mask: Any, mode: str) -> Any:
    """Return one vector for each row. Source: sentence-transformers, Pooling."""
    weights = mask[:, :, None].to(states.dtype)
    if mode == "cls":
        return states[:, 0]
    if mode == "max":
        return torch.where(weights > 0, states, torch.full_like(states, -1e9)).amax(1)
    total, count = (states * weights).sum(1), weights.sum(1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def _layers(torch: Any, pipeline: Pipeline) -> Sequence[Any]:
    layers = []
    for dense in pipeline.dense:
        weight, bias = read_linear(dense)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        linear.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
        layers.append(torch.nn.Sequential(linear, getattr(torch.nn, dense.activation)()).eval())
    return layers


class Head(NamedTuple):
    """What a model is imported for. `loader`: an auto class; `code`: whether it runs the folder's own code."""

    task: Task
    loader: str
    code: bool = False


def find_head(transformers: Any, folder: Folder, options: ImportOptions) -> Head:
    """Return what the folder's model is. Raises Failure(INVALID) for others, and for code that is not allowed."""
    model_type = str(folder.config.get("model_type"))
    known = model_type in transformers.CONFIG_MAPPING
    head = (known and _of_tables(model_type, folder)) or _of_code(folder, known=known)
    if not head:
        raise _refusal(transformers, model_type, folder, known=known)
    if head.code and not options.allow_code:
        raise invalid(
            f"the folder's model is code of its own ({folder.code}), which is not run unless it is allowed: push it "
            "with --allow-code if you trust it"
        )
    return head


def _tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of transformers: model_type -> name of a class, or names."""
    from transformers.models.auto import modeling_auto

    return {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}


def _named(table: Mapping[str, Any], model_type: str) -> tuple[str, ...]:
    names = table.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _of_tables(model_type: str, folder: Folder) -> Head | None:
    tables = _tables()
    for loader, (task, table) in _LOADERS.items():
        classes = _named(tables[table], model_type)
        if loader == "AutoModel" and folder.config.get("is_encoder_decoder") is True:
            continue  # its states are those of the decoder
        # The modules of sentence-transformers, and a file that names no architecture, mean the model without a head.
        base = task == "embeddings" and (folder.pipeline is not None or not folder.architecture)
        if folder.architecture in classes or (base and classes):
            return Head(task, loader)
    return None


def _of_code(folder: Folder, *, known: bool) -> Head | None:
    """Return the head whose class is code of the folder: auto_map says which auto class loads it."""
    auto_map = folder.config.get("auto_map")
    classes = auto_map if isinstance(auto_map, dict) else {}
    loaders = [name for name, path in classes.items() if str(path).rpartition(".")[2] == folder.architecture]
    if not loaders and not known and "AutoModel" in classes:
        loaders = ["AutoModel"]
    loader = next((name for name in loaders if name in _LOADERS), None)
    return Head(_LOADERS[loader][0], loader, code=True) if loader is not None else None


def _refusal(transformers: Any, model_type: str, folder: Folder, *, known: bool) -> Failure:
    if not known and not folder.code:
        return invalid(
            f"transformers {transformers.__version__} does not know the model_type {model_type[:80]!a} of config.json: "
            "export the model to ONNX where it runs"
        )
    architecture = folder.architecture
    tables = {name: table for name, table in _tables().items() if name.startswith("MODEL_")}
    its_own = [name for name, table in tables.items() if architecture in _named(table, model_type)]
    if not its_own and any(architecture in _named(table, other) for table in tables.values() for other in table):
        return invalid(
            f"config.json names the model_type {model_type[:80]!a} and the architecture {architecture[:80]!a}, "
            "which is of another model_type"
        )
    tasks = [name.removeprefix("MODEL_").removesuffix("_MAPPING_NAMES") for name in its_own]
    tasks.sort(key=lambda task: task == "FOR_PRETRAINING")  # which repeats the others: language models are there, too
    what = f", a model {tasks[0].lower().replace('_', ' ')}" if tasks else ""
    if folder.config.get("is_encoder_decoder") is True:
        what = ", an encoder with a decoder"
    return invalid(
        f"config.json names the architecture {architecture[:80]!a}{what}: imported are models "
        "that transformers' AutoModel and its AutoModelFor{Sequence,Token,Image,Audio}Classification load. "
        "Export another model yourself with torch.onnx.export(model, (inputs,), 'model.onnx', dynamo=True)"
    )


class HeadAnswer(NamedTuple):
    """What a head answers. `classes` None: its numbers."""

    classes: Classes | None
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def answer_of(config: Any, task: Task, count: int) -> HeadAnswer:
    """Return what a head answers, as transformers' pipelines do. Raises Failure(INVALID) for labels that do not fit.

    Args:
        config: of the loaded model.
        task: of its head.
        count: numbers that the head computes for a text, or for a token.
    """
    if task == "embeddings":
        return HeadAnswer(None)
    labels = _labels(getattr(config, "id2label", None) or {}, count)
    problem = getattr(config, "problem_type", None) if task != "token-classification" else None
    named = ", ".join(labels[:_LABELS_NOTED]) + (", …" if count > _LABELS_NOTED else "")
    if problem == "regression" or (count == 1 and problem is None):
        return HeadAnswer(None, notes=(f"`{LOGITS}` has the numbers that the model computes: {named}.",))
    scores: Literal["softmax", "sigmoid"] = "sigmoid" if problem == "multi_label_classification" else "softmax"
    what = "the best" if scores == "softmax" else f"the best {min(count, ANSWERED_MAX)}"
    note = f"Label and score of {what} of {count} classes are answered ({named}); `{LOGITS}` if a request names it."
    return HeadAnswer(Classes(output=LOGITS, scores=scores), labels, (note,))


def _labels(id2label: Mapping[Any, Any], count: int) -> tuple[str, ...]:
    """Return the label of each class. Raises Failure(INVALID)."""
    if sorted(id2label) != list(range(count)):
        missing = min(set(range(count)) - set(id2label), default=None)
        what = f"has no label for class {missing}" if missing is not None else f"has {len(id2label)} labels"
        raise invalid(f"id2label of config.json {what}, and the model has {count} classes, 0 to {count - 1}")
    labels = []
    for at in range(count):
        label = id2label[at]
        text = str(label).strip() if isinstance(label, str | int | float) else ""
        if not text or any(unicodedata.category(character) in _NO_TEXT for character in text):
            raise invalid(f"id2label of config.json: the label of class {at}, {str(label)[:80]!a}, is no line of text")
        if len(text) > LABEL_CHARACTERS_MAX:
            raise invalid(
                f"id2label of config.json: the label of class {at} has {len(text)} characters, more than "
                f"{LABEL_CHARACTERS_MAX}"
            )
        labels.append(text)
    return tuple(labels)
