"""The documents of a race: what is to be raced, what happens meanwhile, what came of it. Pure.

RaceTask (stdin) ─> python -m millstream.plugins.compile.worker ─> RaceEvent, one a line (stdout), last a RaceReport
A race that cannot take place ends with an event that has `error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millstream.plugins.compile.candidate import Bounds, Compiled, Flags
from millstream.plugins.compile.race.estimate import Estimate
from millstream.services.model.manifest import Manifest

BASELINE = "baseline"  # key of the version as it is served without a race
ROWS_DEFAULT: dict[int, float] = {1: 1.0, 4: 1.0, 16: 1.0}
SIZES_MAX = 8  # batch sizes that are measured
SECONDS_DEFAULT = 120.0
STDERR_CHARACTERS_MAX = 4000  # of one candidate, its end
OVERDUE = 3  # exit code of the process of a race that did not end with its budget
CANDIDATES_MAX = 64  # of one race; further ones are skipped
ESTIMATES_MAX = 1024  # of one race

Verdict = Literal["won", "lost", "inaccurate", "failed", "skipped", "unavailable"]
#: Where the samples are from: "random" ones were drawn from the signature; "none": no input is known that runs.
Origin = Literal["uploaded", "import", "random", "none"]
Stage = Literal["starting", "compiling", "judging", "measuring", "finished"]


class Gate(BaseModel):
    """How far outputs may be from those of the baseline.

    Args:
        cosine_min: least cosine of each output, row by row.
        agreement_min: share of the rows whose largest element stays the largest.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    cosine_min: float = Field(0.999, ge=-1, le=1)
    agreement_min: float = Field(0.99, ge=0, le=1)


class RaceTask(BaseModel):
    """A race of one version on one device.

    Args:
        folder: of the version's files, absolute.
        backend: name of the one that serves the version now.
        threads: of the worker that serves it.
        seconds: the budget. The race ends 10 % later at the latest.
        rows: batch size -> weight: how many runs of the version have this size.
        samples: an .npz of inputs; None: those of the import if there are any, else random ones.
        memory_bytes: of each measuring process, of which there are at most three at once; 0: no limit. A compilation,
            beside which only the baseline's process is left, may use that of two.
        share: it takes a share of the processor, a tenth beside one busy thread; False: the time that others leave.
        targets: names, or keys of candidates; (): all targets that are not experimental.
        serving: keys of candidates that serve the version now: they take part in each race, and need no new consent.
        estimates: by keys of candidates and names of targets, from earlier races on this device.
        cache: folder of compiled candidates, kept between races of the same version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest
    folder: Path
    device: str = "cpu"
    backend: str = "onnxruntime"
    threads: int = Field(1, ge=1)
    seconds: float = Field(SECONDS_DEFAULT, gt=0, le=5 * 86_400)
    rows: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        ROWS_DEFAULT, min_length=1, max_length=SIZES_MAX
    )
    gate: Gate = Gate()
    samples: Path | None = None
    accept_random_samples: bool = False
    memory_bytes: int = Field(0, ge=0)
    share: bool = False
    targets: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    estimates: dict[str, Estimate] = Field({}, max_length=ESTIMATES_MAX)
    cache: Path
    seed: int = Field(0, ge=0)


class OutputFigures(BaseModel):
    """How far one output is from the baseline's, on the judged samples.

    Args:
        cosine: least cosine of a row, or of the whole output where rows have few elements; None: not of floats.
        agreement: share of equal places of the largest element; None: there is no such place.
        distance: Euclidean, relative to the length of the expected output.
        max_abs: largest absolute difference.
        equal: share of equal elements.
        why: why the output is refused; empty: it is not.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    cosine: float | None = None
    agreement: float | None = None
    distance: float | None = None
    max_abs: float | None = None
    equal: float | None = None
    why: str = ""


class Row(BaseModel):
    """One candidate of a race.

    Args:
        candidate: its key.
        why: of the verdict, one sentence.
        estimate_s: what the compilation was expected to take, by earlier races; None: there were none of its target.
        late: its compilation was ended for its time, after `compile_s`.
        cached: its compiled form was there already; `compile_s` is what it took then.
        rounds: that were measured.
        ratio: times as fast as the baseline: the median of the rounds. None: not measured.
        ratio_low: lower end of its 95 % interval.
        ratios: batch size -> median, lower and upper end.
        single: it runs single rows only: rows influence each other.
        bounds: of inputs; the version's own file runs batches with others.
        cosine_min: least of all outputs; None: there are no floats, or it was not judged.
        stderr: the end of what its processes wrote there.
        compiled: what a worker loads, in the folder `folder` of the task's cache.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    target: str
    candidate: str
    flags: Flags = {}
    lossy: bool = False
    verdict: Verdict
    why: str = ""
    compile_s: float = 0.0
    estimate_s: float | None = None
    late: bool = False
    cached: bool = False
    size_bytes: int = 0
    rounds: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratios: dict[int, tuple[float, float, float]] = {}
    single: bool = False
    bounds: Bounds = {}
    cosine_min: float | None = None
    agreement_min: float | None = None
    outputs: dict[str, OutputFigures] = {}
    stderr: str = Field("", max_length=STDERR_CHARACTERS_MAX)
    compiled: Compiled | None = None
    folder: str = ""


class RaceReport(BaseModel):
    """What came of a race.

    Args:
        baseline: backend, threads and datatype of what is served without a race.
        winner: key of the candidate that serves most of the weight; None: nothing changes.
        why: of there being a winner, or none.
        ratio: times as fast as the baseline that `table` is, weighted by batch size; 1 without a winner.
        table: measured batch size -> key of a candidate or BASELINE; empty: nothing changes. See `variant_for`.
        rows: all candidates, the fastest first.
        weights: batch size -> share of the runs.
        baseline_s: batch size -> seconds of a run of the baseline, on this machine as busy as it was.
        seconds: that the race took.
        model_bytes: of the version's files.
        runtimes: library -> version.
        notes: what a reader must know, such as that samples were random.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = 1
    model: str
    version: int
    baseline: str
    winner: str | None = None
    why: str = ""
    ratio: float = 1.0
    table: dict[int, str] = {}
    rows: tuple[Row, ...] = Field((), max_length=CANDIDATES_MAX * 2)
    weights: dict[int, float] = {}
    baseline_s: dict[int, float] = {}
    seconds: float = 0.0
    seconds_max: float = 0.0
    samples: Origin = "none"
    device: str = "cpu"
    fingerprint: str = ""
    model_bytes: int = Field(0, ge=0)
    runtimes: dict[str, str] = {}
    seed: int = 0
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _winner_has_a_row(self) -> Self:
        keys = {row.candidate for row in self.rows if row.compiled is not None} | {BASELINE}
        if unknown := ({self.winner or BASELINE} | set(self.table.values())) - keys:
            raise ValueError(f"{unknown.pop()!r} is no candidate of this race that was compiled")
        return self

    def row(self, key: str) -> Row | None:
        """Return the row of a candidate."""
        return next((row for row in self.rows if row.candidate == key), None)


class RaceEvent(BaseModel):
    """A line of the race's output.

    Args:
        candidate: key of the candidate that the stage is about; empty: none.
        round: how often the candidate has been measured.
        done: candidates that reached a verdict, of `total`.
        ratios: key -> ratio so far.
        seconds: since the race began.
        report: of the last line.
        error: of the last line: why the race cannot take place, with what to change.
        unfinished: of the last line: other work may have left the race too little time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Stage
    candidate: str = ""
    round: int = 0
    done: int = 0
    total: int = 0
    ratios: dict[str, float] = {}
    seconds: float = 0.0
    report: RaceReport | None = None
    error: str = ""
    unfinished: bool = False


def variant_for(table: Mapping[int, str], rows: int) -> str:
    """Return the key that runs a batch of `rows`: that of the smallest measured size that holds it, else the largest.

    BASELINE if the table is empty.
    """
    if not table:
        return BASELINE
    return table[min((size for size in table if size >= rows), default=max(table))]
