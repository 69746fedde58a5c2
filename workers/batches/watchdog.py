"""watchdog: a thread that terminates runs that take too long, and ends the process if they do not end.

arm ─> run ─> disarm                     records the current run; two assignments for each run
  longer than normal: on_long ─> batches that wait behind it go to other workers
  longer than allowed: Instance.terminate ─> the run raises Terminated, and the main loop answers
  still not over after GRACE_S: on_stuck ─> its requests are answered, other batches are given back, the process ends
each look: on_look ─> replies that wait for the main loop are sent without it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from millstream.services.crashes.run_marks import RunMark
from millstream.services.errors import Code
from millstream.services.queue.clock import RedisClock
from millstream.services.wire.batch import ENDLESS
from millstream.workers.batches.lease import Lease
from millstream.workers.models.loaded_models import LoadedModel

log = logging.getLogger("millstream.watchdog")

CHECK_S = 0.1  # interval of the checks
GRACE_S = 5.0  # for a run to end after it was terminated; libraries check for it between two operators
#: A run is suspicious when it takes SUSPICIOUS_RUNS times its measured time, and at least SUSPICIOUS_S.
SUSPICIOUS_RUNS = 20
SUSPICIOUS_S = 2.0
UNMEASURED_S = 10.0  # a run of a size that was never measured is suspicious after this time


class Guarded:
    """A run in progress. Times are monotonic.

    One is created for every run, so everything that can be computed later is left to `compute_limits`, in the
    watchdog's thread.
    """

    __slots__ = (
        "alone",
        "began",
        "expired",
        "gave_back",
        "group",
        "limit_s",
        "model",
        "suspicious_s",
        "terminated_at",
        "until",
    )

    def __init__(self, group: Sequence[Lease], model: LoadedModel) -> None:
        self.group = group
        self.model = model
        self.began = time.monotonic()
        self.expired = False  # its termination was requested
        self.gave_back = False  # the batches that waited behind it were given to other workers
        self.until = 0.0  # when to terminate it; 0: not computed yet

    def compute_limits(self, run_s_max: float, now_ms: float) -> None:
        """Compute when to terminate the run. `now_ms` is on the Redis clock, as deadlines are."""
        leases = self.group
        self.limit_s = run_s_max
        self.terminated_at = float("inf")
        self.alone = sum([len(lease.live_requests) for lease in leases]) <= 1
        measured_s = self.model.run_s(sum([lease.rows for lease in leases]))
        self.suspicious_s = max(SUSPICIOUS_S, SUSPICIOUS_RUNS * measured_s) if measured_s else UNMEASURED_S
        until = self.began + run_s_max
        if not leases[0].header.probe:  # a probe has no caller who stops waiting, and may be for a slow model
            left_s = (max([max(lease.header.deadlines_ms) for lease in leases]) - now_ms) / 1000
            until = min(until, time.monotonic() + max(0.0, left_s))
        # One of several requests may use up the time of all: they are terminated while there is time to try each alone.
        self.until = until if self.alone else min(until, self.began + self.suspicious_s)

    def error(self) -> tuple[str, str]:
        """Return the error code and message for the request of a run that was terminated."""
        now = time.monotonic()
        if now - self.began >= self.limit_s:
            message = (
                f"the model ran longer than {self.limit_s:g} s, the limit of one run (MILLSTREAM_WORKER_RUN_S_MAX)"
            )
        else:
            message = "the deadline passed before the model answered, and its run was terminated"
        if self.suspicious:
            return ENDLESS, message
        return Code.MODEL if now - self.began >= self.limit_s else Code.EXPIRED, message

    @property
    def suspicious(self) -> bool:
        """Whether the run takes far longer than measured, whatever the callers' deadlines are."""
        return time.monotonic() - self.began >= self.suspicious_s


class Watchdog:
    """Watches the run of the main loop.

    Args:
        clock: the Redis clock, on which deadlines are.
        run_s_max: the limit of one run.
        on_long: called in the watchdog's thread when a run becomes suspicious.
        on_stuck: called in that thread when a terminated run does not end; it does not return.
        grace_s: how long a terminated run may take to end; longer for devices whose libraries seldom check.
        mark: file that records the current run, for the process that reads it after a crash.
        on_look: called in that thread at each look, also between two runs; it does not block.
    """

    def __init__(
        self,
        clock: RedisClock,
        run_s_max: float,
        on_long: Callable[[Guarded], None],
        on_stuck: Callable[[Guarded], None],
        grace_s: float = GRACE_S,
        mark: RunMark | None = None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._run_s_max = run_s_max
        self._on_long = on_long
        self._on_stuck = on_stuck
        self._grace_s = grace_s
        self._mark = mark
        self._on_look = on_look
        self._guarded: Guarded | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def arm(self, group: Sequence[Lease], model: LoadedModel) -> Guarded:
        """Watch the run of `group` that begins now, until `disarm`."""
        if self._mark is not None:
            self._mark.begin(group[0].lane, [lease.header.name for lease in group])
        self._guarded = guarded = Guarded(group, model)
        return guarded

    def disarm(self) -> None:
        """Stop watching: the run is over."""
        self._guarded = None
        if self._mark is not None:
            self._mark.end()

    def _watch(self) -> None:
        while True:
            time.sleep(CHECK_S)
            self._look()

    def _look(self) -> None:
        guarded = self._guarded
        if guarded is not None:
            try:
                self._check(guarded, time.monotonic())
            except Exception:
                log.exception("watching a run failed")
        try:
            self._on_look()
        except Exception:
            log.exception("sending overdue replies failed")

    def _check(self, guarded: Guarded, now: float) -> None:
        if not guarded.until:
            guarded.compute_limits(self._run_s_max, self._clock.now_ms())
        if guarded.suspicious and not guarded.gave_back:
            guarded.gave_back = True
            self._on_long(guarded)
        if not guarded.expired and now > guarded.until:
            guarded.expired, guarded.terminated_at = True, now
            if guarded.model.instance is not None:
                guarded.model.instance.terminate()
        # A short deadline of a caller must not end the process: a run that is no longer than usual is left to end.
        elif now > guarded.terminated_at + self._grace_s and guarded.suspicious and guarded is self._guarded:
            self._on_stuck(guarded)
