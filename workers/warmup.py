"""The requests that a version must have answered before it is ready, as its config describes them.

config.warmup ─> arrays (zeros, random numbers, a file's bytes) ─> runs; one that fails, fails the load
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from services.bytes_tensor import decode_elements
from services.datatypes import BYTES, NUMPY
from services.errors import Code, Failure
from services.manifest import Manifest, Warmup, WarmupInput
from services.version_files import read_inside
from services.warmup import INPUT_BYTES_MAX
from workers.backends.base import Array, Instance
from workers.lease import check_outputs

_SEED = 1


def warm_up(instance: Instance, manifest: Manifest, folder: Path) -> None:
    """Run them all. `folder`: of the version. Raises Failure(MODEL) with the request's name."""
    signature = manifest.signature
    for warmup in manifest.config.warmup:
        rows = max(1, warmup.rows) if signature.batching else 0
        try:
            inputs = {name: _array(made, rows, folder) for name, made in warmup.inputs.items()}
            for _ in range(warmup.count):
                check_outputs(list(instance.run(inputs)), signature, rows)
        except (Failure, OSError, ValueError) as error:
            why = error.message if isinstance(error, Failure) else str(error)
            raise Failure(Code.MODEL, f"warm-up {_named(warmup)} failed: {why}") from error


def _named(warmup: Warmup) -> str:
    return repr(warmup.name[:80])


def _array(made: WarmupInput, rows: int, folder: Path) -> Array:
    """`rows` equal or random rows; 0: the shape is the whole of it. A file holds one row, or all of them."""
    shape = (rows, *made.shape) if rows else made.shape
    size = int(np.prod(shape))
    if made.fill == "file":
        return _from_file(made, rows, folder).reshape(shape)
    random = np.random.default_rng(_SEED)
    if made.datatype == BYTES:
        texts = [b"" if made.fill == "zero" else str(number).encode() for number in random.integers(0, 100, size)]
        array = np.empty(size, dtype=object)
        array[:] = texts
        return array.reshape(shape)
    dtype = np.dtype(NUMPY[made.datatype])
    if made.fill == "zero":
        return np.zeros(shape, dtype)
    if dtype.kind == "f":
        return random.random(shape).astype(dtype)
    if made.datatype == "BF16":  # the upper halves of float32 numbers
        return (random.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return random.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)


def _from_file(made: WarmupInput, rows: int, folder: Path) -> Array:
    assert made.file is not None  # services.manifest sees to it
    raw = read_inside(folder, made.file, INPUT_BYTES_MAX, "warm-up file")
    if made.datatype == BYTES:
        elements = decode_elements(memoryview(raw))
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
    else:
        array = np.frombuffer(raw, NUMPY[made.datatype])
    one = int(np.prod(made.shape))
    return np.tile(array, rows) if rows and array.size == one else array
