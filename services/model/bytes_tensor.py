"""Converts BYTES tensors: list of byte strings <-> raw form (per element a u32 little-endian length and the bytes).

Pure. Source: Open Inference Protocol v2, binary tensor data extension.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

LENGTH_BYTES = 4  # length field before each element
_U32 = struct.Struct("<I")


def encode_elements(elements: Iterable[bytes]) -> bytes:
    """Return the raw form of elements in row-major order."""
    parts: list[bytes] = []
    for element in elements:
        parts += (_U32.pack(len(element)), element)
    return b"".join(parts)


def decode_elements(raw: bytes | bytearray | memoryview) -> list[bytes]:
    """Return the elements of a raw form. Raises ValueError when a length points past the end."""
    view = memoryview(raw)
    elements: list[bytes] = []
    offset, end = 0, len(view)
    while offset < end:
        if offset + 4 > end:
            raise ValueError("a length is cut off at the end")
        start = offset + 4
        offset = start + _U32.unpack_from(view, offset)[0]
        if offset > end:
            raise ValueError("an element is longer than the bytes that are there")
        elements.append(bytes(view[start:offset]))
    return elements


def end_of_elements(raw: bytes | bytearray | memoryview, offset: int, count: int) -> int:
    """Return the offset behind the `count` elements of a valid raw form that begin at `offset`."""
    for _ in range(count):
        offset += LENGTH_BYTES + _U32.unpack_from(raw, offset)[0]
    return offset
