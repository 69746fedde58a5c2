"""Merges the series of several processes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add

from millstream.services.metrics.record import Key

OTHER = "other"  # label value of series beyond a limit


class Totals(dict[Key, list[float]]):
    """Merged values by series."""

    def merge(self, series: Iterable[tuple[Key, list[float]]], *, alive: bool, series_max: int | None = None) -> None:
        """Add the series of a process, gauges only if it is alive; beyond `series_max` they go to the label `other`."""
        for key, values in series:
            if not (alive or key.kind.lasting):
                continue
            if series_max is not None and len(self) >= series_max and key not in self:
                key = Key(key.kind, key.name, (OTHER,) * len(key.labels), key.slots)
            known = self.get(key)
            if known is None:
                self[key] = list(values)
            else:
                self[key] = list(map(max if key.kind.largest else add, known, values))
