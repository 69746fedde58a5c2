"""What is told to Redis while the main loop is inside a run, in threads and over connections of their own.

watchdog ─> RunReports.look ─> a long run, twice a second and at its end: its run time, whether others wait behind it
    whose callers have all gone ─> it is terminated      others need the worker ─> it leaves, and is run elsewhere
    `blame`: a run that was ended counts by the time it took from others
watchdog ─> OverdueReplies.look ─> replies to other hosts without a receipt for OVERDUE_S
    The main loop does not know of it. After its run it sends the same replies, or acknowledges their leases, and Redis
    drops both: the leases are over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from millstream.services.errors import Code, Failure
from millstream.services.queue.sharing import LONG_S, long_life_ms
from millstream.services.wire.batch import AGAIN
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.lease import Lease
from millstream.workers.batches.watchdog import Guarded, Watchdog
from millstream.workers.worker import Worker

log = logging.getLogger("millstream.worker")

REPORT_S = 0.5  # between two reports of a long run
#: Run time after which an attached worker is no longer idle for Redis. Its blocking read (INBOX_WAIT_S) is over then,
#: so it asks for work right after the run.
BUSY_S = 0.5


class RunReports:
    """Reports long runs of the main loop while they go on, in a thread, over a connection of its own."""

    def __init__(self, connect: Callable[[], Consumer], loop: Worker) -> None:
        self._connect = connect
        self._loop = loop
        self._asked: SimpleQueue[Guarded | None] = SimpleQueue()
        self._reported: Guarded | None = None  # whose end was not reported
        self._due = 0.0  # monotonic
        self._busy = False
        self._thread: threading.Thread | None = None

    def look(self, guarded: Guarded | None) -> None:
        """Have a long run reported, or its end. Called by the watchdog, which does not wait for Redis."""
        now = time.monotonic()
        if guarded is not None and now < guarded.began + LONG_S:
            guarded = None
        if guarded is not None and not guarded.detached:
            self._loop.detach_behind(guarded)
        ended = guarded is not None and guarded.error is not None and not guarded.end_told
        if self._busy or (guarded is self._reported and not ended and (guarded is None or now < self._due)):
            return
        if guarded is not None and ended:
            guarded.end_told = True
        self._reported, self._due, self._busy = guarded, now + REPORT_S, True
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="run reports", daemon=True)
            self._thread.start()
        self._asked.put(guarded)

    def _serve(self) -> None:
        consumer: Consumer | None = None
        last: Guarded | None = None
        while True:
            guarded = self._asked.get()
            if guarded is not None and guarded.over:
                guarded = None
            try:
                consumer = consumer or self._connect()
                if last is not None and last is not guarded:
                    _report_end(consumer, last)
                    last = None
                if guarded is not None:
                    last = guarded
                    _report(consumer, guarded)
            except Failure as failure:
                log.debug("a long run could not be reported: %s", failure.message)
                with contextlib.suppress(Failure):
                    if consumer is not None:
                        consumer.close()
                consumer = None
            finally:
                self._busy = False


def _report(consumer: Consumer, guarded: Guarded) -> None:
    now = time.monotonic()
    seconds = max(0.0, now - guarded.began - guarded.expected_s - guarded.reported_s)
    guarded.reported_s += seconds
    lane = guarded.group[0].lane
    taken_s = now - guarded.began
    # Workers may have begun runs of one lane before any of them was known to be long. No more than usual is done twice.
    yields = bool(guarded.until) and taken_s >= guarded.usual_s and not guarded.group[0].header.probe
    others = consumer.running(lane, seconds, long_life_ms(taken_s), taken_s, busy=taken_s >= BUSY_S, yields=yields)
    guarded.others_wait, guarded.blocks = others.calls, others.behind
    if guarded.others_wait:
        guarded.waited_s += now - (guarded.reported_at or guarded.began)
    guarded.reported_at = now
    _blame(consumer, guarded)
    if guarded.error is not None or guarded.over:
        return
    if consumer.all_left([lease.header.name for lease in guarded.group]):
        Watchdog.end(guarded, (Code.CANCELLED, "all callers of the run have gone, and it was terminated"))
    elif others.leaves:
        Watchdog.end(guarded, (AGAIN, "the run left its worker to other models"))


def _report_end(consumer: Consumer, guarded: Guarded) -> None:
    """Report that a run is over."""
    consumer.runs_no_longer()
    _blame(consumer, guarded)


def _blame(consumer: Consumer, guarded: Guarded) -> None:
    """Count a run that has to be ended against its version, once, by the seconds that it took others.

    At once when it is told to end, so that its gateway finds the version refused when it gets the answer.
    """
    if guarded.lost_s > 0:
        first = guarded.group[0]
        consumer.blame(first.lane, f"{first.header.name} {first.attempt}", guarded.lost_s)


log = logging.getLogger("millstream.worker")

#: Without a receipt. Longer than RECEIPT_S_MAX, after which a main loop that is in no run sends them itself.
OVERDUE_S = 1.25
AGAIN_S = 1.0  # between two attempts while Redis does not take them


class OverdueReplies:
    """Sends the overdue replies of one worker."""

    def __init__(
        self,
        connect: Callable[[], Consumer],
        loop: Worker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._loop = loop
        self._clock = clock
        self._sending: threading.Thread | None = None
        self._sent: set[Lease] = set()  # and not settled yet
        self._not_before = float("-inf")

    def look(self, _: object = None) -> None:
        """Send what is overdue. Called by the watchdog, which does not wait: Redis may take seconds to answer."""
        if self._sending is not None and self._sending.is_alive():
            return
        overdue = self._loop.unsettled(OVERDUE_S)
        self._sent &= {finished.lease for finished in overdue}
        unsent = [finished for finished in overdue if finished.lease not in self._sent]
        now = self._clock()
        if unsent and now >= self._not_before:
            self._not_before = now + AGAIN_S
            self._sending = threading.Thread(target=self._send, args=(unsent,), name="overdue replies", daemon=True)
            self._sending.start()

    def _send(self, finished: list[Finished]) -> None:
        try:
            with contextlib.closing(self._connect()) as consumer:
                consumer.reply_beside_main_loop(finished)
        except Failure as failure:
            log.warning("%d replies without a receipt could not be sent: %s", len(finished), failure.message)
        else:
            self._sent.update(one.lease for one in finished)
            self._not_before = float("-inf")
