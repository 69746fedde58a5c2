"""Says when the worker's record has changed: whoever changes it sets this, and the heartbeat waits for it."""

from __future__ import annotations

import threading
import time

#: Longest delay of changes that may be late: most loads end before, and are published once.
SOON_S = 0.05


class BeatSignal:
    """When the next beat is due. Safe for several threads. `lanes_unsure`: it is not known which lanes Redis has."""

    def __init__(self) -> None:
        self._due = float("inf")  # monotonic
        self._wake = threading.Condition()
        self.lanes_unsure = True

    def now(self) -> None:
        """Have a changed record published without waiting for the next interval."""
        self._within(0.0)

    def soon(self) -> None:
        """Have a changed record published within SOON_S, together with the changes that follow until then."""
        self._within(SOON_S)

    def add_lanes_again(self) -> None:
        """Have all lanes added with the next beat: it is not known which of them Redis has."""
        self.lanes_unsure = True
        self.now()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until an earlier beat is asked for, also if that was during the last beat."""
        with self._wake:
            self._due = min(self._due, time.monotonic() + seconds)
            while (left_s := self._due - time.monotonic()) > 0:
                self._wake.wait(left_s)
            self._due = float("inf")

    def _within(self, seconds: float) -> None:
        with self._wake:
            due = time.monotonic() + seconds
            if due < self._due:
                self._due = due
                self._wake.notify()
