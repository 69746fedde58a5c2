"""Draws inputs for samples: floats around zero, integers 0 and 1, short words. Equal for equal arguments. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from millstream.services.errors import invalid
from millstream.services.ingest.importers import Array

ROWS = 4
#: sizes to try for variable dimensions other than the first, most likely first
_SIZES = (8, 16, 32, 224, 1, 128)
_ELEMENTS_MAX = 1 << 24
_WORDS = np.array(["a", "b", "red", "green", "Bremen", "0", "1"])
Answer = TypeVar("Answer")


class Drawn(NamedTuple):
    """An input to draw. `dims`: None for a variable size; `dtype`: numpy's name, "str" for text."""

    dtype: str
    dims: tuple[int | None, ...]


def draw(tensors: Mapping[str, Drawn], rows: int, size: int) -> dict[str, Array]:
    """Return arrays with `rows` in variable first dimensions and `size` in the others. Raises Failure(INVALID)."""
    generator = np.random.default_rng([rows, size])
    return {name: _draw(name, tensor, rows, size, generator) for name, tensor in tensors.items()}


def answered(tensors: Mapping[str, Drawn], ask: Callable[[Mapping[str, Array]], Answer]) -> tuple[Any, Answer]:
    """Return the first inputs that `ask` answers, and its answer. Raises Failure(INVALID) with its first error."""
    errors: list[str] = []
    for size in _SIZES:
        inputs = draw(tensors, ROWS, size)
        try:
            return inputs, ask(inputs)
        except Exception as error:  # of any library: a size that does not fit
            errors.append(" ".join(str(error).split())[:300] or type(error).__name__)
        if all(None not in tensor.dims[1:] for tensor in tensors.values()):
            break
    raise invalid(f"the model answers no generated input: {errors[0]}")


def _draw(name: str, tensor: Drawn, rows: int, size: int, generator: np.random.Generator) -> Array:
    first, rest = tensor.dims[:1], tensor.dims[1:]
    shape = tuple(rows if dim is None else dim for dim in first) + tuple(size if dim is None else dim for dim in rest)
    if math.prod(shape) > _ELEMENTS_MAX:
        raise invalid(f"input {name[:80]!r} of shape {list(shape)} is too large to try")
    if tensor.dtype == "str":
        return generator.choice(_WORDS, shape)
    dtype = np.dtype(tensor.dtype)
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)
