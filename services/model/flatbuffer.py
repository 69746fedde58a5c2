"""Reads tables of FlatBuffers files without a schema compiler: fields by their number, every offset checked. Pure.

Source: FlatBuffers, "Internals": tables, vtables, vectors, strings.
"""

from __future__ import annotations

import struct

Data = bytes | memoryview

_VTABLE_BYTES_MAX = 4096
TEXT_BYTES_MAX = 4096
ELEMENTS_MAX = 1 << 20


class NoTable(Exception):
    """The bytes are no table, or no field of the type that is read."""


class CutShort(Exception):
    """A table refers to bytes beyond the end of the file."""


class Table:
    """A table in `data`, whose fields are numbered from 0. Its methods raise NoTable and CutShort.

    Args:
        position: of the table; None: that of the root table.
    """

    def __init__(self, data: Data, position: int | None = None) -> None:
        self._data = data
        self._position = self._read("<I", 0) if position is None else position
        self._vtable = self._position - self._read("<i", self._position)
        self._vtable_bytes = self._read("<H", self._vtable)
        if not 4 <= self._vtable_bytes <= _VTABLE_BYTES_MAX or self._vtable_bytes % 2:
            raise NoTable

    def _read(self, layout: str, at: int) -> int:
        size = struct.calcsize(layout)
        if at < 0 or at + size > len(self._data):
            raise NoTable
        (value,) = struct.unpack_from(layout, self._data, at)
        return int(value)

    def _at(self, field: int) -> int:
        slot = 4 + 2 * field
        offset = self._read("<H", self._vtable + slot) if slot < self._vtable_bytes else 0
        return self._position + offset if offset else 0

    def _target(self, at: int) -> int:
        target = at + self._read("<I", at)
        self.check_end(target + 4)
        return target

    def check_end(self, end: int) -> None:
        """Raise CutShort if the file ends before `end`."""
        if end > len(self._data):
            raise CutShort

    def has(self, *fields: int) -> bool:
        """Return whether the table has all these fields."""
        return all(map(self._at, fields))

    def number(self, field: int, layout: str) -> int:
        """Return a number with this layout of struct; 0 if the table has none."""
        at = self._at(field)
        return self._read(layout, at) if at else 0

    def vector(self, field: int) -> tuple[int, int]:
        """Return where the elements of a vector begin, and how many there are; 0, 0 if the table has none."""
        at = self._at(field)
        if not at:
            return 0, 0
        start = self._target(at)
        return start + 4, self._read("<I", start)

    def bytes(self, at: int, count: int) -> bytes:
        """Return `count` bytes of the file."""
        self.check_end(at + count)
        return bytes(self._data[at : at + count])

    def text(self, field: int) -> str:
        """Return a text; empty if the table has none."""
        at = self._at(field)
        return self._text(self._target(at)) if at else ""

    def _text(self, start: int) -> str:
        count = self._read("<I", start)
        if count > TEXT_BYTES_MAX:
            raise NoTable
        return self.bytes(start + 4, count).decode(errors="replace")

    def texts(self, field: int) -> tuple[str, ...]:
        """Return a vector of texts."""
        return tuple(self._text(at) for at in self._targets(field))

    def tables(self, field: int) -> list[Table]:
        """Return a vector of tables."""
        return [Table(self._data, at) for at in self._targets(field)]

    def numbers(self, field: int) -> list[int]:
        """Return a vector of 32-bit integers."""
        start, count = self._elements(field)
        return [self._read("<i", start + 4 * index) for index in range(count)]

    def _targets(self, field: int) -> list[int]:
        start, count = self._elements(field)
        return [self._target(start + 4 * index) for index in range(count)]

    def _elements(self, field: int) -> tuple[int, int]:
        start, count = self.vector(field)
        if count > ELEMENTS_MAX:
            raise NoTable
        self.check_end(start + 4 * count)
        return start, count
