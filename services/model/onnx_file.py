"""Reads the fields of an ONNX file, and finds its external data, without the onnx package and without its weights.

file ─> fields, one after the other; what is nested in them ─> tensors ─> where each has its bytes; the rest is skipped
Sources: onnx.proto (field numbers), Protocol Buffers, "Encoding"; ONNX, docs/ExternalData.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

#: fields of a ModelProto and their wire types
MODEL_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
GRAPH_FIELD = 7
#: of one file, which takes seconds; a model of 100,000 nodes has about 2 million
FIELDS_MAX = 5_000_000
#: graphs may be nested in nodes of graphs; protobuf's own parsers end at 100 messages
_DEPTH_MAX = 100
_VARINT_BYTES_MAX = 10
_TEXT_BYTES_MAX = 1 << 16
_NODE_BYTES_MAX = 1 << 16  # smaller nodes are read at once, which is faster
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1  # of TensorProto.data_location
_NAME, _ENTRY, _LOCATION = 8, 13, 14  # fields of a TensorProto

_GRAPH, _NODE, _ATTRIBUTE, _FUNCTION, _TRAINING, _SPARSE, _TENSOR = range(1, 8)
_MODEL = 0
#: message -> its fields that may have tensors in them -> what they are
_NESTED: Mapping[int, Mapping[int, int]] = {
    _MODEL: {GRAPH_FIELD: _GRAPH, 20: _TRAINING, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _TRAINING: {1: _GRAPH, 2: _GRAPH},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
}


class ExternalTensor(NamedTuple):
    """A tensor that names a file. `external`: whether its bytes are there; ONNX ignores the name otherwise."""

    name: str
    entries: Mapping[str, str]
    external: bool


def external_tensors(path: Path) -> Iterator[ExternalTensor]:
    """Yield the tensors of an ONNX file that name another file.

    Raises ValueError, EOFError for a file that is no ONNX model, or is cut short; OSError.
    """
    with path.open("rb") as file:
        yield from _Reader(file).tensors(_MODEL, path.stat().st_size, 0)


def fields(file: IO[bytes], end: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield number, wire type and size in bytes of each field of a message; a field of bytes begins at `file.tell()`.

    A field of bytes that the caller does not read is skipped. `end`: of the message; None: that of the file. Raises
    ValueError, EOFError.
    """
    while end is None or file.tell() < end:
        key = varint(file, may_end=end is None)
        if key is None:
            return
        number, wire_type = key >> 3, key & 7
        if wire_type == _BYTES:
            size = varint(file)
            assert size is not None
            begin = file.tell()
            if end is not None and begin + size > end:
                raise EOFError
            yield number, wire_type, size
            file.seek(begin + size)
        elif wire_type == _VARINT:
            value = varint(file)
            assert value is not None
            yield number, wire_type, value
        elif wire_type in {_FIXED64, _FIXED32}:
            file.seek(8 if wire_type == _FIXED64 else 4, 1)
            yield number, wire_type, 0
        else:
            raise ValueError(f"wire type {wire_type} is not used by ONNX")


def varint(file: IO[bytes], *, may_end: bool = False) -> int | None:
    """Return the next varint; None at the end of the file if it `may_end` there. Raises EOFError, ValueError."""
    value = 0
    for at in range(_VARINT_BYTES_MAX):
        byte = file.read(1)
        if not byte:
            if may_end and not at:
                return None
            raise EOFError
        value |= (byte[0] & 0x7F) << (7 * at)
        if byte[0] < 0x80:
            return value
    raise ValueError("a varint is longer than 10 bytes")


class _Reader:
    def __init__(self, file: IO[bytes], read: int = 0) -> None:
        self._file = file
        self._read = read  # fields

    def tensors(self, message: int, end: int, depth: int) -> Iterator[ExternalTensor]:
        if depth > _DEPTH_MAX:
            raise ValueError("its graphs are nested too deeply")
        if message == _TENSOR:
            tensor = self._tensor(end)
            if tensor.external or tensor.entries:
                yield tensor
            return
        nested = _NESTED[message]
        for number, wire_type, size in self._fields(end):
            if wire_type != _BYTES or number not in nested:
                continue
            if nested[number] == _NODE and size <= _NODE_BYTES_MAX:
                whole = _Reader(BytesIO(self._file.read(size)), self._read)
                yield from whole.tensors(_NODE, size, depth + 1)
                self._read = whole._read
            else:
                yield from self.tensors(nested[number], self._file.tell() + size, depth + 1)

    def _tensor(self, end: int) -> ExternalTensor:
        name, entries, external = "", {}, False
        for number, wire_type, size in self._fields(end):
            if number == _LOCATION and wire_type == _VARINT:
                external = size == _EXTERNAL
            elif number == _NAME and wire_type == _BYTES:
                name = self._text(size)
            elif number == _ENTRY and wire_type == _BYTES:
                entry = {
                    key: self._text(length)
                    for key, kind, length in self._fields(self._file.tell() + size)
                    if kind == _BYTES
                }
                entries[entry.get(1, "")] = entry.get(2, "")
        return ExternalTensor(name, entries, external)

    def _text(self, size: int) -> str:
        if size > _TEXT_BYTES_MAX:
            raise ValueError(f"a name has {size} bytes")
        return self._file.read(size).decode("utf-8", "surrogateescape")

    def _fields(self, end: int) -> Iterator[tuple[int, int, int]]:
        for field in fields(self._file, end):
            self._read += 1
            if self._read > FIELDS_MAX:
                raise ValueError(f"it has more than {FIELDS_MAX} fields")
            yield field
