"""Recognises files that are uploaded in place of a model, by their content, and says what to do with them.

first bytes ─> a row of the table? ─> "this is a pickle, not an ONNX model: …"
           └─> zip: its members' names; gzip, bzip2, xz, zlib: the first bytes inside; ONNX: whether it is complete
No content is executed, unpickled or unpacked to disk. Imported by the command line: the standard library is enough.
Sources: the formats' specifications and writers (pickle.py, torch.save, safetensors, Keras 3, git-lfs, GGUF, TFLite).
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

from millstream.services.ingest.importers import importers
from millstream.services.model.formats import format_of
from millstream.services.model.onnx_file import GRAPH_FIELD, MODEL_FIELDS, fields

#: bytes that are read from the start of a file, and of a compressed file's content
HEAD_BYTES = 64 << 10
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
#: names of a zip that are looked at
_NAMES_MAX = 10_000
_TEXT_BYTES_MIN = 4  # shorter files are called text only if they are nothing else
_EXCERPT_CHARACTERS = 60
_XZ_MEMORY_BYTES_MAX = 64 << 20


class _Kind(NamedTuple):
    """What a file is, and what its owner can do."""

    name: str
    advice: str


_TORCH = "torch.onnx.export(model, (example_input,), 'model.onnx')"
_SCIKIT = "open('model.onnx', 'wb').write(skl2onnx.to_onnx(model, X[:1]).SerializeToString())"
_ONNXMLTOOLS = "onnxmltools.convert_{0}(model, initial_types=[('x', FloatTensorType([None, columns]))])"
_AGAIN = "and push the model again"

_LFS = _Kind("a Git LFS pointer", "run `git lfs pull` in its repository to get the model itself")
_DVC = _Kind("a DVC pointer", "run `dvc pull` in its repository to get the model itself")
_HTML = _Kind(
    "an HTML page", f"the download returned a sign-in or error page: download it again (`curl -fL`), {_AGAIN}"
)
_STORAGE_ERROR = _Kind("an error message of an object store", f"download the file again with the right key, {_AGAIN}")
_OPENVINO = _Kind("an OpenVINO model", "export the model it was converted from to ONNX")
_XML = _Kind("XML", "export the model to ONNX")
_JSON = _Kind("JSON", "push the model's ONNX file; its configuration goes to --config")
_XGBOOST = _Kind("an XGBoost model", f"load it in Python and export it: {_ONNXMLTOOLS.format('xgboost')}")
_LIGHTGBM = _Kind("a LightGBM model", f"load it in Python and export it: {_ONNXMLTOOLS.format('lightgbm')}")
_CATBOOST = _Kind("a CatBoost model", "load it in Python and export it: model.save_model('model.onnx', format='onnx')")
_ONNX_TEXT = _Kind("a model in ONNX's text form", "save it in binary form: onnx.save(onnx.parser.parse_model(text), …)")
_PICKLE = _Kind(
    "a pickle",
    f"load it where it was made and export the model to ONNX, scikit-learn: {_SCIKIT}; PyTorch: {_TORCH}",
)
_PICKLED_SCIKIT = _Kind("a pickle of a scikit-learn model", f"load it where it was made and export it: {_SCIKIT}")
_PICKLED_TORCH = _Kind("a pickle of a PyTorch model", f"load it where it was made and export it: {_TORCH}")
_TORCH_LEGACY = _Kind("a PyTorch file (torch.save)", f"load it into its model class and export it: {_TORCH}")
_TORCHSCRIPT = _Kind("a TorchScript file", f"export the model that it was made from: {_TORCH}")
_TORCH_WEIGHTS = _Kind("a PyTorch file (torch.save)", f"load it into its model class and export it: {_TORCH}")
_TORCH_EXPORTED = _Kind(
    "a program of torch.export of PyTorch 2.7 or earlier",
    "export it again with PyTorch 2.9 or later: torch.export.save(program, 'model.pt2')",
)
_SAFETENSORS = _Kind(
    "a safetensors file", f"it has weights and no graph: load it into its model class and export that: {_TORCH}"
)
_GGUF = _Kind("a GGUF model of llama.cpp", "export the model it was converted from to ONNX")
_KERAS = _Kind("a Keras model", "load it in Keras and export it: model.export('model.onnx', format='onnx')")
_HDF5 = _Kind(
    "an HDF5 file, as Keras writes it", "convert it: python -m tf2onnx.convert --keras model.h5 --output model.onnx"
)
_SAVED_MODEL = _Kind(
    "a TensorFlow SavedModel",
    "push its folder or an archive of what is in it; or convert that: "
    "python -m tf2onnx.convert --saved-model FOLDER --output model.onnx",
)
_FROZEN_GRAPH = _Kind(
    "a TensorFlow graph",
    "convert it: python -m tf2onnx.convert --graphdef graph.pb --inputs x:0 --outputs y:0 --output model.onnx",
)
_TFLITE = _Kind("a TensorFlow Lite model", "convert it: python -m tf2onnx.convert --tflite FILE --output model.onnx")
_TENSORRT = _Kind(
    "a TensorRT engine",
    "push the ONNX file it was built from: a worker with the device tensorrt builds the engine for its own GPU",
)
_ORT_FORMAT = _Kind("a model in ONNX Runtime's ORT format", "push the ONNX file it was converted from")
_COREML = _Kind("a Core ML package", "export the model it was converted from to ONNX")
_MAR = _Kind("a TorchServe archive", f"export its model: {_TORCH}")
_MLFLOW = _Kind("an MLflow model", "log it with mlflow.onnx, or export its model to ONNX")
_NUMPY = _Kind("an array of numpy", "push a model: `millstream predict` takes arrays")
_PARQUET = _Kind("a Parquet file", "push a model: this is data")
_IMAGE = _Kind("an image", "push a model: images are inputs")
_PDF = _Kind("a PDF file", "push the model's ONNX file")
_PROGRAM = _Kind("a program or library", "push the model's ONNX file")
_WHEEL = _Kind("a Python package", "push the model's ONNX file")
_SCRIPT = "export the model to ONNX and push that file"

#: to an upload of a pickle that may not be loaded
PICKLE_REFUSAL = (
    "this is a pickle, which can execute code when it is loaded: if you trust where it is from, push it with "
    "--allow-pickle (allow_pickle=true), and it is loaded in a sandbox, by a list of classes; or save the model in a "
    "format without code: skops for scikit-learn, save_model for XGBoost, LightGBM and CatBoost"
)

#: first bytes that belong to one format alone
_MAGIC: tuple[tuple[bytes, _Kind], ...] = (
    (b"version https://git-lfs.github.com/spec/", _LFS),
    (b"outs:\n- md5:", _DVC),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", _TORCH_LEGACY),  # the pickled magic number of torch.save before 1.6
    (b"\x89HDF\r\n\x1a\n", _HDF5),
    (b"GGUF", _GGUF),
    (b"ftrt", _TENSORRT),
    (b"ptrt", _TENSORRT),
    (b"\x93NUMPY", _NUMPY),
    (b"PAR1", _PARQUET),
    (b"CBM1", _CATBOOST),
    (b"tree\nversion=", _LIGHTGBM),
    (b"binf", _XGBOOST),
    (b"{L\x00\x00\x00\x00\x00\x00", _XGBOOST),  # UBJSON
    (b"\x7fELF", _PROGRAM),
    (b"MZ\x90\x00", _PROGRAM),
    (b"\xcf\xfa\xed\xfe", _PROGRAM),
    (b"\x89PNG\r\n", _IMAGE),
    (b"\xff\xd8\xff", _IMAGE),
    (b"%PDF-", _PDF),
)
#: bytes 4 to 8 of FlatBuffers files name their schema
_FLATBUFFERS = {b"TFL3": _TFLITE, b"ORTM": _ORT_FORMAT}

_PICKLE_TEXT = re.compile(rb"\(?(?:[dlt]p\d*\n|c[A-Za-z_][\w.]*\n\w+\n)")
_PICKLE_PROTOCOLS = range(2, 6)
#: modules that pickles of a library's models name
_PICKLED = (
    (b"sklearn", _PICKLED_SCIKIT),
    (b"xgboost", _XGBOOST),
    (b"lightgbm", _LIGHTGBM),
    (b"catboost", _CATBOOST),
    (b"torch", _PICKLED_TORCH),
)
_TENSORFLOW_MARKS = (b"VarHandleOp", b"AssignVariableOp", b"MergeV2Checkpoints", b'"\x05serve', b"saved_model")
_IR_VERSION = re.compile(rb"<\s*ir_version\s*:")
_JSON_START = re.compile(rb'[{\[]\s*["{\[\d\]}]')
_FROZEN = re.compile(
    rb"\x0a(?:[\x00-\x7f]|[\x80-\xff][\x01-\x7f])\x0a.{2,64}?\x12.(?:Placeholder|Const|NoOp)", re.DOTALL
)

_IR_VERSION_KEY = b"\x08"  # field 1, the first that writers of protobuf write
_FIELDS_MAX = 10_000  # files with more top-level fields are left to the model check

#: what a member's name says about a zip or tar: regular expression -> kind; the first that matches counts
_MEMBERS: tuple[tuple[re.Pattern[str], _Kind], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"(.*/)?MAR-INF/MANIFEST\.json", _MAR),
        (r"(.*/)?MLmodel", _MLFLOW),
        (r"[^/]+/constants\.pkl", _TORCHSCRIPT),
        (r"([^/]+/)?serialized_exported_program\.(json|pt)", _TORCH_EXPORTED),
        (r"[^/]+/data\.pkl", _TORCH_WEIGHTS),
        (r"model\.weights\.h5", _KERAS),
        (r"(.*/)?saved_model\.pb(txt)?", _SAVED_MODEL),
        (r"(.*/)?(.*\.mlpackage/.*|[^/]+\.mlmodel)", _COREML),
        (r"[^/]+\.dist-info/.*", _WHEEL),
        (r"(.*/)?[^/]+\.(plan|engine|trt)", _TENSORRT),
        (r"(.*/)?[^/]+\.safetensors", _SAFETENSORS),
        (r"(.*/)?[^/]+\.(pt|pth|ckpt|bin)", _TORCH_WEIGHTS),
        (r"(.*/)?[^/]+\.(h5|hdf5)", _HDF5),
        (r"(.*/)?[^/]+\.keras", _KERAS),
        (r"(.*/)?[^/]+\.tflite", _TFLITE),
        (r"(.*/)?[^/]+\.gguf", _GGUF),
        (r"(.*/)?[^/]+\.(pkl|pickle|joblib)", _PICKLE),
        (r"(.*/)?[^/]+\.npy", _NUMPY),
    )
)


def why_not_onnx(path: Path) -> str | None:
    """Return why the file at `path` cannot be served, and what to do; None if it may be ONNX or an archive.

    Unknown content is left to the model check. Raises OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        size = path.stat().st_size
        if not head:
            return "the file is empty: was the export or download complete?"
        if head.startswith(_ZIP_MAGIC):
            return None if format_of(path) else _why_not_zip(file)
        content = _decompressed(head)
        if content is not None:
            return _why_not_compressed(*content)
        kind = _kind_of(head, size)
        if kind is not None:
            return _sentence(kind)
        return _why_cut_short(file, size) or _why_text(head)


def why_no_model(names: Iterable[str]) -> str | None:
    """Return what an archive or folder without an ONNX file is, judging by its members' names; None if unknown."""
    members = list(names)
    for pattern, kind in _MEMBERS:
        name = next((name for name in members if pattern.fullmatch(name)), None)
        if name is not None:
            return _sentence(kind)
    return None


def content_head(path: Path) -> bytes:
    """Return the first bytes of a file, or of its content if it is compressed. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    content = _decompressed(head)
    return head if content is None else content[1]


def is_pickle(head: bytes) -> bool:
    """Return whether a file starts as a pickle does."""
    binary = len(head) > 2 and head[0] == 0x80 and head[1] in _PICKLE_PROTOCOLS
    return binary or _PICKLE_TEXT.match(head) is not None


def _sentence(kind: _Kind) -> str:
    return f"this is {kind.name}, not an ONNX model: {kind.advice}"


def _why_not_zip(file: IO[bytes]) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()[:_NAMES_MAX]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return None  # unpacking says how it is broken
    tops = (names, _without_top(names))
    imported = any(importer.may_be_of(top) for importer in importers().values() for top in tops)
    return None if imported or any(name.endswith(".onnx") for name in names) else why_no_model(names)


def _without_top(names: list[str]) -> list[str]:
    """Return the names below the one folder that an archive consists of; the names themselves if there is none."""
    top = names[0].partition("/")[0] + "/" if names else ""
    if top == "/" or not all(name.startswith(top) for name in names):
        return names
    return [name.removeprefix(top) for name in names if name != top]


def _decompressed(head: bytes) -> tuple[str, bytes] | None:
    """Return the name of the compression and the first bytes of the content; None if `head` is not compressed."""
    for magic, name, decompress in _COMPRESSIONS:
        if not head.startswith(magic):
            continue
        try:
            content = decompress(head)
        except Exception:  # each library raises its own errors for bytes that only look like its format
            return None
        return name, content
    return None


def _gunzip(head: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(head, HEAD_BYTES)


def _inflate(head: bytes) -> bytes:
    return zlib.decompressobj().decompress(head, HEAD_BYTES)


def _bunzip2(head: bytes) -> bytes:
    import bz2

    return bz2.BZ2Decompressor().decompress(head, HEAD_BYTES)


def _unxz(head: bytes) -> bytes:
    import lzma

    return lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES_MAX).decompress(head, HEAD_BYTES)


_COMPRESSIONS: tuple[tuple[bytes | tuple[bytes, ...], str, Callable[[bytes], bytes]], ...] = (
    (b"\x1f\x8b", "gzip", _gunzip),
    (b"BZh", "bzip2", _bunzip2),
    (b"\xfd7zXZ", "xz", _unxz),
    (b"]\x00\x00", "lzma", _unxz),
    ((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "zlib", _inflate),
)


def _why_not_compressed(compression: str, content: bytes) -> str | None:
    """Return why a compressed file cannot be served; None for archives, and for content that is not known."""
    if content[257:262] == b"ustar":
        return None
    kind = _kind_of(content, None)
    if kind is not None:
        return f"this is {kind.name}, compressed with {compression}, not an ONNX model: {kind.advice}"
    if compression in {"gzip", "bzip2", "xz"}:
        tool = {"gzip": "gunzip", "bzip2": "bunzip2", "xz": "unxz"}[compression]
        return f"this is a file compressed with {compression}, no archive: run {tool} and push the ONNX file"
    return None


def _kind_of(head: bytes, size: int | None) -> _Kind | None:
    """Return the kind of content that starts with `head`; `size` is None where it is not known."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[4:8] in _FLATBUFFERS:
        return _FLATBUFFERS[head[4:8]]
    return _pickle(head) or _safetensors(head, size) or _tensorflow(head) or _markup(head)


def _pickle(head: bytes) -> _Kind | None:
    if not is_pickle(head):
        return None
    return next((kind for module, kind in _PICKLED if module in head), _PICKLE)


def _safetensors(head: bytes, size: int | None) -> _Kind | None:
    if len(head) < 10 or head[8:9] != b"{":
        return None
    header_bytes = int.from_bytes(head[:8], "little")
    return _SAFETENSORS if size is None or 2 <= header_bytes <= size - 8 else None


def _tensorflow(head: bytes) -> _Kind | None:
    # SavedModel: schema version 1, then a graph. In an ONNX file this would be IR version 1, of 2017.
    if head.startswith(b"\x08\x01\x12") and any(mark in head for mark in _TENSORFLOW_MARKS):
        return _SAVED_MODEL
    return _FROZEN_GRAPH if _FROZEN.match(head) else None


def _markup(head: bytes) -> _Kind | None:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:4096]
    lower = start.lower()
    if lower.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<!--")):
        return _HTML
    if lower.startswith(b"<?xml"):
        if b"<html" in lower:
            return _HTML
        if b"<error>" in lower:
            return _STORAGE_ERROR
        return _OPENVINO if b"<net " in lower else _XML
    if _IR_VERSION.match(start):
        return _ONNX_TEXT
    if _JSON_START.match(start) and _is_text(head):
        return _XGBOOST if b'"learner"' in start else _JSON
    return None


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # else the head ends within a character
            return False
        text = head[: error.start].decode()
    return all(character.isprintable() or character in "\t\r\n\f" for character in text)


def _why_text(head: bytes) -> str | None:
    if len(head) < _TEXT_BYTES_MIN or not _is_text(head[:4096]):
        return None
    words = " ".join(head[:4096].decode("utf-8", "replace").split())[:_EXCERPT_CHARACTERS]
    return f"this is text, not an ONNX model ({words!r}): {_SCRIPT}"


def _why_cut_short(file: IO[bytes], size: int) -> str | None:
    """Return a message if the file starts with an IR version, as ONNX models do, and ends within a top-level field.

    The keys of the other fields start one in twenty files of any content.
    """
    file.seek(0)
    if file.read(1) != _IR_VERSION_KEY:
        return None
    file.seek(0)
    graph = False
    try:
        for count, (number, wire_type, field_bytes) in enumerate(fields(file)):
            if MODEL_FIELDS.get(number) != wire_type or count == _FIELDS_MAX:
                return None  # not ONNX, or newer than the table
            graph = graph or number == GRAPH_FIELD
            end = file.tell() + (field_bytes if wire_type == 2 else 0)
            if end > size:
                return _cut_short(f"it needs at least {end} bytes and has {size}")
    except EOFError:
        return _cut_short(f"its {size} bytes end within a field")
    except ValueError:
        return None  # not ONNX, or newer than the table
    return None if graph else _cut_short(f"its {size} bytes have no graph")


def _cut_short(how: str) -> str:
    return f"this ONNX model was cut short: {how}; copy or download it again"
