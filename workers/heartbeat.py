"""A thread that extends the worker's leases and publishes its record every quarter of the lease time.

When Redis does not know the worker (it was reclaimed while frozen, or Redis lost its data), the heartbeat adds its
lanes again. It also does so over each new connection, which may be to a replica that became the master before it
received all lanes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from millstream.services.errors import Failure
from millstream.services.process.waits import Backoff
from millstream.services.wire.records import InstanceRecord, WorkerRecord
from millstream.workers.batches.consumer import Consumer
from millstream.workers.batches.lease import LeaseValidity
from millstream.workers.models.record_parts import BeatSignal

log = logging.getLogger("millstream.heartbeat")
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 2.0
LIFE_LEASES = 2  # lifetime of a record, in leases
_ATTEMPTS = 2
#: what calls alone change in the record of an instance
_UNCALLED = {"last_used": 0.0, "usage": {}, "runs": 0, "busy_s": 0.0, "batches": {}}
#: Pause after new lanes were added: the main loop runs what waited for them, and does not wait for the interpreter's
#: lock while a record is made.
YIELD_S = 0.001


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


class LanesServed(Protocol):
    """The lanes of a worker: LoadedModels."""

    changing_lanes: threading.Lock  # held while `lanes` is called and new ones are added; elsewhere to remove lanes

    def lanes(self) -> Mapping[str, object]:
        """Return the lanes to serve, each with an object of its own for each instance that serves it."""


class Heartbeat:
    """Publishes the worker's record and extends its leases until `stop`.

    Args:
        served: its lanes are added to Redis when they are new, and when Redis may have forgotten them.
        look_up: looks up what the worker needs from Redis, over the heartbeat's connection.
        on_redis: called with True after each beat, and with False when a beat did not reach Redis.
    """

    def __init__(
        self,
        connect: Callable[[], Consumer],
        record: Callable[[], WorkerRecord],
        served: LanesServed,
        leases: LeaseValidity,
        signal: BeatSignal,
        look_up: Callable[[Consumer], None] = lambda _: None,
        on_redis: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._connect = connect
        self._record = record
        self._served = served
        self._leases = leases
        self._signal = signal
        self._look_up = look_up
        self._on_redis = on_redis
        self._instances = PublishedInstances()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; returns when no beat is in progress."""
        self._stopping = True
        self._signal.now()
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, alive_s_reset=BACKOFF_S_MAX)
        while not self._stopping:
            began = time.monotonic()
            try:
                with contextlib.closing(self._connect()) as consumer:
                    self._beat(consumer)
            except Failure as failure:
                self._on_redis(False)
                log.warning("%s; trying again", failure.message)
            except Exception:
                log.exception("a heartbeat failed")
            # Also after a connection succeeded: Redis may be out of memory, still loading, …
            if not self._stopping:
                self._signal.wait(backoff.after_death(time.monotonic() - began))

    def _beat(self, consumer: Consumer) -> None:
        published: WorkerRecord | None = None
        self._instances.forget()
        added: Mapping[str, object] = {}
        self._signal.lanes_unsure = True
        while not self._stopping:
            if not self._signal.lanes_unsure:  # first: batches may wait for new lanes, and nothing for the record
                added, new = self._add_lanes(consumer, added)
                if new:
                    time.sleep(YIELD_S)
            record = self._record()
            began = time.monotonic()
            known = self._publish(consumer, record)
            self._leases.beat(began, known=known)
            self._on_redis(True)
            if not known or self._signal.lanes_unsure:
                added, self._signal.lanes_unsure = {}, False
            added, _ = self._add_lanes(consumer, added)
            self._look_up(consumer)
            if published is None or _differ(record, published):
                consumer.announce()
                published = record
            self._signal.wait(self._leases.lease_s / 4)

    def _add_lanes(self, consumer: Consumer, added: Mapping[str, object]) -> tuple[Mapping[str, object], list[str]]:
        """Add the lanes to Redis that are not in `added`, or have another instance there.

        Returns all that are added, and those that were not in `added`.
        """
        with self._served.changing_lanes:
            lanes = self._served.lanes()
            new = [lane for lane, served in lanes.items() if lane not in added or added[lane] is not served]
            consumer.add_lanes(new)
            return lanes, new

    def _publish(self, consumer: Consumer, record: WorkerRecord) -> bool:
        """Publish the record, and those of its instances that changed. Returns False if the lanes must be added again.

        An instance that did not change costs nothing here, in Redis or in a gateway.
        """
        life_ms = round(self._leases.lease_s * LIFE_LEASES * 1000)
        known = True
        for _ in range(_ATTEMPTS):  # the first may find that Redis has lost the instances
            changes = self._instances.changes(record.instances)
            if changes is not None:
                consumer.store_instances(changes.fields, life_ms, whole=changes.whole)
                self._instances.stored(record.instances, changes, time.monotonic())
            lately = self._instances.changed_lately(time.monotonic())
            head = record.model_copy(update={"instances": (), **lately._asdict()})
            known &= consumer.beat(head.model_dump_json().encode(), life_ms, self._instances.count)
            if consumer.instances_stored:
                break
            self._instances.forget()
        return known


def _differ(record: WorkerRecord, published: WorkerRecord) -> bool:
    """Return whether gateways are to read the record now, and not only with their next refresh.

    How often instances are called can wait: in a worker of many busy models it changes with every beat.
    """
    return (
        _served(record.instances, published.instances) != _served(published.instances, record.instances)
        or record.refusals != published.refusals
        or (record.token, record.draining) != (published.token, published.draining)
    )


def _served(instances: Sequence[InstanceRecord], others: Sequence[InstanceRecord]) -> list[InstanceRecord]:
    """Return the instances that are not among the others, without what calls change in them."""
    theirs = {id(one) for one in others}
    return [one.model_copy(update=_UNCALLED) for one in instances if id(one) not in theirs]
