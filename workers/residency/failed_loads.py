"""When a worker tries versions again whose loads failed. Pure: time and random numbers are passed in.

load failed ─> next ─> FailedLoad (when it is tried again, whether it is worth a line) ─> note ─> due, once
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from millstream.services.process.waits import Draw, with_jitter

LOST_RETRY_S = 2.0  # longest pause before a version whose instance was lost is loaded again, the first time
RETRY_S = 30.0  # longest pause before a version that failed for want of a device or Redis is loaded again
FAILURES_MAX = 3  # loads of a version that failed in this worker, before orders for it are refused
FAILED_RETRY_S = 60.0  # longest pause before a version whose files or library failed is loaded again
FAILED_OFTEN_RETRY_S = 300.0  # the same after FAILURES_MAX failures
_NUMBER = re.compile(r"\d+")


class FailedLoad(NamedTuple):
    """A load that failed, or an instance that was lost. Instants are of the clock.

    Args:
        failures: loads of the version that failed in a row, without those for a reason that passes.
        retry_at: when it is tried again; infinity: not before an operator asks for it.
        repeated: whether the last try failed for the same reason, apart from numbers.
    """

    failures: int
    at: float
    retry_at: float
    reason: str
    repeated: bool = False


class FailedLoads:
    """The failed loads of one worker, by content id. Each change replaces a whole value; safe for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, draw: Draw = random.random) -> None:
        self._clock = clock
        self._draw = draw
        self._failed: dict[str, FailedLoad] = {}
        self._due: dict[str, float] = {}  # of those that were not returned by `take_due`

    def next(self, content_id: str, reason: str, *, passing: bool, final: bool) -> FailedLoad:
        """Return what a failure leads to, which `note` stores.

        Args:
            content_id: the version.
            reason: why it failed.
            passing: whether it failed for want of a device or of Redis.
            final: whether no worker of this kind loads it again until an operator asks for it.
        """
        known = self._failed.get(content_id)
        failures = 0 if passing else 1 + (0 if known is None else known.failures)
        pause_s = RETRY_S if passing else FAILED_OFTEN_RETRY_S if failures >= FAILURES_MAX else FAILED_RETRY_S
        now = self._clock()
        retry_at = float("inf") if final else now + with_jitter(pause_s, self._draw)
        repeated = known is not None and _NUMBER.sub("", known.reason) == _NUMBER.sub("", reason)
        return FailedLoad(failures, now, retry_at, reason, repeated)

    def lost(self, content_id: str, reason: str) -> FailedLoad:
        """Return, and note, that an instance was lost for a reason that may pass."""
        known = self._failed.get(content_id)
        now = self._clock()
        retry_at = now + with_jitter(LOST_RETRY_S, self._draw)
        failed = FailedLoad(0 if known is None else known.failures, now, retry_at, reason)
        self.note(content_id, failed)
        return failed

    def note(self, content_id: str, failed: FailedLoad) -> None:
        """Store a failure."""
        self._failed[content_id] = failed
        if failed.retry_at < float("inf"):
            self._due[content_id] = failed.retry_at

    def of(self, content_id: str) -> tuple[int, float]:
        """Return how many loads of a version failed in a row, and how many seconds ago the last one did."""
        failed = self._failed.get(content_id)
        return (0, 0.0) if failed is None else (failed.failures, self._clock() - failed.at)

    def any_due(self) -> bool:
        """Whether any version is to be tried again now."""
        now = self._clock()
        return any(at <= now for at in list(self._due.values()))

    def take_due(self, content_id: str) -> bool:
        """Return, once, whether a version is to be tried again now; its failures still count."""
        due = self._due.get(content_id, float("inf")) <= self._clock()
        if due:
            self._due.pop(content_id, None)
        return due

    def being_tried(self, content_id: str) -> None:
        """Note that a version is tried again before its time; its failures still count."""
        self._due.pop(content_id, None)

    def forget(self, content_id: str) -> None:
        """Forget the failures of a version: it is loaded, new again, or was removed."""
        self._due.pop(content_id, None)
        self._failed.pop(content_id, None)
