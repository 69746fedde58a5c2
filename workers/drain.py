"""A thread that waits for SIGTERM and ends the process if the worker does not leave in time.

It is a thread because Python runs signal handlers between two steps of the main thread. During a run the handler would
be called only after the run, however long it takes. Signals write to the wake-up descriptor at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from millstream.services.process.exit_status import end_at_once

log = logging.getLogger("millstream.drain")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BEGIN = (0, *SIGNALS)  # the wake-up descriptor delivers any handled signal's number, or 0 from `begin`
GIVE_UP_SHARE = 0.9  # of the drain time; the remainder is for giving batches back
CUT_SHORT = 3  # exit code of a worker whose run was not over in time


class DrainThread:
    """Stops the main loop on SIGTERM or SIGINT, and limits how long the drain takes. A second signal ends the process.

    Args:
        drain_s: the drain time.
        supervised: whether a supervisor started this process, and kills it if the drain is to be cut short.
    """

    def __init__(self, drain_s: float, *, supervised: bool) -> None:
        self._drain_s = drain_s
        self._supervised = supervised
        self._wake_sender, self._wake_receiver = socket.socketpair()

    def start(self, stop: Callable[[], None], give_back: Callable[[], None]) -> None:
        """Install the signal handlers; must be called in the main thread.

        Args:
            stop: tells the main loop to run and answer what is leased, and to lease no more.
            give_back: gives the batches that still run near the end of the drain time to other workers; the process
                ends after it.
        """
        self._wake_sender.setblocking(False)
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._run, args=(stop, give_back), name="drain", daemon=True).start()

    def begin(self) -> None:
        """Drain as after SIGTERM."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full of earlier calls
            self._wake_sender.send(b"\0")

    def _run(self, stop: Callable[[], None], give_back: Callable[[], None]) -> None:
        while self._wake_receiver.recv(1)[0] not in BEGIN:
            pass  # another signal that has a handler
        stop()
        # If the worker leaves in time, the process ends during this wait.
        self._wait_for_signals(self._drain_s * GIVE_UP_SHARE)
        log.warning("a run is not over after %.3g s: it is given to other workers", self._drain_s * GIVE_UP_SHARE)
        giving = threading.Thread(target=give_back, name="give back", daemon=True)
        giving.start()
        giving.join(self._drain_s * (1 - GIVE_UP_SHARE))
        os._exit(CUT_SHORT)

    def _wait_for_signals(self, seconds: float) -> None:
        """Return after some seconds, unless a further signal ends the process."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._wake_receiver.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                number = self._wake_receiver.recv(1)[0]
                if number in SIGNALS and not self._supervised:
                    end_at_once(number)
