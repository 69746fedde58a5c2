"""A long run is reported to Redis while it goes on, and what waits behind it is returned to its gateway.

watchdog ─> look(run) ─> a thread ─> the script `running` ─> Guarded.others_wait, waited_s
                                  ├─ all callers have gone ─> the run is ended
                                  ├─ it has the last worker that others wait for ─> it is ended, and runs again
                                  └─ its end ─> `blame`: a run that was ended counts by the time it took from others
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
from millstream.workers.batches.consumer import Consumer
from millstream.workers.batches.watchdog import Guarded, Watchdog
from millstream.workers.worker import Worker

log = logging.getLogger("millstream.worker")

REPORT_S = 0.5  # between two reports of a long run
#: Run time after which an attached worker is no longer idle for Redis. Its blocking read (INBOX_WAIT_S) is over then,
#: so it asks for work right after the run.
BUSY_S = 0.5


class RunReports:
    """Reports long runs of the main loop while they go on, in a thread, over a connection of its own.

    Args:
        connect: opens a connection to Redis.
        loop: the main loop.
    """

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
        guarded.waited_s += now - guarded.reported_at
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
