"""Counts of each version's requests and runs, from which Triton's statistics and metrics are computed. Pure.

lanes ─> CounterVector by content id ─(files of all gateways, ended ones too)─> Totals ─> recorded() ─> Recorded

The metrics page does not show these names: plugins/compat/triton computes what clients read. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from millstream.services.errors import Code
from millstream.services.metrics.catalogue import Kind, Metric
from millstream.services.metrics.record import Totals

ROWS_EXACT_MAX = 128  # up to this size each size of a run has a series; larger ones are rounded up to powers of two

_CONTENT_LABELS = ("model", "version", "content_id")


class Reason(StrEnum):
    """Why a request failed, as Triton's metrics name it."""

    REJECTED = "REJECTED"  # it waited too long, or too many requests wait
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"  # the model failed
    OTHER = "OTHER"


REASONS: dict[Code, Reason] = {
    Code.OVERLOADED: Reason.REJECTED,
    Code.EXPIRED: Reason.REJECTED,
    Code.CANCELLED: Reason.CANCELED,
    Code.MODEL: Reason.BACKEND,
}


class Field(IntEnum):
    """Fields of REQUESTS. The times are of successful requests; each request counts the times of its whole run."""

    SUCCESS = 0
    SUCCESS_S = 1
    QUEUE_S = 2
    INPUT_S = 3
    INFER_S = 4
    OUTPUT_S = 5
    ROWS = 6
    EXECUTIONS = 7
    FAIL_S = 8
    REJECTED = 9
    CANCELED = 10
    BACKEND = 11
    OTHER = 12


FAILED: dict[Reason, Field] = {reason: Field[reason.name] for reason in Reason}

REQUESTS = Metric(
    "requests",
    Kind.VECTOR,
    "Outcomes of the requests of a content id.",
    _CONTENT_LABELS,
    fields=tuple(Field.__members__),
)
RUNS = Metric(
    "runs",
    Kind.VECTOR,
    "Runs by number of rows, and their times.",
    (*_CONTENT_LABELS, "rows"),
    fields=("COUNT", "INPUT_S", "INFER_S", "OUTPUT_S"),
)
LAST = Metric("last_inference", Kind.LATEST, "When a run last ended, in seconds since the epoch.", _CONTENT_LABELS)
PENDING = Metric("pending", Kind.GAUGE_SUM, "Requests that wait in the gateways' lanes.", _CONTENT_LABELS)


def rows_label(rows: int) -> str:
    """Return the label value under which a run of `rows` rows is counted."""
    return str(rows if rows <= ROWS_EXACT_MAX else 1 << (rows - 1).bit_length())


@dataclass(slots=True)
class Recorded:
    """Counts of all gateways for one content id."""

    values: Sequence[float] = (0.0,) * len(Field)  # by Field
    runs: dict[int, Sequence[float]] = field(default_factory=dict)  # rows -> (count, input_s, infer_s, output_s)
    last: float = 0.0
    pending: float = 0.0

    @property
    def failed(self) -> float:
        return sum(self.values[at] for at in FAILED.values())


def recorded(totals: Totals) -> dict[str, Recorded]:
    """Return the counts by content id (millstream.services.model.manifest.Manifest.content_id)."""
    counts: dict[str, Recorded] = {}
    for key, values in totals.items():
        if len(key.labels) < len(_CONTENT_LABELS):
            continue
        content_id = key.labels[2]
        if key.name == REQUESTS.name and key.slots == REQUESTS.slots:
            counts.setdefault(content_id, Recorded()).values = values
        elif key.name == RUNS.name and key.slots == RUNS.slots and key.labels[3].isdigit():
            counts.setdefault(content_id, Recorded()).runs[int(key.labels[3])] = values
        elif key.name == LAST.name and key.kind is Kind.LATEST:
            counts.setdefault(content_id, Recorded()).last = values[0]
        elif key.name == PENDING.name and key.kind is Kind.GAUGE_SUM:
            counts.setdefault(content_id, Recorded()).pending = values[0]
    return counts
