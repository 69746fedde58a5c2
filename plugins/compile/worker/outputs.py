"""Outputs in a file: numbers as they are, text as its raw form with its shape, so that no pickle is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millstream.plugins.compile.worker.messages import ANSWER_BYTES_MAX
from millstream.services.model.datatypes import decode_elements, encode_elements
from millstream.services.model.npz import read_npz
from millstream.workers.backends.base import Array

ARRAYS_MAX = 4096


def write_outputs(path: Path, outputs: Sequence[Array]) -> None:
    """Write outputs. Raises OSError."""
    arrays: dict[str, Array] = {}
    for at, array in enumerate(outputs):
        if array.dtype == object:
            raw = encode_elements(array.ravel().tolist())
            arrays[f"text{at}"] = np.frombuffer(raw, np.uint8)
            arrays[f"shape{at}"] = np.array(array.shape, np.int64)
        else:
            arrays[f"array{at}"] = array
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_outputs(path: Path) -> list[Array]:
    """Return outputs. Raises OSError, ValueError: another process wrote the file, which may be anything."""
    if path.is_symlink() or not path.is_file():
        raise ValueError("there are none")
    arrays = read_npz(path, ANSWER_BYTES_MAX, ARRAYS_MAX)
    outputs: list[Array] = []
    for at in range(len(arrays)):
        if f"array{at}" in arrays:
            outputs.append(arrays[f"array{at}"])
        elif f"text{at}" in arrays and f"shape{at}" in arrays:
            elements = decode_elements(arrays[f"text{at}"].tobytes())
            text = np.empty(len(elements), dtype=object)
            text[:] = elements
            outputs.append(text.reshape([int(size) for size in arrays[f"shape{at}"].ravel()]))
    return outputs
