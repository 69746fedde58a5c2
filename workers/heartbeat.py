"""heartbeat: a thread that says every quarter lease that this worker lives, and what it holds.

A beat extends all leases of the worker. When Redis does not know the worker (it was reclaimed while frozen, or Redis
lost its data) the heart has it hold its lanes again; so too over each new connection, which may be to a replica that
became the master before it was told of all lanes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millstream.services.errors import Failure
from millstream.services.process.backoff import Backoff
from millstream.services.wire.records import WorkerRecord
from millstream.workers.consumer import Consumer

log = logging.getLogger("millstream.heartbeat")
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 2.0


class Heartbeat:
    """`record` builds what is published; `lanes` are held again when Redis may have forgotten them."""

    def __init__(
        self,
        connect: Callable[[], Consumer],
        record: Callable[[], WorkerRecord],
        lanes: Callable[[], list[str]],
        lease_s: float,
    ) -> None:
        self._connect = connect
        self._record = record
        self._lanes = lanes
        self._lease_s = lease_s
        self._wake = threading.Event()
        self._stopping = False
        self._beaten = 0.0
        self._since = 0.0  # from when on no lease of this worker can have been reclaimed
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        """Beat now: something that others should know has changed."""
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def forget_leases(self) -> None:
        """What was leased until now may be another's from now on."""
        self._since = time.monotonic()

    def lease_valid(self, leased: float) -> bool:
        """Whether beats reached Redis so closely since `leased` (monotonic) that nobody can have reclaimed that lease."""
        return leased >= self._since and time.monotonic() - self._beaten < self._lease_s

    def _run(self) -> None:
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, alive_s_reset=BACKOFF_S_MAX)
        while not self._stopping:
            try:
                consumer = self._connect()
            except Failure as failure:
                log.warning("%s; trying again", failure.message)
                self._sleep(backoff.after_death())
                continue
            began = time.monotonic()
            try:
                self._beat(consumer)
            except Failure as failure:
                log.warning("%s", failure.message)
            except Exception:
                log.exception("a heartbeat failed")
            finally:
                consumer.close()
            # Also after it was connected: Redis may be out of memory, still loading, …
            if not self._stopping:
                self._sleep(backoff.after_death(time.monotonic() - began))

    def _beat(self, consumer: Consumer) -> None:
        published: WorkerRecord | None = None
        holds: list[str] | None = None
        while not self._stopping:
            record = self._record()
            began = time.monotonic()
            known = consumer.beat(record.model_dump_json().encode(), round(self._lease_s * 2000))
            if not known or began - self._beaten >= self._lease_s:
                self._since = time.monotonic()  # before the beat counts: what was leased until now may be another's
            self._beaten = began
            lanes = self._lanes()
            if not known or lanes != holds:
                consumer.add_lanes(lanes)
                holds = lanes
            if published is None or record.instances != published.instances:
                consumer.announce()
                published = record
            self._sleep(self._lease_s / 4)

    def _sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()
