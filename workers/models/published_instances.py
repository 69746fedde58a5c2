"""published_instances: what a worker writes to Redis about its instances: only those that changed. Pure.

records of all instances ─> InstanceChanges (content id -> JSON, or "" for one that was removed) ─> stored in Redis
                         └> ChangedLately (version, content ids) ─> in the worker's record ─> readers fetch these
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from millstream.services.wire.records import InstanceRecord

#: Readers that read at least this often fetch only what changed; others fetch all instances.
RECENT_S = 3.0
#: changes that a record lists; with more, readers fetch all instances
RECENT_MAX = 256


class InstanceChanges(NamedTuple):
    """Instances to store: content id -> record as JSON, "" removes it. `whole`: these are all instances."""

    fields: Mapping[str, str]
    whole: bool


class ChangedLately(NamedTuple):
    """The fields of WorkerRecord by which readers find what to fetch."""

    instances_version: int
    changed_since: int
    changed: dict[str, int]


class PublishedInstances:
    """Compares the instances of a worker with what Redis has."""

    def __init__(self) -> None:
        self._stored: dict[str, InstanceRecord] | None = None  # None: Redis has none of them, or unknown ones
        self._version = 0
        self._changed: dict[str, tuple[int, float]] = {}  # content id -> version, time of its last change
        self._since = 0

    @property
    def count(self) -> int:
        """The number of instances that Redis should have."""
        return len(self._stored or ())

    def forget(self) -> None:
        """Store all instances next time: Redis may have lost them."""
        self._stored = None

    def changes(self, records: Iterable[InstanceRecord]) -> InstanceChanges | None:
        """Return what has to be stored; None: nothing changed."""
        before = self._stored
        known = before or {}
        now = {record.content_id: record for record in records}
        fields = {
            content_id: record.model_dump_json(exclude_defaults=True)
            for content_id, record in now.items()
            if (old := known.get(content_id)) is not record and old != record
        }
        fields |= dict.fromkeys(known.keys() - now.keys(), "")
        return InstanceChanges(fields, before is None) if fields or before is None else None

    def stored(self, records: Iterable[InstanceRecord], changes: InstanceChanges, now: float) -> None:
        """Note that the changes were stored. `now`: seconds, monotonic."""
        self._stored = {record.content_id: record for record in records}
        self._version += 1
        if changes.whole:
            self._changed, self._since = {}, self._version
        for content_id in changes.fields if not changes.whole else ():
            self._changed.pop(content_id, None)
            self._changed[content_id] = (self._version, now)

    def changed_lately(self, now: float) -> ChangedLately:
        """Return what changed in the last RECENT_S, for the worker's record."""
        while self._changed:
            content_id, (version, at) = next(iter(self._changed.items()))
            if now - at <= RECENT_S and len(self._changed) <= RECENT_MAX:
                break
            del self._changed[content_id]
            self._since = version
        listed = {content_id: version for content_id, (version, _) in self._changed.items()}
        return ChangedLately(self._version, self._since, listed)
