"""heartbeat: a thread that extends the worker's leases and publishes its record every quarter of the lease time.

When Redis does not know the worker (it was reclaimed while frozen, or Redis lost its data), the heartbeat adds its
lanes again. It also does so over each new connection, which may be to a replica that became the master before it
received all lanes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from millstream.services.errors import Failure
from millstream.services.process.backoff import Backoff
from millstream.services.wire.records import InstanceRecord, WorkerRecord
from millstream.workers.batches.consumer import Consumer
from millstream.workers.models.published_instances import PublishedInstances

log = logging.getLogger("millstream.heartbeat")
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 2.0
LIFE_LEASES = 2  # lifetime of a record, in leases
_ATTEMPTS = 2
#: what calls alone change in the record of an instance
_UNCALLED = {"last_used": 0.0, "usage": {}, "runs": 0, "busy_s": 0.0, "batches": {}}
#: Longest delay of changes that may be late: most loads end before, and are published once.
SOON_S = 0.05
#: Pause after new lanes were added: the main loop runs what waited for them, and does not wait for the interpreter's
#: lock while a record is made.
YIELD_S = 0.001


class Heartbeat:
    """Publishes the worker's record and extends its leases until `stop`.

    Args:
        record: builds the record to publish.
        lanes: returns the lanes to serve, each with an object of its own for each instance that serves it. They are
            added to Redis when they are new, and when Redis may have forgotten them.
        changing_lanes: locked while `lanes` is called and new ones are added; locked elsewhere to remove lanes.
        on_redis: called with True after each beat, and with False when a beat did not reach Redis.
    """

    def __init__(
        self,
        connect: Callable[[], Consumer],
        record: Callable[[], WorkerRecord],
        lanes: Callable[[], Mapping[str, object]],
        lease_s: float,
        changing_lanes: AbstractContextManager[object] | None = None,
        on_redis: Callable[[bool], None] = lambda _: None,
    ) -> None:
        #: looks up what the main loop needs from Redis, over the heartbeat's connection
        self.look_up: Callable[[Consumer], None] = lambda _: None
        self._connect = connect
        self._record = record
        self._lanes = lanes
        self._lease_s = lease_s
        self._changing_lanes = changing_lanes or nullcontext()
        self._add_again = False
        self._on_redis = on_redis
        self._instances = PublishedInstances()
        self._due = float("inf")  # monotonic: when the next beat was asked for
        self._wake = threading.Condition()
        self._stopping = False
        self._last_beat = 0.0  # monotonic
        self._leases_since = 0.0  # monotonic; leases taken after this time were not reclaimed
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        """Publish a changed record without waiting for the next interval."""
        self._beat_within(0.0)

    def beat_soon(self) -> None:
        """Publish a changed record within SOON_S, together with the changes that follow until then."""
        self._beat_within(SOON_S)

    def add_lanes_again(self) -> None:
        """Add all lanes with the next beat: it is not known which of them Redis has."""
        self._add_again = True
        self.beat_now()

    def stop(self) -> None:
        """Stop beating; returns when no beat is in progress."""
        self._stopping = True
        self.beat_now()
        self._thread.join()

    def forget_leases(self) -> None:
        """Declare all leases taken until now invalid: other workers may have them."""
        self._leases_since = time.monotonic()

    def lease_valid(self, leased_at: float) -> bool:
        """Return whether a lease taken at `leased_at` (monotonic) cannot have been reclaimed.

        This holds if each beat since then reached Redis within the lease time of the previous beat.
        """
        return leased_at >= self._leases_since and time.monotonic() - self._last_beat < self._lease_s

    def _run(self) -> None:
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, alive_s_reset=BACKOFF_S_MAX)
        while not self._stopping:
            try:
                consumer = self._connect()
            except Failure as failure:
                self._on_redis(False)
                log.warning("%s; trying again", failure.message)
                self._sleep(backoff.after_death())
                continue
            began = time.monotonic()
            try:
                self._beat(consumer)
            except Failure as failure:
                self._on_redis(False)
                log.warning("%s", failure.message)
            except Exception:
                log.exception("a heartbeat failed")
            finally:
                consumer.close()
            # Also after a connection succeeded: Redis may be out of memory, still loading, …
            if not self._stopping:
                self._sleep(backoff.after_death(time.monotonic() - began))

    def _beat(self, consumer: Consumer) -> None:
        published: WorkerRecord | None = None
        self._instances.forget()
        added: Mapping[str, object] = {}
        self._add_again = True
        while not self._stopping:
            if not self._add_again:  # first: batches may wait for new lanes, and nothing for the record
                added, new = self._add_lanes(consumer, added)
                if new:
                    time.sleep(YIELD_S)
            record = self._record()
            began = time.monotonic()
            known = self._publish(consumer, record)
            if not known or began - self._last_beat >= self._lease_s:
                self.forget_leases()  # before `_last_beat` changes: `lease_valid` must not see the new value alone
            self._last_beat = began
            self._on_redis(True)
            if not known or self._add_again:
                added, self._add_again = {}, False
            added, _ = self._add_lanes(consumer, added)
            self.look_up(consumer)
            if published is None or _differ(record, published):
                consumer.announce()
                published = record
            self._sleep(self._lease_s / 4)

    def _add_lanes(self, consumer: Consumer, added: Mapping[str, object]) -> tuple[Mapping[str, object], list[str]]:
        """Add the lanes to Redis that are not in `added`, or have another instance there.

        Returns all that are added, and those that were not in `added`.
        """
        with self._changing_lanes:
            lanes = self._lanes()
            new = [lane for lane, served in lanes.items() if lane not in added or added[lane] is not served]
            consumer.add_lanes(new)
            return lanes, new

    def _publish(self, consumer: Consumer, record: WorkerRecord) -> bool:
        """Publish the record, and those of its instances that changed. Returns False if the lanes must be added again.

        An instance that did not change costs nothing here, in Redis or in a gateway.
        """
        life_ms = round(self._lease_s * LIFE_LEASES * 1000)
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

    def _beat_within(self, seconds: float) -> None:
        with self._wake:
            due = time.monotonic() + seconds
            if due < self._due:
                self._due = due
                self._wake.notify()

    def _sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until an earlier beat is asked for, also if that was during the last beat."""
        with self._wake:
            self._due = min(self._due, time.monotonic() + seconds)
            while (left_s := self._due - time.monotonic()) > 0:
                self._wake.wait(left_s)
            self._due = float("inf")


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
