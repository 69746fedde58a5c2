"""The inputs of a race: split for calibration and judging, or drawn from the signature, and written for its processes.

samples ─> calibration | judged (others, if there are enough) ─> timed, alone, neighbours
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.plugins.compile.candidate import Bounds
from millstream.plugins.compile.race.bounds import sampled
from millstream.plugins.compile.race.gate import neighbours
from millstream.services.model.agreement import Array
from millstream.services.model.datatypes import BYTES, FLOATS, NUMPY
from millstream.services.model.samples import Samples, stored
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs

#: Upper bounds of random integers, tried from the largest: a token id beyond the model's embedding fails its run, and
#: no signature gives the size of the embedding.
INTEGERS_MAX = (30_000, 1000, 100, 10, 2, 1)
RANDOM_ROWS = 64
ALONE_ROWS_MAX = 16  # judged one by one
EXTREME_SIZES = (1, 4, 16)  # of batches, in which libraries may take other kernels
BATCH_ROWS_MIN = 4  # of the runs that are judged, where the version takes as many
_ONES = ("mask",)
_ZEROS = ("token_type", "segment")


class Split(NamedTuple):
    """Samples for calibration, and others by which candidates are judged.

    Args:
        calibration: input -> array.
        judged: calls; of a version that batches one, with all its rows.
        disjoint: no sample is in both.
    """

    calibration: dict[str, Array]
    judged: tuple[dict[str, Array], ...]
    disjoint: bool


def write_samples(path: Path, inputs: Mapping[str, Array]) -> None:
    """Write inputs as `read_inputs` reads them. Raises OSError."""
    arrays = stored(Samples(dict(inputs), {}))
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def rows_of(inputs: Mapping[str, Array], rows: int, first: int = 0) -> dict[str, Array]:
    """Return `rows` rows from the row `first` on; after the last row comes the first one."""
    return {
        name: np.ascontiguousarray(np.take(array, range(first, first + rows), axis=0, mode="wrap"))
        for name, array in inputs.items()
    }


def split(inputs: Mapping[str, Array], signature: Signature, judged_max: int) -> Split:
    """Return the samples for calibration and, apart from them, at most `judged_max` rows that are judged.

    Every second row is judged, so that sorted samples are in both parts. A single sample is in both.
    """
    if not signature.batching:
        return Split(dict(inputs), (dict(inputs),), disjoint=False)
    count = len(next(iter(inputs.values())))
    if count == 1:
        return Split(dict(inputs), (dict(inputs),), disjoint=False)
    judged = {name: np.ascontiguousarray(array[1::2][:judged_max]) for name, array in inputs.items()}
    return Split({name: np.ascontiguousarray(array[::2]) for name, array in inputs.items()}, (judged,), disjoint=True)


def draw(signature: Signature, rows: int, seed: int, size: int, integers_max: int) -> dict[str, Array]:
    """Return random inputs without optional ones, equal for equal arguments.

    Floats are normal; integers are from 0 to `integers_max` - 1; masks are ones, token types zeros.

    Args:
        signature: of the version.
        rows: dimension 0 if the version batches.
        seed: of the numbers.
        size: every other variable dimension.
        integers_max: upper bound of integers.
    """
    random = np.random.default_rng([seed, rows, size])
    drawn: dict[str, Array] = {}
    for spec in needed_inputs(signature):
        shape = [size if dim == -1 else dim for dim in spec.shape]
        if signature.batching:
            shape[0] = rows
        drawn[spec.name] = _drawn(spec, shape, random, integers_max)
    return drawn


def _drawn(spec: TensorSpec, shape: Sequence[int], random: np.random.Generator, integers_max: int) -> Array:
    if spec.datatype == BYTES:
        words = np.array([str(number).encode() for number in range(100)], dtype=object)
        return random.choice(words, shape)
    dtype = NUMPY[spec.datatype]
    if spec.datatype in FLOATS:
        numbers = np.asarray(random.standard_normal(shape, np.float32))
        return (numbers.view(np.uint32) >> 16).astype(np.uint16) if spec.datatype == "BF16" else numbers.astype(dtype)
    name = spec.name.lower()
    if any(word in name for word in _ONES):
        return np.ones(shape, dtype)
    if any(word in name for word in _ZEROS):
        return np.zeros(shape, dtype)
    above = 2 if spec.datatype == "BOOL" else min(integers_max, int(np.iinfo(dtype).max))
    return random.integers(0, above, shape).astype(dtype)


class SampleFiles(NamedTuple):
    """Samples in files.

    Args:
        folder: of the files, and for what is made meanwhile.
        calibration: for compilations.
        digest: of the calibration samples.
        judged: calls whose outputs are compared; of a version that batches one, with all its rows.
        timed: what is measured.
        alone: the first rows of `judged`, run one by one.
        neighbours: two batches that differ in all rows but the first; empty for a version that does not batch.
        batch_rows: of the runs that are judged.
        sizes: of the batches in which extremes are judged.
        ranges: of the samples: bounds of floats, and of all numbers.
    """

    folder: Path
    calibration: Path
    digest: str
    judged: tuple[Path, ...]
    timed: Path
    alone: Path
    neighbours: tuple[Path, ...]
    batch_rows: int
    sizes: tuple[int, ...]
    ranges: tuple[Bounds, Bounds]


def write_timed(folder: Path, inputs: Mapping[str, Array], signature: Signature, rows: int) -> Path:
    """Write the inputs that are measured: `rows` rows. Raises OSError."""
    path = folder / "timed.npz"
    write_samples(path, rows_of(inputs, rows) if signature.batching else inputs)
    return path


def write_files(folder: Path, signature: Signature, samples: Split, sizes: Sequence[int], rows_max: int) -> SampleFiles:
    """Write all files. Raises OSError.

    Args:
        folder: of the race's unfinished work.
        signature: of the version.
        samples: inputs.
        sizes: batch sizes that are measured.
        rows_max: most rows of a run.
    """
    batch_rows = min(rows_max, max(BATCH_ROWS_MIN, *sizes)) if signature.batching else 1
    calibration = folder / "calibration.npz"
    write_samples(calibration, samples.calibration)
    judged = tuple(folder / f"judged-{at}.npz" for at in range(len(samples.judged)))
    for path, inputs in zip(judged, samples.judged, strict=True):
        write_samples(path, inputs)
    first = samples.judged[0]
    alone = judged[0]
    pair: tuple[Path, ...] = ()
    if signature.batching:
        alone = folder / "alone.npz"
        write_samples(alone, {name: array[:ALONE_ROWS_MAX] for name, array in first.items()})
        once, again = pair = folder / "once.npz", folder / "again.npz"
        batch = rows_of(first, batch_rows)
        write_samples(once, batch)
        write_samples(again, neighbours(batch, {spec.name: spec.datatype for spec in signature.inputs}))
    digest = hashlib.sha256(calibration.read_bytes()).hexdigest()
    timed = write_timed(folder, first, signature, max(sizes))
    every = (samples.calibration, *samples.judged)
    ranges = sampled(signature, every), sampled(signature, every, integers=True)
    tried = tuple(sorted({min(rows_max, rows) for rows in EXTREME_SIZES})) if signature.batching else (1,)
    return SampleFiles(folder, calibration, digest, judged, timed, alone, pair, batch_rows, tried, ranges)
