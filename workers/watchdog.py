"""watchdog: a thread that ends runs whose time is over, and the process if they do not end.

arm ─> run ─> disarm                     two assignments for each run
  longer than any should: on_long ─> what waits behind it goes to other workers
  over its time: Instance.terminate ─> the run raises Terminated, and the main loop answers
  it goes on all the same (GRACE_S): on_stuck ─> its requests are answered, all else is given back, the process ends
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from millstream.services.errors import Code
from millstream.services.queue.clock import RedisClock
from millstream.services.wire.batch import ENDLESS
from millstream.workers.lease import Lease
from millstream.workers.loaded_models import LoadedModel

log = logging.getLogger("millstream.watchdog")

LOOK_S = 0.1
GRACE_S = 5.0  # for a run to end after it was terminated; libraries look between two operators
#: a run is suspicious when it takes so many times as long as it was measured to, and at least so long
SUSPICIOUS_RUNS = 20
SUSPICIOUS_S = 2.0
UNMEASURED_S = 10.0  # the same for one that was never measured


class Guarded:
    """A run under way. Times by `time.monotonic`. `expired`: it was told to end. `gave_back`: others have what waited.

    Made for every run, so all that can be found out later is found out by `weigh`, in the watchdog's thread.
    """

    __slots__ = (
        "alone",
        "began",
        "expired",
        "gave_back",
        "group",
        "holding",
        "limit_s",
        "suspicious_s",
        "told",
        "until",
    )

    def __init__(self, group: Sequence[Lease], holding: LoadedModel) -> None:
        self.group = group
        self.holding = holding
        self.began = time.monotonic()
        self.expired = self.gave_back = False
        self.until = 0.0  # not weighed yet

    def weigh(self, run_s_max: float, now_ms: float) -> None:
        """Find out when its time is over. `now_ms`: on Redis' clock, as deadlines are."""
        leases = self.group
        self.limit_s = run_s_max
        self.told = float("inf")
        self.alone = sum([len(lease.alive) for lease in leases]) <= 1
        measured_s = self.holding.run_s(sum([lease.rows for lease in leases]))
        self.suspicious_s = max(SUSPICIOUS_S, SUSPICIOUS_RUNS * measured_s) if measured_s else UNMEASURED_S
        until = self.began + run_s_max
        if not leases[0].header.canary:  # nobody waits for its answer, and it may run on a slow model
            left_s = (max([max(lease.header.deadlines_ms) for lease in leases]) - now_ms) / 1000
            until = min(until, time.monotonic() + max(0.0, left_s))
        # One of several requests would take the time of all: each is tried alone while there is some left.
        self.until = until if self.alone else min(until, self.began + self.suspicious_s)

    def error(self) -> tuple[str, str]:
        """Code and message for the request of a run that was ended."""
        now = time.monotonic()
        if now - self.began >= self.limit_s:
            message = (
                f"the model ran longer than {self.limit_s:g} s, the limit of one run (MILLSTREAM_WORKER_RUN_S_MAX)"
            )
        else:
            message = "the deadline passed before the model answered, and its run was ended"
        if self.suspicious:
            return ENDLESS, message
        return Code.MODEL if now - self.began >= self.limit_s else Code.EXPIRED, message

    @property
    def suspicious(self) -> bool:
        """Whether it takes longer than any run should, whatever deadline its callers set."""
        return time.monotonic() - self.began >= self.suspicious_s


class Watchdog:
    """`on_long`, `on_stuck`: called in this thread; `on_stuck` does not return. `grace_s`: for devices whose libraries
    look seldom.
    """

    def __init__(
        self,
        clock: RedisClock,
        run_s_max: float,
        on_long: Callable[[Guarded], None],
        on_stuck: Callable[[Guarded], None],
        grace_s: float = GRACE_S,
    ) -> None:
        self._clock = clock
        self._run_s_max = run_s_max
        self._on_long = on_long
        self._on_stuck = on_stuck
        self._grace_s = grace_s
        self._guarded: Guarded | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def arm(self, group: Sequence[Lease], holding: LoadedModel) -> Guarded:
        """Guard the run of `group` that begins now, until `disarm`."""
        self._guarded = guarded = Guarded(group, holding)
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
        if not guarded.until:
            guarded.weigh(self._run_s_max, self._clock.now_ms())
        if guarded.suspicious and not guarded.gave_back:
            guarded.gave_back = True
            self._on_long(guarded)
        if not guarded.expired and now > guarded.until:
            guarded.expired, guarded.told = True, now
            if guarded.holding.instance is not None:
                guarded.holding.instance.terminate()
        # Nobody shall die of a caller's short deadline: a run that is as long as it always was is left to end.
        elif now > guarded.told + self._grace_s and guarded.suspicious and guarded is self._guarded:
            self._on_stuck(guarded)
