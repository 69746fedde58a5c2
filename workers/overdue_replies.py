"""Replies to other hosts without a receipt are sent through Redis while the main loop is inside a run.

watchdog ─> look ─> what has no receipt for OVERDUE_S ─> Redis, in a thread and over a connection of its own
The main loop does not know of it. After its run it sends the same replies, or acknowledges their leases, and Redis
drops both: the leases are over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from millstream.services.errors import Failure
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.lease import Lease
from millstream.workers.worker import Worker

log = logging.getLogger("millstream.worker")

#: Without a receipt. Longer than RECEIPT_S_MAX, after which a main loop that is in no run sends them itself.
OVERDUE_S = 1.25
AGAIN_S = 1.0  # between two attempts while Redis does not take them


class OverdueReplies:
    """Sends the overdue replies of one worker.

    Args:
        connect: opens a connection to Redis.
        loop: the main loop.
        clock: monotonic seconds.
    """

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
