"""The documents of a race: what is to be raced, what happens meanwhile, what came of it. Pure.

RaceTask (stdin) ─> python -m millstream.plugins.compile.worker ─> RaceEvent, one a line (stdout), last a RaceReport
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from millstream.plugins.compile.candidate import Bounds, Compiled, Flags
from millstream.services.model.manifest import Manifest

BASELINE = "baseline"  # key of the version as it is served without a race
SIZES = (1, 4, 16)  # rows of the batches that are measured
STDERR_CHARACTERS_MAX = 4000  # of one candidate, its end
CANDIDATES_MAX = 64  # of one race; further ones are skipped
RACE_S_MAX = 3600.0  # then the candidates that are left are skipped

Verdict = Literal["won", "lost", "inaccurate", "failed", "skipped", "unavailable"]
#: Where the samples are from: "random" ones were drawn from the signature.
Origin = Literal["uploaded", "import", "random"]


class Gate(BaseModel):
    """What the outputs of a candidate must agree in with those of the baseline."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    cosine_min: float = Field(0.999, ge=-1, le=1, description="Least cosine similarity of each output.")
    agreement_min: float = Field(0.99, ge=0, le=1, description="Least share of rows with the same largest element.")


class RaceTask(BaseModel):
    """A race of one version on one device.

    Args:
        folder: of the version's files, absolute.
        backend: name of the one that serves the version now.
        threads: of the worker that serves it.
        samples: an .npz of inputs; None: those of the import if there are any, else random ones.
        memory_bytes: of each measuring process; 0: no limit. A compilation may use that of two.
        share: it takes a share of the processor, a tenth beside one busy thread; False: the time that others leave.
        targets: names, or keys of candidates; (): all targets that are not experimental.
        serving: keys of candidates that serve the version now: they take part in each race, and need no new consent.
        cache: folder of compiled candidates, kept between races of the same version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest
    folder: Path
    device: str = "cpu"
    backend: str = "onnxruntime"
    threads: int = Field(1, ge=1)
    gate: Gate = Gate()
    samples: Path | None = None
    accept_random_samples: bool = False
    memory_bytes: int = Field(0, ge=0)
    share: bool = False
    targets: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    cache: Path
    seconds_max: float = RACE_S_MAX
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


def _median(ratio: Any) -> Any:
    """Return the ratio of a report of an earlier release, which has an interval beside it."""
    return ratio[0] if isinstance(ratio, list | tuple) and ratio else ratio


class Row(BaseModel):
    """One candidate of a race.

    Args:
        candidate: its key.
        why: of the verdict, one sentence.
        cached: its compiled form was there already; `compile_s` is what it took then.
        rounds: that were measured.
        ratio: times as fast as the baseline, weighted by batch size. None: not measured.
        ratios: batch size -> the same.
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
    cached: bool = False
    size_bytes: int = 0
    rounds: int = 0
    ratio: float | None = Field(None, allow_inf_nan=False)
    ratios: dict[int, Annotated[float, BeforeValidator(_median)]] = {}
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
        baseline: backend and threads of what is served without a race.
        winner: key of the candidate that serves; None: nothing changes.
        why: of there being a winner, or none.
        ratio: times as fast as the baseline; 1 without a winner.
        table: measured batch size -> key of the winner, or BASELINE; empty: nothing changes.
        rows: all candidates, the fastest first.
        baseline_s: batch size -> seconds of a run of the baseline, on this machine as busy as it was.
        seconds: that the race took.
        runtimes: library -> version.
        notes: what a reader must know, such as that samples were random.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = 1
    model: str = ""
    version: int = 0
    baseline: str = ""
    winner: str | None = None
    why: str = ""
    ratio: float = Field(1.0, allow_inf_nan=False)
    table: dict[int, str] = {}
    rows: tuple[Row, ...] = Field((), max_length=CANDIDATES_MAX * 2)
    baseline_s: dict[int, float] = {}
    seconds: float = 0.0
    samples: str = ""
    device: str = "cpu"
    fingerprint: str = ""
    runtimes: dict[str, str] = {}
    seed: int = 0
    notes: tuple[str, ...] = ()

    def row(self, key: str) -> Row | None:
        """Return the row of a candidate."""
        return next((row for row in self.rows if row.candidate == key), None)


class Progress(BaseModel):
    """What a race does.

    Args:
        stage: starting, compiling, judging, measuring or finished.
        candidate: key of the candidate that the stage is about; empty: none.
        done: candidates that reached a verdict, of `total`.
        ratios: key -> ratio so far.
        seconds: since the race began.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    stage: str = ""
    candidate: str = ""
    done: int = 0
    total: int = 0
    ratios: dict[str, float] = {}
    seconds: float = 0.0


class RaceEvent(Progress):
    """A line of the race's output.

    Args:
        report: of the last line.
        error: of the last line: why the race cannot take place, with what to change.
        late: of the last line: other work may have left the race too little time.
    """

    report: RaceReport | None = None
    error: str = ""
    late: bool = False
