"""Fills runs up to the numbers of rows that a library compiled for. Pure."""

from __future__ import annotations

import numpy as np

from millstream.workers.backends.base import Array


def padded(array: Array, rows: int) -> Array:
    """Return `array` with its last row repeated up to `rows`; filled with zeros if it has no row."""
    if len(array) == rows:
        return array
    shape = (rows - len(array), *array.shape[1:])
    more = np.broadcast_to(array[-1:], shape) if len(array) else np.zeros(shape, array.dtype)
    return np.concatenate([array, more])
