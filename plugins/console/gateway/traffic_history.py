"""The last hour of a gateway's machine, in bounded memory: totals, and the busiest models."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import nlargest
from typing import Any, NamedTuple

from millstream.plugins.console.gateway import rates
from millstream.plugins.console.gateway.rates import Growth, Labels
from millstream.services.metrics import catalogue
from millstream.services.wire.records import WorkerRecord

HISTORY_S = 15.0  # between two entries
ENTRIES_MAX = 240
MODELS_MAX = 50  # of an entry, the busiest ones
SERIES = ("requests_per_s", "failed_per_s", "p50_s", "p99_s", "queue_rows", "busy")
_SUMMED = frozenset({"requests_per_s", "failed_per_s", "queue_rows"})

#: values in the order of SERIES; None: not known
Values = tuple[float | None, ...]


class HistoryEntry(NamedTuple):
    """What happened in the HISTORY_S before an instant, in seconds on the monotonic clock: a clock that is set breaks
    no order.

    `models`: those that were called or have requests that wait, the busiest ones. `other`: the values of all others.
    """

    at: float
    totals: Values
    models: dict[str, Values]
    other: Values


class TrafficHistory:
    """Keeps the last ENTRIES_MAX entries."""

    def __init__(self) -> None:
        self._entries: deque[HistoryEntry] = deque(maxlen=ENTRIES_MAX)

    def enter(self, growth: Growth, workers: Iterable[WorkerRecord]) -> None:
        """Add what happened until the second reading."""
        busy = [growth.busy(one.pool, rates.worker_name(one.id)) for one in workers]
        known = [share for share in busy if share is not None]
        totals = rates.totals(growth) | {"busy": sum(known) / len(known) if known else None}
        queued = growth.queued()
        by_model: dict[str, list[Labels]] = {}
        for key in growth.all(catalogue.REQUESTS).keys() | queued.keys():
            by_model.setdefault(key[0], []).append(key)
        found = {
            model: _values(
                rates.figures(growth, versions) | {"queue_rows": sum(queued.get(key, 0) for key in versions)}
            )
            for model, versions in by_model.items()
        }
        busiest = nlargest(MODELS_MAX, found.items(), key=lambda item: (item[1][0] or 0.0, item[1][4] or 0.0))
        other = _NONE if len(found) > MODELS_MAX else _values(rates.figures(growth, ()) | {"queue_rows": 0})
        self._entries.append(HistoryEntry(growth.now.at_s, _values(totals), dict(busiest), other))

    def document(self, epoch: float, model: str | None, sees: Callable[[str], bool] | None) -> dict[str, Any]:
        """Return the series of a model, or of all.

        Args:
            epoch: what added to the monotonic clock gives seconds since the epoch.
            model: its name; None: all models together.
            sees: says of a model whether the caller may read it; None: the caller may read all. The caller may read
                `model`.
        """
        rows = [
            entry.models.get(model, entry.other)
            if model is not None
            else entry.totals
            if sees is None
            else _sum(values for name, values in entry.models.items() if sees(name))
            for entry in self._entries
        ]
        columns = zip(*rows, strict=True) if rows else [()] * len(SERIES)
        series = {name: list(column) for name, column in zip(SERIES, columns, strict=True)}
        return {"step_s": HISTORY_S, "at": [entry.at + epoch for entry in self._entries], **series}


_NONE: Values = (None,) * len(SERIES)


def _values(document: dict[str, Any]) -> Values:
    return tuple(document.get(name) for name in SERIES)


def _sum(rows: Iterable[Values]) -> Values:
    columns = list(zip(*rows, strict=True)) or [()] * len(SERIES)
    return tuple(
        sum(value or 0.0 for value in column) if name in _SUMMED else None
        for name, column in zip(SERIES, columns, strict=True)
    )
