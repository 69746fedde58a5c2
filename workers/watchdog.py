"""watchdog: a thread that ends runs whose time is over, and the process if they do not end.

arm ─> run ─> disarm                     two assignments for each run
  over its time: Instance.terminate ─> the run raises Terminated, and the main loop answers
  it goes on all the same (GRACE_S): on_stuck ─> its requests are answered, all else is given back, the process ends
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from workers.backends.base import Instance
from workers.held import Holding
from workers.lease import Lease

log = logging.getLogger("millrace.watchdog")

LOOK_S = 0.1
GRACE_S = 5.0  # for a run to end after it was terminated; libraries look between two operators
#: a run is suspicious when it takes so many times as long as it was measured to, and at least so long
SUSPICIOUS_RUNS = 20
SUSPICIOUS_S = 2.0
UNMEASURED_S = 10.0  # the same for one that was never measured


class Guarded:
    """A run under way. Times by `time.monotonic`. `expired`: it was told to end."""

    __slots__ = ("alone", "began", "expired", "group", "instance", "limit_s", "suspicious_s", "told", "until")

    def __init__(
        self, group: Sequence[Lease], instance: Instance, began: float, left_s: float, limit_s: float, measured_s: float
    ) -> None:
        self.group = group
        self.instance = instance
        self.began = began
        self.limit_s = limit_s
        self.alone = sum([len(lease.alive) for lease in group]) <= 1
        self.suspicious_s = max(SUSPICIOUS_S, SUSPICIOUS_RUNS * measured_s) if measured_s else UNMEASURED_S
        until = began + max(0.0, min(left_s, limit_s))
        # One of several requests would take the time of all: each is tried alone while there is some left.
        self.until = until if self.alone else min(until, began + self.suspicious_s)
        self.expired = False
        self.told = float("inf")

    @property
    def suspicious(self) -> bool:
        """Whether it takes longer than any run should, whatever deadline its callers set."""
        return time.monotonic() - self.began >= self.suspicious_s


class Watchdog:
    """`on_stuck`: called in this thread, and does not return. `grace_s`: for devices whose libraries look seldom."""

    def __init__(self, run_s_max: float, on_stuck: Callable[[Guarded], None], grace_s: float = GRACE_S) -> None:
        self._run_s_max = run_s_max
        self._on_stuck = on_stuck
        self._grace_s = grace_s
        self._guarded: Guarded | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def arm(self, group: Sequence[Lease], holding: Holding, now_ms: float) -> Guarded | None:
        """Guard the run of `group` that begins now, until `disarm`. `now_ms`: on Redis' clock, as deadlines are."""
        if holding.instance is None:
            return None
        left_s = (max([max(lease.header.deadlines_ms) for lease in group]) - now_ms) / 1000
        measured_s = holding.run_s(sum([lease.rows for lease in group]))
        if group[0].header.canary:  # nobody waits for its answer, and it may run on a slow model
            left_s = self._run_s_max
        self._guarded = guarded = Guarded(
            group, holding.instance, time.monotonic(), left_s, self._run_s_max, measured_s
        )
        return guarded

    def disarm(self) -> None:
        self._guarded = None

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            guarded = self._guarded
            if guarded is not None:
                try:
                    self._look(guarded, time.monotonic())
                except Exception:
                    log.exception("watching a run failed")

    def _look(self, guarded: Guarded, now: float) -> None:
        if not guarded.expired and now > guarded.until:
            guarded.expired, guarded.told = True, now
            guarded.instance.terminate()
        # Nobody shall die of a caller's short deadline: a run that is as long as it always was is left to end.
        elif now > guarded.told + self._grace_s and guarded.suspicious and guarded is self._guarded:
            self._on_stuck(guarded)
