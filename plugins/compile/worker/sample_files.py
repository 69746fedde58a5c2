"""The samples of a race as files, which compilations and measuring processes read.

samples ─> calibration | judged (others, if there are enough) ─> timed, alone, neighbours
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.plugins.compile.candidate import Bounds
from millstream.plugins.compile.race.bounds import sampled
from millstream.plugins.compile.race.gate import neighbours
from millstream.plugins.compile.race.samples import Split, rows_of, write_samples
from millstream.services.model.agreement import Array
from millstream.services.model.signature import Signature

ALONE_ROWS_MAX = 16  # judged one by one
EXTREME_SIZES = (1, 4, 16)  # of batches, in which libraries may take other kernels
BATCH_ROWS_MIN = 4  # of the runs that are judged, where the version takes as many


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
