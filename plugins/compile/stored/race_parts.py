"""race_parts: what is read of the reports and events in the documents of races. A document without it is damaged.

report of a race ─> its trials, which estimates of later races are made from (plugins/compile/race/estimate.py)
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

TRIALS_MAX = 128  # of one race
GAINED_NOTHING = frozenset({"failed", "inaccurate"})  # verdicts on candidates that no race is to be spent on first
UNTRIED = frozenset({"skipped", "unavailable"})


class StoredRow(BaseModel):
    """What is read of a row of a report; the rest is passed on."""

    model_config = ConfigDict(extra="allow")

    target: str
    candidate: str
    verdict: str
    why: str = ""
    ratio: float | None = Field(None, allow_inf_nan=False)
    ratio_low: float | None = None
    ratio_high: float | None = None
    cosine_min: float | None = None
    compile_s: float = Field(0.0, allow_inf_nan=False)
    size_bytes: int = 0
    late: bool = False


class StoredReport(BaseModel):
    """What is read of a report; the rest is passed on."""

    model_config = ConfigDict(extra="allow")

    baseline: str | None = None
    winner: str | None = None
    ratio: float = 1.0
    why: str = ""
    table: dict[int, str] = {}
    rows: list[StoredRow] = []
    notes: list[str] = []
    model_bytes: int = 0


class StoredProgress(BaseModel):
    """What is read of an event; the rest is passed on."""

    model_config = ConfigDict(extra="allow")

    stage: str = ""
    candidate: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    ratios: dict[str, float] = {}


class Trial(BaseModel):
    """What one row of a report says of its candidate, for the estimates of later races.

    Args:
        model_bytes: of the version's files; 0: the report does not say.
        seconds: of the compilation.
        late: it was ended for its time, after these seconds.
        gain: times as fast as the baseline, less 1; 0: it was not faster, failed, or its answers were wrong. None: its
            compilation was ended for its time, so that nothing is known.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    target: str
    candidate: str
    model_bytes: int = Field(0, ge=0)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    late: bool = False
    gain: float | None = Field(0.0, ge=0, allow_inf_nan=False)


def trials_of(report: StoredReport) -> tuple[Trial, ...]:
    """Return the trials of a report: its candidates that were compiled, or whose compilation failed."""
    return tuple(
        Trial(
            target=row.target,
            candidate=row.candidate,
            model_bytes=max(0, report.model_bytes),
            seconds=max(0.0, row.compile_s),
            late=row.late,
            gain=_gain(row),
        )
        for row in report.rows[:TRIALS_MAX]
        if row.candidate != row.target and (row.verdict not in UNTRIED or row.compile_s > 0)
    )


def _gain(row: StoredRow) -> float | None:
    if row.late:
        return None
    return 0.0 if row.verdict in GAINED_NOTHING else max(0.0, (row.ratio or 1.0) - 1)
