"""Recognises files that are uploaded in place of a model, by their content, and says what to do with them.

first bytes ─> a row of the table? ─> "this is a pickle, not an ONNX model: …"
           └─> zip: its members' names; gzip, bzip2, xz, zlib: the first bytes inside; ONNX: whether it is complete
No content is executed, unpickled or unpacked to disk. Imported by the command line: the standard library is enough.
What files of frameworks are, plug-ins say. Sources: the formats' specifications and writers (pickle.py, git-lfs).
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from millstream.services.ingest.importers import importers
from millstream.services.model.formats import format_of
from millstream.services.model.onnx_file import GRAPH_FIELD, MODEL_FIELDS, fields
from millstream.services.plugin.registry import contributions

#: bytes that are read from the start of a file, and of a compressed file's content
HEAD_BYTES = 64 << 10
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
#: names of a zip that are looked at
_NAMES_MAX = 10_000
_TEXT_BYTES_MIN = 4  # shorter files are called text only if they are nothing else
_EXCERPT_CHARACTERS = 60
_XZ_MEMORY_BYTES_MAX = 64 << 20


class FileKind(NamedTuple):
    """What a file is, and what its owner can do."""

    name: str
    advice: str


class FileKinds(NamedTuple):
    """Kinds of files that the core knows, or a plug-in. None of them is what can be served.

    Args:
        magic: first bytes that belong to one kind alone.
        flatbuffers: bytes 4 to 8 of FlatBuffers files, which name their schema.
        members: regular expressions of a member's name in a zip or tar; the first that matches counts.
        pickled: modules that pickles of a library's models name.
        recognise: of the first bytes, and the size of the file where it is known.
    """

    magic: tuple[tuple[bytes, FileKind], ...] = ()
    flatbuffers: Mapping[bytes, FileKind] = {}
    members: tuple[tuple[str, FileKind], ...] = ()
    pickled: tuple[tuple[bytes, FileKind], ...] = ()
    recognise: Callable[[bytes, int | None], FileKind | None] = lambda _head, _size: None


_LFS = FileKind("a Git LFS pointer", "run `git lfs pull` in its repository to get the model itself")
_DVC = FileKind("a DVC pointer", "run `dvc pull` in its repository to get the model itself")
_HTML = FileKind(
    "an HTML page",
    "the download returned a sign-in or error page: download it again (`curl -fL`), and push the model again",
)
_STORAGE_ERROR = FileKind(
    "an error message of an object store", "download the file again with the right key, and push the model again"
)
_XML = FileKind("XML", "export the model to ONNX")
_JSON = FileKind("JSON", "push the model's ONNX file; its configuration goes to --config")
_ONNX_TEXT = FileKind(
    "a model in ONNX's text form", "save it in binary form: onnx.save(onnx.parser.parse_model(text), …)"
)
_PICKLE = FileKind("a pickle", "load it where it was made and export the model to ONNX")
_TENSORRT = FileKind(
    "a TensorRT engine",
    "push the ONNX file it was built from: a worker with the device tensorrt builds the engine for its own GPU",
)
_ORT_FORMAT = FileKind("a model in ONNX Runtime's ORT format", "push the ONNX file it was converted from")
_NUMPY = FileKind("an array of numpy", "push a model: `millstream predict` takes arrays")
_PARQUET = FileKind("a Parquet file", "push a model: this is data")
_IMAGE = FileKind("an image", "push a model: images are inputs")
_PDF = FileKind("a PDF file", "push the model's ONNX file")
_PROGRAM = FileKind("a program or library", "push the model's ONNX file")
_WHEEL = FileKind("a Python package", "push the model's ONNX file")
_SCRIPT = "export the model to ONNX and push that file"

#: to an upload of a pickle that may not be loaded
PICKLE_REFUSAL = (
    "this is a pickle, which can execute code when it is loaded: if you trust where it is from, push it with "
    "--allow-pickle (allow_pickle=true), and it is loaded in a sandbox, by a list of classes; or save the model in a "
    "format without code: skops for scikit-learn, save_model for XGBoost, LightGBM and CatBoost"
)

_IR_VERSION = re.compile(rb"<\s*ir_version\s*:")
_JSON_START = re.compile(rb'[{\[]\s*["{\[\d\]}]')
_PICKLE_TEXT = re.compile(rb"\(?(?:[dlt]p\d*\n|c[A-Za-z_][\w.]*\n\w+\n)")
_PICKLE_PROTOCOLS = range(2, 6)
_IR_VERSION_KEY = b"\x08"  # field 1, the first that writers of protobuf write
_FIELDS_MAX = 10_000  # files with more top-level fields are left to the model check


def _of_markup(head: bytes, _size: int | None) -> FileKind | None:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:4096]
    lower = start.lower()
    if lower.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<!--")):
        return _HTML
    if lower.startswith(b"<?xml"):
        return _HTML if b"<html" in lower else _STORAGE_ERROR if b"<error>" in lower else _XML
    if _IR_VERSION.match(start):
        return _ONNX_TEXT
    return _JSON if _JSON_START.match(start) and _is_text(head) else None


_OWN = FileKinds(
    magic=(
        (b"version https://git-lfs.github.com/spec/", _LFS),
        (b"outs:\n- md5:", _DVC),
        (b"ftrt", _TENSORRT),
        (b"ptrt", _TENSORRT),
        (b"\x93NUMPY", _NUMPY),
        (b"PAR1", _PARQUET),
        (b"\x7fELF", _PROGRAM),
        (b"MZ\x90\x00", _PROGRAM),
        (b"\xcf\xfa\xed\xfe", _PROGRAM),
        (b"\x89PNG\r\n", _IMAGE),
        (b"\xff\xd8\xff", _IMAGE),
        (b"%PDF-", _PDF),
    ),
    flatbuffers={b"ORTM": _ORT_FORMAT},
    members=(
        (r"[^/]+\.dist-info/.*", _WHEEL),
        (r"(.*/)?[^/]+\.(plan|engine|trt)", _TENSORRT),
        (r"(.*/)?[^/]+\.(pkl|pickle|joblib)", _PICKLE),
        (r"(.*/)?[^/]+\.npy", _NUMPY),
    ),
    recognise=_of_markup,
)


def _kinds() -> list[FileKinds]:
    """Return what plug-ins know, then what the core knows."""
    return [*contributions("file_kinds", FileKinds), _OWN]


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
            return None if format_of(path) else _why_not_zip(path)
        content = _decompressed(head)
        if content is not None:
            return _why_not_compressed(*content)
        if _is_text(head[:4096]) and format_of(path):
            return None
        kind = _kind_of(head, size)
        if kind is not None:
            return _sentence(kind)
        return _why_cut_short(file, size) or _why_text(head)


def why_no_model(names: Iterable[str]) -> str | None:
    """Return what an archive or folder without an ONNX file is, judging by its members' names; None if unknown."""
    members = list(names)
    for pattern, kind in (pair for kinds in _kinds() for pair in kinds.members):
        if any(re.fullmatch(pattern, name) for name in members):
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


def _sentence(kind: FileKind) -> str:
    return f"this is {kind.name}, not an ONNX model: {kind.advice}"


def zip_names(path: Path, names_max: int = _NAMES_MAX) -> list[str]:
    """Return the first names in the zip at `path`; none if it is no zip, or a broken one. Raises OSError."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        if not file.read(4).startswith(_ZIP_MAGIC):
            return []
        try:
            with zipfile.ZipFile(file) as archive:
                return archive.namelist()[:names_max]
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
            return []  # unpacking says how it is broken


def _why_not_zip(path: Path) -> str | None:
    names = zip_names(path)
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


def _kind_of(head: bytes, size: int | None) -> FileKind | None:
    """Return the kind of content that starts with `head`; `size` is None where it is not known."""
    known = _kinds()
    for kinds in known:
        found = next((kind for magic, kind in kinds.magic if head.startswith(magic)), kinds.flatbuffers.get(head[4:8]))
        if found is not None:
            return found
    if is_pickle(head):
        return next((kind for kinds in known for module, kind in kinds.pickled if module in head), _PICKLE)
    return next((kind for kinds in known if (kind := kinds.recognise(head, size)) is not None), None)


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
