"""Measures how long a worker takes from the decision until it serves: process start, loads and warm-up. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

MEASURED_MAX = 5  # start times in the mean: the last ones
PROCESS_S_DEFAULT = 4.0  # start of a process, without its loads, while none was measured
WAITED_S_MAX = 600.0  # a worker that comes later than this was not started for the decision
WAITING_MAX = 1024  # decisions that are remembered


class Starts:
    """The start times of one pool. Instants are passed in."""

    def __init__(self) -> None:
        self._known: frozenset[str] | None = None  # workers that served in the round before
        self._awaited: deque[float] = deque(maxlen=WAITING_MAX)  # when each worker was wanted that does not serve yet
        self._measured_s: deque[float] = deque(maxlen=MEASURED_MAX)

    def wanted(self, before: int, now_wanted: int, now: float) -> None:
        """Record a decision that wants more or fewer workers than the one before."""
        for _ in range(now_wanted - before):
            self._awaited.append(now)
        for _ in range(min(before - now_wanted, len(self._awaited))):
            self._awaited.pop()

    def ready(self, workers: Collection[str], now: float) -> None:
        """Record the workers that serve now. The first call measures none."""
        known, self._known = self._known, frozenset(workers)
        if known is None:
            return
        while self._awaited and now - self._awaited[0] > WAITED_S_MAX:
            self._awaited.popleft()
        for _ in self._known - known:
            if self._awaited:
                self._measured_s.append(now - self._awaited.popleft())

    def start_s(self, load_s: float) -> float:
        """Return the mean of the last start times. `load_s`: of the slowest version, while none was measured."""
        if not self._measured_s:
            return PROCESS_S_DEFAULT + load_s
        return sum(self._measured_s) / len(self._measured_s)
