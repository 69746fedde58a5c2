"""drain: a thread that waits for SIGTERM, and sees to it that the worker has left in time.

A thread, since Python runs signal handlers between two steps of the main thread: one that is inside of a run would hear
of the signal when the run is over, and nobody could limit it. What is written to the wake-up descriptor comes at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

log = logging.getLogger("millstream.drain")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GIVE_UP_SHARE = 0.9  # of the time there is; the rest is for giving back
CUT_SHORT = 3  # exit code of a worker whose run was not over in time


class DrainThread:
    """`stop` tells the main loop to finish what is in hand and to take no more. It may: what is still running near the
    end of `drain_s` seconds is given to others with `give_back`, and the process ends.
    """

    def __init__(self, stop: Callable[[], None], give_back: Callable[[], None], drain_s: float) -> None:
        self._stop = stop
        self._give_back = give_back
        self._drain_s = drain_s
        self._told, self._hears = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)

    def start(self) -> None:
        """Take over the signals; call it in the main thread."""
        self._told.setblocking(False)
        signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        self._thread.start()

    def begin(self) -> None:
        """Leave, as after SIGTERM."""
        with contextlib.suppress(BlockingIOError):  # it was told so often already
            self._told.send(b"\0")

    def _run(self) -> None:
        self._hears.recv(1)
        self._stop()
        # Whoever has left by then is gone, and this thread too.
        threading.Event().wait(self._drain_s * GIVE_UP_SHARE)
        log.warning("what is running is not over after %.3g s: others run it", self._drain_s * GIVE_UP_SHARE)
        giving = threading.Thread(target=self._give_back, name="give back", daemon=True)
        giving.start()
        giving.join(self._drain_s * (1 - GIVE_UP_SHARE))
        os._exit(CUT_SHORT)
