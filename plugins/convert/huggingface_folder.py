"""Reads a model folder of Hugging Face without its libraries, and refuses what could not be served. Pure but for reads.

config.json ─> architecture ────────────────────────┐
weights ─> safetensors, with a header that is true ─┼─> Folder
modules.json of sentence-transformers ─> pooling ───┘
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from millstream.plugins.convert.base import path_below, read_json
from millstream.services.errors import invalid
from millstream.services.ingest.importers import Array, ImportOptions

DOCUMENT_BYTES_MAX = 8 << 20
#: numbers in config.json, by their names: layers, heads or labels, and everything else
LAYERS_MAX, COUNT_MAX, SIZE_MAX = 1000, 1_000_000, (1 << 31) - 1
HEADER_BYTES_MAX = 100 << 20  # the limit of the safetensors library
CONFIG, MODULES, TOKENIZER = "config.json", "modules.json", "tokenizer.json"
ADAPTER = "adapter_config.json"  # of peft
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: what transformers and sentence-transformers write beside the weights
_MEMBERS = (
    CONFIG, TOKENIZER, ADAPTER, _INDEX, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer.model", "preprocessor_config.json", "processor_config.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
)  # fmt: skip
_CONVERT = "AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes model.safetensors"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32,
    "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
#: models that number positions from behind that of the padding token: 514 positions are 512 tokens
_POSITIONS_AFTER_PADDING = frozenset({"camembert", "longformer", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})
_ACTIVATIONS = frozenset({"Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU"})
_POOLED = frozenset(_POOLING.values())


class Dense(NamedTuple):
    """A linear layer of sentence-transformers after pooling. `activation`: a class of torch.nn."""

    folder: Path
    activation: str


class Pipeline(NamedTuple):
    """What sentence-transformers does after the encoder, in this order. `pooling`: concatenated, if there are two."""

    pooling: tuple[str, ...]
    dense: tuple[Dense, ...]
    normalize: bool


class Folder(NamedTuple):
    """What a folder says.

    Args:
        path: the folder with the encoder's config.json and weights.
        architecture: the class that config.json names first; "": it names none.
        pipeline: what sentence-transformers does after the encoder; None: it is no folder of that library.
        code: files of Python that config.json names, which transformers would run; "": none.
        pickled: whether the weights are pickles.
        tokens_max: longest sequence that the files name; None: they name none.
        lower_case: whether texts are made lower case before they are tokenized.
    """

    path: Path
    config: Mapping[str, Any]
    architecture: str
    pipeline: Pipeline | None
    code: str
    pickled: bool
    tokens_max: int | None
    lower_case: bool


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder of Hugging Face. Raises OSError."""
    if not path.is_dir():
        return False
    if "sentence_transformers" in _text(path / MODULES):
        return True
    text = _text(path / CONFIG)
    return '"model_type"' in text or ('"architectures"' in text and '"transformers_version"' in text)


def read_folder(path: Path, options: ImportOptions, *, exported: bool = False) -> Folder:
    """Return what the folder says. Raises Failure(INVALID) with what to do.

    `exported`: the model is an ONNX file of the folder, so that its class and its weights do not count.
    """
    modules = _modules(path)
    encoder = path_below(path, str(modules[0].get("path", "")), MODULES) if modules else path
    config = _object(encoder / CONFIG)
    _check_sizes(config)
    sentence = _object(encoder / "sentence_bert_config.json", absent={})
    tokenizer = _object(encoder / "tokenizer_config.json", absent={})
    lengths = [sentence.get("max_seq_length"), tokenizer.get("model_max_length")]
    return Folder(
        encoder,
        config,
        architecture=_architecture(config),
        pipeline=_pipeline(path, modules[1:]) if modules else None,
        code=_code(config),
        pickled=not exported and _check_weights(encoder, options),
        tokens_max=next((length for length in lengths if type(length) is int and 0 < length < 1 << 20), None),
        lower_case=sentence.get("do_lower_case") is True,
    )


def positions_of(config: Mapping[str, Any]) -> int:
    """Return the longest sequence that a model has positions for; 0: any, or not known."""
    positions, padding = config.get("max_position_embeddings"), config.get("pad_token_id")
    found = positions if type(positions) is int else 0
    if config.get("model_type") in _POSITIONS_AFTER_PADDING:
        found -= (padding if type(padding) is int else 1) + 1
    return max(found, 0)


def member_patterns(path: Path, *, exported: bool = False) -> list[str]:
    """Return the files of the model in a folder, as patterns: no data sets, no copies of it for other libraries.

    `exported`: the model is an ONNX file of the folder. Raises Failure(INVALID), OSError.
    """
    modules = _modules(path)
    folders = {path_below(path, str(module.get("path", "")), MODULES) for module in modules} | {path}
    encoder = path_below(path, str(modules[0].get("path", "")), MODULES) if modules else path
    places = {folder: "" if folder == path else f"{escape(folder.relative_to(path).as_posix())}/" for folder in folders}
    found = [MODULES, *(f"{place}{name}" for place in places.values() for name in _MEMBERS)]
    if exported:
        return [*found, *(f"{place}{_WEIGHTS}" for folder, place in places.items() if folder not in {encoder, path})]
    weights = [file.name for file in _weight_files(encoder)] or ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
    code = ["*.py"] if _code(_object(encoder / CONFIG)) else []
    return [*found, *(f"{place}{name}" for place in places.values() for name in (_WEIGHTS, *weights, *code))]


def read_safetensors(path: Path) -> dict[str, Array]:
    """Return the arrays of a file of safetensors, in FP32. Raises Failure(INVALID), OSError."""
    import numpy as np

    check_safetensors(path)
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, about in json.loads(content[8:begin]).items():
        if name == "__metadata__":
            continue
        start, end = (begin + offset for offset in about["data_offsets"])
        if about["dtype"] not in {"F32", "F16", "BF16"}:
            raise invalid(f"{name[:80]!a} of {path.name} is {about['dtype']}: save it as F32")
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[about["dtype"]]
        array = np.frombuffer(content[start:end], kind).reshape(about["shape"])
        if about["dtype"] == "BF16":  # the upper half of an FP32
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array.astype(np.float32)
    return arrays


def read_linear(dense: Dense) -> tuple[Array, Array | None]:
    """Return weight (out, in) and bias of a linear layer. Raises Failure(INVALID) for another layer; OSError."""
    weights = {name.removeprefix("linear."): array for name, array in read_safetensors(dense.folder / _WEIGHTS).items()}
    if set(weights) - {"bias"} != {"weight"} or weights["weight"].ndim != 2:
        raise invalid(f"the weights of the Dense module {dense.folder.name[:80]!a} are not those of one linear layer")
    return weights["weight"], weights.get("bias")


def check_safetensors(path: Path) -> None:
    """Raise Failure(INVALID) if the header of a file of safetensors does not describe its bytes exactly. OSError.

    Source: the format's specification, safetensors/README.md: the tensors cover the buffer without gaps or overlaps.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head.startswith(b"version "):
            raise invalid(f"{path.name} is a Git LFS pointer: run `git lfs pull` in its repository, and push it again")
        length = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= length <= min(size - 8, HEADER_BYTES_MAX):
            raise invalid(f"{path.name} is damaged: its header says {length} bytes, and the file has {size}")
        text = file.read(length)
    try:
        tensors = {name: value for name, value in json.loads(text).items() if name != "__metadata__"}
        spans = sorted((*_span(tensor), name) for name, tensor in tensors.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise invalid(f"{path.name} is damaged: its header cannot be read ({str(error)[:100]})") from error
    end = 0
    for begin, stop, bytes_needed, name in spans:
        if begin != end or stop - begin != bytes_needed:
            raise invalid(f"{path.name} is damaged: its header says a wrong place or size for {name[:80]!a}")
        end = stop
    if end != size - 8 - length:
        raise invalid(f"{path.name} is damaged or cut short: its header describes {end} bytes of {size - 8 - length}")


def _span(tensor: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return where a tensor begins and ends, and how many bytes its shape needs. Raises ValueError, KeyError."""
    begin, end = tensor["data_offsets"]
    shape = tensor["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError("a size is not a whole number")
    return begin, end, math.prod(shape) * _BITS[tensor["dtype"]] // 8


def _check_weights(folder: Path, options: ImportOptions) -> bool:
    """Return whether the weights are pickles. Raises Failure(INVALID) if there are none that may be read."""
    if (folder / ADAPTER).is_file():
        raise invalid(
            f"the folder has an adapter ({ADAPTER}), which would be left out: merge it into the weights, "
            "model.merge_and_unload().save_pretrained(FOLDER) of peft"
        )
    for path in _weight_files(folder):
        check_safetensors(path)
    if (folder / _WEIGHTS).is_file() or (folder / _INDEX).is_file():
        return False
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if not pickled:
        raise invalid(f"the folder has no weights: {_WEIGHTS} is missing")
    if not options.allow_pickle:
        raise invalid(
            f"the folder has its weights as a pickle alone, {pickled[0][:80]}, which could execute anything: "
            f"{_CONVERT}; or allow it with --allow-pickle"
        )
    return True


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        return []
    named = _object(folder / _INDEX).get("weight_map")
    if not isinstance(named, dict):
        raise invalid(f"{_INDEX} has no weight_map")
    files = [path_below(folder, name, _INDEX) for name in sorted(set(map(str, named.values())))]
    for path in files:
        if not path.is_file():
            raise invalid(f"the folder has not all weights: {path.name[:80]} is missing, which {_INDEX} names")
    return files


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _code(config: Mapping[str, Any]) -> str:
    named = config.get("auto_map")
    if not named:
        return ""
    values = named.values() if isinstance(named, dict) else [named]
    files = {re.sub(r".*--|\..*", "", str(value)) + ".py" for value in values}
    return ", ".join(sorted(files))[:200]


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Raise Failure(INVALID) for sizes that no model has: transformers would make layers and labels for hours."""
    below: list[Mapping[str, Any]] = [config]
    while below:
        for key, value in below.pop().items():
            if isinstance(value, dict):
                below.append(value)
            elif type(value) is int and abs(value) > _size_max(key):
                raise invalid(
                    f"config.json says {key[:80]!a} is {str(value)[:30]}, more than {_size_max(key)}: is it damaged?"
                )


def _size_max(key: str) -> int:
    if "layer" in key:
        return LAYERS_MAX
    return COUNT_MAX if key.startswith(("num_", "n_")) else SIZE_MAX


def _modules(path: Path) -> list[dict[str, Any]]:
    if not (path / MODULES).is_file():
        return []
    modules = read_json(path / MODULES, DOCUMENT_BYTES_MAX)
    if not isinstance(modules, list) or not modules or not all(isinstance(one, dict) for one in modules):
        raise invalid(f"{MODULES} is not a list of the modules of sentence-transformers")
    if _kind(modules[0]) != "Transformer":
        raise invalid(
            f"{MODULES} begins with {_kind(modules[0])[:80]!a}: only models that begin with Transformer run here"
        )
    return modules


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _pipeline(path: Path, modules: list[dict[str, Any]]) -> Pipeline:
    pooling: tuple[str, ...] = ()
    dense: list[Dense] = []
    normalize = False
    for module in modules:
        kind = _kind(module)
        folder = path_below(path, str(module.get("path", "")), MODULES)
        if kind == "Pooling" and not pooling:
            pooling = _pooled(_object(folder / CONFIG))
        elif kind == "Dense" and pooling and not normalize:
            dense.append(_dense(folder))
        elif kind == "Normalize" and pooling:
            normalize = True
        elif kind != "Dropout":
            raise invalid(
                f"{MODULES} has the module {kind[:80]!a} at this place: Transformer, Pooling, Dense and Normalize run "
                "here, in this order"
            )
    if not pooling:
        raise invalid(f"{MODULES} has no Pooling: the model gives no vector for a text")
    return Pipeline(pooling, tuple(dense), normalize)


def _pooled(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list):
        modes = [
            _POOLING.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value is True
        ]
    unknown = [str(mode) for mode in modes if mode not in _POOLED]
    if unknown or not modes:
        what = f"pools with {unknown[0][:80]!a}" if unknown else "names no pooling"
        raise invalid(f"the model {what}: {', '.join(sorted(_POOLED))} are supported")
    return tuple(mode for mode in _POOLING.values() if mode in modes)


def _dense(folder: Path) -> Dense:
    config = _object(folder / CONFIG)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise invalid(
            f"the Dense module's activation {activation[:80]!a} is not one of {', '.join(sorted(_ACTIVATIONS))}"
        )
    if not (folder / _WEIGHTS).is_file():
        raise invalid(
            f"{folder.name[:80]} has no {_WEIGHTS}: save the model again with sentence-transformers 3 or later"
        )
    check_safetensors(folder / _WEIGHTS)
    return Dense(folder, activation)


def _object(path: Path, absent: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    if absent is not None and not path.is_file():
        return absent
    document = read_json(path, DOCUMENT_BYTES_MAX)
    if not isinstance(document, dict):
        raise invalid(f"{path.name} is not a JSON object")
    return document


def _text(path: Path) -> str:
    """Return the beginning of a file; "" if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(1 << 20).decode(errors="replace")
