"""How a worker leaves its pool, and which of its batches go to other workers.

drain ─> begin ─> its leases run ─> leave             the drain takes too long ─> leave_early
a long run ─> give_back_waiting             a run that cannot be terminated ─> end_stuck: the process ends
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from millstream.services.errors import Failure
from millstream.services.process.exit_status import RUN_STUCK
from millstream.services.queue.scripts import ATTEMPTS_MAX
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.lease import LeaseValidity
from millstream.workers.batches.watchdog import Guarded
from millstream.workers.heartbeat import Heartbeat
from millstream.workers.models.beat_signal import BeatSignal
from millstream.workers.reconciler import Reconciler
from millstream.workers.worker import Worker

log = logging.getLogger("millstream.worker")

HAND_OVER_S_MAX = 5.0  # for giving work back before the process ends


class Departure:
    """The departure of one worker.

    Args:
        connect: opens a connection to Redis.
        heartbeat: of the worker.
        signal: has its record published.
        leases: tells which leases are valid.
        reconciler: of the worker.
        loop: the main loop.
    """

    def __init__(
        self,
        connect: Callable[[], Consumer],
        heartbeat: Heartbeat,
        signal: BeatSignal,
        leases: LeaseValidity,
        reconciler: Reconciler,
        loop: Worker,
    ) -> None:
        self._connect = connect
        self._heartbeat = heartbeat
        self._signal = signal
        self._leases = leases
        self._reconciler = reconciler
        self._loop = loop

    def begin(self) -> None:
        """Take no more work: gateways and the controller have other workers load from now on."""
        self._loop.state.draining = True
        self._signal.now()
        self._loop.stop()

    def leave(self) -> None:
        """Remove the worker from its pool and give its batches to other workers. Without Redis its leases expire."""
        with contextlib.suppress(Failure), contextlib.closing(self._connect()) as consumer:
            consumer.leave(ATTEMPTS_MAX)
            consumer.announce()

    def leave_early(self) -> None:
        """Give all batches back near the end of the drain time, while a run is still in progress."""
        self._reconciler.stop()
        self._leases.forget()  # a run that ends now must not write where another batch may be
        self._loop.detach_all()
        self.leave()

    def give_back_waiting(self, guarded: Guarded) -> None:
        """Give the batches that wait behind a long run to other workers."""
        self._leases.forget()
        self._loop.detach_behind(guarded)
        with contextlib.suppress(Failure), contextlib.closing(self._connect()) as consumer:
            answered = [finished.lease for finished in self._loop.unsettled()]
            consumer.give_back([*guarded.group, *answered])

    def end_stuck(self, guarded: Guarded) -> None:
        """End the process because a run cannot be terminated: answer its requests and give back all other batches."""
        log.error("a run of %s cannot be terminated: this process ends", guarded.group[0].lane)
        finished = self._loop.final_replies(guarded)
        self._loop.detach_behind(guarded)
        giving = threading.Thread(target=self._hand_over, args=(finished,), name="hand over", daemon=True)
        giving.start()
        giving.join(HAND_OVER_S_MAX)
        logging.shutdown()
        os._exit(RUN_STUCK)

    def _hand_over(self, finished: list[Finished]) -> None:
        """Send the finished replies and give back all other batches.

        The heartbeat is stopped first: a beat would add the worker to its pool again.
        """
        self._heartbeat.stop()
        with contextlib.suppress(Failure):
            consumer = self._connect()
            consumer.send_next(finished, 0, 0)
            consumer.receive_next()
            consumer.leave(ATTEMPTS_MAX, dying=True)
            consumer.announce()
