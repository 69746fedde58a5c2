"""What is peculiar to ONNX Runtime's values and messages, for backends and for the check of uploads.

Imports no ONNX Runtime: the values come from a session of the caller's.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")


def bf16_bits(value: Any) -> Array:
    """Return the 16 bits of each element of a BF16 OrtValue on the CPU; the library refuses `numpy()` for it."""
    array = np.empty(value.shape(), np.uint16)
    if array.size:
        ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


def text_array(elements: Iterable[bytes], shape: tuple[int, ...]) -> Array:
    """Return text as str, the only text that ONNX Runtime's Python API takes. Raises UnicodeDecodeError."""
    return np.array([element.decode() for element in elements], dtype=object).reshape(shape)


def library_message(error: object, path: Path | None, characters_max: int) -> str:
    """Return a library's message on one line, without its prefix and without folder names of the server.

    Args:
        error: an exception or its text.
        path: the model's file, whose folder is removed from the message.
        characters_max: the rest is cut off.
    """
    text = str(error)
    if path is not None:
        text = text.replace(str(path), path.name).replace(str(path.parent), "")
    return " ".join(_PREFIX.sub("", text).split())[:characters_max]
