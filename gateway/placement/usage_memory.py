"""Remembers how versions were used that no worker has any more, for the next worker that loads them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from millstream.services.wire.records import InstanceRecord, WorkerRecord

VERSIONS_MAX = 20_000  # the one that was unloaded or changed first is forgotten


class _Known(NamedTuple):
    last_used: float
    usage: dict[str, float]


class UsageMemory:
    """The last known usage of versions, by content id."""

    def __init__(self, versions_max: int = VERSIONS_MAX) -> None:
        self._versions_max = versions_max
        self._read: dict[str, tuple[InstanceRecord, ...]] = {}  # by worker: what was read last
        self._known: dict[str, _Known] = {}

    def update(self, workers: Iterable[WorkerRecord]) -> None:
        """Apply the records of the live workers. Unchanged ones cost nothing."""
        read: dict[str, tuple[InstanceRecord, ...]] = {}
        for worker in workers:
            read[worker.id] = worker.instances
            before = self._read.get(worker.id)
            if before is worker.instances:
                continue
            known = set(map(id, before or ()))
            for one in worker.instances:
                if one.last_used and id(one) not in known:
                    self._remember(one)
        self._read = read

    def packed(self, content_id: str) -> dict[str, float]:
        """Return the packed usage of a version; empty if it is not known."""
        known = self._known.get(content_id)
        return {} if known is None else dict(known.usage)

    def last_used(self, content_id: str) -> float:
        """Return when a version was last used, in seconds on the Redis clock; 0: not known."""
        known = self._known.get(content_id)
        return 0.0 if known is None else known.last_used

    def _remember(self, one: InstanceRecord) -> None:
        known = self._known.pop(one.content_id, None)
        if known is None or known.last_used <= one.last_used:
            known = _Known(one.last_used, one.usage)
        self._known[one.content_id] = known
        if len(self._known) > self._versions_max:
            del self._known[next(iter(self._known))]
