"""The v2 datatypes and their representation in memory.

Source: Open Inference Protocol v2, "Tensor Data Types"; ONNX `TensorProto.DataType`.
Raw form: little-endian, row-major, no padding; BYTES elements as a 4-byte little-endian length and the bytes.
BF16 has no numpy dtype: arrays contain its 16 bits as `uint16`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain

import numpy as np

LENGTH_BYTES = 4  # length field before each element
_U32 = struct.Struct("<I")


def encode_elements(elements: Iterable[bytes]) -> bytes:
    """Return the raw form of elements in row-major order."""
    found = list(elements)
    lengths = map(_U32.pack, map(len, found))
    return b"".join(chain.from_iterable(zip(lengths, found, strict=True)))


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


#: v2 datatype -> numpy dtype of its raw form; without BYTES, whose elements differ in length
NUMPY: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}

BYTES = "BYTES"

#: datatypes that a signature may name
DATATYPES = frozenset(NUMPY) | {BYTES}

FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})

#: datatypes without a JSON form (binary only), as in the v2 reference
BINARY_ONLY = frozenset({"FP16", "BF16"})

#: v2 datatype -> bytes of one element; without BYTES
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in NUMPY.items()}

#: largest number of elements of a shape (int64)
ELEMENTS_MAX = 2**63 - 1
