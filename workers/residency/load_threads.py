"""load_threads: threads that run one load each and are then replaced.

renew ─> threads that wait ─(run)─> one of them does the work and ends ─(renew)─> a new one waits

A load lowers the priority of its thread, which cannot be raised again: the threads that a library starts in the next
load would inherit it, and serve with it. New threads are started between loads, while there is memory for them.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

log = logging.getLogger("millstream.loads")

STACK_BYTES = 8 << 20  # libraries descend into nested models
BEGIN_S_MAX = 1.0  # for a new thread to begin; with too little memory it may never do so


class LoadThreads:
    """A fixed number of threads, from the first `renew` on, which is called by one thread at a time.

    Args:
        count: number of threads that wait.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """How many threads wait for work."""
        return self._waiting

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` in a thread that waits, or in the next one that does."""
        self._work.put(work)

    def renew(self) -> None:
        """Start threads in place of those that do not wait any longer. What cannot be started now is started later."""
        # threading.Thread.start() waits without a limit for a thread that found no memory to begin.
        before = threading.stack_size(STACK_BYTES)
        try:
            while self._waiting < self._count:
                began = threading.Event()
                _thread.start_new_thread(self._wait, (began,))
                if not began.wait(BEGIN_S_MAX):
                    log.warning("a thread for loads could not begin: is memory short?")
                    return
        except (RuntimeError, MemoryError) as error:
            log.warning("no thread for loads could be started: %s", error)
        finally:
            with suppress(ValueError):
                threading.stack_size(before)

    def _wait(self, began: threading.Event) -> None:
        with self._lock:
            self._waiting += 1
        began.set()
        work = self._work.get()
        with self._lock:
            self._waiting -= 1
        work()
