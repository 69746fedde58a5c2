"""A thread that terminates runs that take too long, and ends the process if they do not end.

arm ─> run ─> disarm                     records the current run; two assignments for each run
  longer than usual, or calls of others wait behind it: on_long ─> these go to other workers
  longer than allowed: Instance.terminate ─> the run raises Terminated, and the main loop answers
  still not over after GRACE_S: on_stuck ─> its requests are answered, other batches are given back, the process ends
each look: on_look ─> a long run is reported to Redis, replies that wait for the main loop are sent without it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream.services.crashes.run_marks import RunMark
from millstream.services.errors import Code
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.sharing import LONG_S, long_life_ms
from millstream.services.wire.batch import AGAIN
from millstream.workers.batches.lease import Lease
from millstream.workers.models.loaded_models import LoadedModel

log = logging.getLogger("millstream.watchdog")

CHECK_S = 0.1  # interval of the checks
IDLE_S = 0.2  # the same while nothing runs: less than the least time after which a run counts as long
GRACE_S = 5.0  # for a run to end after it was terminated; libraries check for it between two operators
#: A run is suspicious when it takes SUSPICIOUS_RUNS times what is usual for its size, and at least USUAL_S_MIN. While
#: too few runs of its size are known, it is the time that the warm-up measured, and at least MEASURED_S_MIN.
SUSPICIOUS_RUNS = 20
USUAL_S_MIN = 1.0
MEASURED_S_MIN = 2.0
#: While others wait, a suspicious run is ended, but at the earliest after this time if too few runs of its size are
#: known: real inputs may well take longer than the zeros of the warm-up.
FIRST_S_MIN = 5.0
UNMEASURED_S = 10.0  # a run of a size that was never measured is suspicious after this time


@dataclass(slots=True, eq=False)
class Guarded:
    """A run in progress. Times are monotonic.

    One is created for every run, so everything that can be computed later is left to `compute_limits`, in the
    watchdog's thread.
    """

    group: Sequence[Lease]
    model: LoadedModel
    began: float
    error: tuple[str, str] | None = None  # of its requests, once its termination was requested: Code or AGAIN
    usual_s: float = 0.0  # what runs of its size usually take, or took at the warm-up; 0: not known
    gave_back: bool = False  # the batches that waited behind it were given to other workers
    over: bool = False  # the main loop is no longer inside it
    until: float = 0.0  # when to terminate it; 0: not computed yet
    detached: bool = False  # what came directly and waited behind it was returned to its gateway
    # Written by the reports of long runs (run_reports.py).
    others_wait: bool = False  # a call of another version waits for a worker, at the last report
    blocks: bool = False  # batches of other versions wait behind it, at the last report
    waited_s: float = 0.0  # for which others waited during this run
    reported_at: float = 0.0  # 0: not yet
    reported_s: float = 0.0  # run time beyond what was expected that was reported
    end_told: bool = False  # that it is to end was reported
    # Written by `compute_limits`.
    alone: bool = field(init=False)  # it has one request
    has_history: bool = field(init=False)  # enough runs of its size are known
    suspicious_s: float = field(init=False)
    bound_s: float = field(init=False)  # seconds after which it is ended while others wait
    until_limit: float = field(init=False)
    terminated_at: float = field(init=False)

    @property
    def direct(self) -> bool:
        """Whether its batches came directly from a gateway."""
        return self.group[0].link is not None

    @property
    def expected_s(self) -> float:
        """The seconds that its lane was charged for when it was leased."""
        return 0.0 if self.direct else self.model.run_s(self._rows)

    @property
    def _rows(self) -> int:
        return sum([lease.rows for lease in self.group])

    @property
    def input_bytes(self) -> int:
        return sum([tensor.size_bytes for lease in self.group for tensor in lease.header.inputs])

    def compute_limits(self, run_s_max: float, now_ms: float) -> None:
        """Compute when to terminate the run. `now_ms` is on the Redis clock, as deadlines are."""
        leases, config = self.group, self.model.manifest.config
        self.terminated_at = float("inf")
        self.alone = sum([len(lease.live_requests) for lease in leases]) <= 1
        usual_s = self.model.calls.history.usual_s(self.input_bytes)
        self.has_history = usual_s > 0
        if usual_s:
            self.usual_s = usual_s
            self.suspicious_s = self.bound_s = max(USUAL_S_MIN, SUSPICIOUS_RUNS * usual_s)
        else:
            rows_measured = max(self.model.measured, default=0)
            measured_s = self.model.run_s(self._rows) * max(1.0, self._rows / max(1, rows_measured))
            self.usual_s = measured_s
            self.suspicious_s = max(MEASURED_S_MIN, SUSPICIOUS_RUNS * measured_s) if measured_s else UNMEASURED_S
            self.bound_s = max(FIRST_S_MIN, self.suspicious_s)
        if config.run_ms_max is not None:
            self.bound_s = float("inf")
        limit_s = min(run_s_max, config.run_ms_max / 1000) if config.run_ms_max is not None else run_s_max
        self.until_limit = self.began + limit_s
        until = self.until_limit
        if not leases[0].header.probe:  # a probe has no caller who stops waiting, and may be for a slow model
            left_s = (max([max(lease.header.deadlines_ms) for lease in leases]) - now_ms) / 1000
            until = min(until, time.monotonic() + max(0.0, left_s))
        # One of several requests may use up the time of all: they are terminated while there is time to try each alone.
        self.until = until if self.alone else min(until, self.began + self.suspicious_s)

    def instance_ended(self, reason: str, now_ms: float) -> None:
        """Let the request of the run fail with the reason, unless the run was to end for another one."""
        if not self.until:  # the watchdog has not looked yet
            self.compute_limits(float("inf"), now_ms)
        self.error = self.error or (Code.MODEL, reason)

    def why_end(self, now: float) -> tuple[Code, str] | None:
        """Return the error code and message for the request of a run whose time is over; None: it may go on.

        A run that takes far longer than usual is ended while other versions wait for this worker. While none waits it
        goes on: it takes nothing from anybody, and ending it would refuse what waiting can still answer.
        """
        if now >= self.until_limit:
            return Code.MODEL, (
                f"the model ran longer than {self.until_limit - self.began:g} s, the limit of one run "
                "(MILLSTREAM_WORKER_RUN_S_MAX, or run_ms_max in the version's configuration)"
            )
        if now > self.until:
            return Code.EXPIRED, "the deadline passed before the model answered, and its run was terminated"
        if self.others_wait and now >= self.began + self.bound_s:
            than = "runs of this size usually take" if self.has_history else "the warm-up of the version did"
            return Code.MODEL, (
                f"the run took longer than {self.bound_s:.3g} s, far longer than {than}, while other models waited "
                "for the worker (run_ms_max in the configuration sets another limit)"
            )
        return None

    @property
    def suspicious(self) -> bool:
        """Whether the run takes far longer than usual, whatever the callers' deadlines are."""
        return time.monotonic() - self.began >= self.suspicious_s

    @property
    def lost_s(self) -> float:
        """For how long others waited for a run that had to be ended and was far longer than usual; else 0."""
        at_fault = self.error is not None and self.error[0] != AGAIN and self.suspicious
        return self.waited_s if at_fault else 0.0


class LoopState:
    """What other threads see of the main loop, which writes it; made before it.

    `runs`: without readiness probes. `waiting`: for work. `draining`: it takes no more work. `current`: its run.

    Args:
        mark: file that records the run, for the process that reads it after a crash.
        forwards: whether instances run elsewhere, and are told how long callers wait.
    """

    def __init__(self, mark: RunMark | None = None, *, forwards: bool = False) -> None:
        self.runs = 0
        self.waiting = False
        self.draining = False
        self.current: Guarded | None = None
        self.forwards = forwards
        self._mark = mark

    def runs_at_rest(self) -> int | None:
        """Return the number of runs so far; None during a run."""
        return self.runs if self.waiting else None

    def arm(self, group: Sequence[Lease], model: LoadedModel) -> Guarded:
        """Have the run of `group` watched that begins now, until `disarm`."""
        if self._mark is not None:
            self._mark.begin(group[0].lane, [lease.header.name for lease in group])
        self.current = guarded = Guarded(group, model, time.monotonic())
        return guarded

    def disarm(self) -> None:
        """Stop watching: the run is over."""
        self.current = None
        if self._mark is not None:
            self._mark.end()


class Watchdog:
    """Watches the run of the main loop.

    Args:
        on_long: called in the watchdog's thread when a run becomes suspicious, or is long while others wait
            behind it.
        on_stuck: called in that thread when a terminated run does not end; it does not return.
        grace_s: how long a terminated run may take to end; longer for devices whose libraries seldom check.
        on_look: called in that thread at each look with the run, None between two runs; they do not block.
    """

    def __init__(
        self,
        loop: LoopState,
        clock: RedisClock,
        run_s_max: float,
        on_long: Callable[[Guarded], None],
        on_stuck: Callable[[Guarded], None],
        grace_s: float = GRACE_S,
        on_look: Sequence[Callable[[Guarded | None], None]] = (),
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._run_s_max = run_s_max
        self._on_long = on_long
        self._on_stuck = on_stuck
        self._grace_s = grace_s
        self._on_look = on_look
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(CHECK_S if self._loop.current is not None else IDLE_S)
            self._look()

    def _look(self) -> None:
        guarded = self._loop.current
        if guarded is not None:
            try:
                self._check(guarded, time.monotonic())
            except Exception:
                log.exception("watching a run failed")
        for look in self._on_look:
            try:
                look(guarded)
            except Exception:
                log.exception("reporting a run, or sending overdue replies, failed")

    def _check(self, guarded: Guarded, now: float) -> None:
        if not guarded.until:
            guarded.compute_limits(self._run_s_max, self._clock.now_ms())
        if (guarded.suspicious or guarded.blocks) and not guarded.gave_back:
            guarded.gave_back = True
            self._on_long(guarded)
        if guarded.error is None and (error := guarded.why_end(now)) is not None:
            self.end(guarded, error)
        # A short deadline of a caller must not end the process: a run that is no longer than usual is left to end.
        elif now > guarded.terminated_at + self._grace_s and guarded.suspicious and guarded is self._loop.current:
            self._on_stuck(guarded)

    @staticmethod
    def end(guarded: Guarded, error: tuple[str, str]) -> None:
        """Have a run terminated; its request gets the error: a Code, or AGAIN, and a message. Called in any thread."""
        guarded.error, guarded.terminated_at = error, time.monotonic()
        if guarded.model.instance is not None:
            guarded.model.instance.terminate()


TELL_S = 0.5  # longest time until Redis is told of short runs
EXCESS_S_MIN = 0.01  # shorter runs from the queue count as taking what was expected
LANES_MAX = 64  # lanes of which one call tells: those with long runs, then those with the most run time


class RunTime:
    """The run time of ended runs that Redis does not know of yet. Used by the main loop."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._longest: dict[str, float] = {}  # seconds of the longest run of lanes that had a long one
        self._due = 0.0  # monotonic

    def add(self, guarded: Guarded, seconds: float) -> None:
        """Record a run that took `seconds`. Short runs of readiness probes do not count: their lanes are not called."""
        first = guarded.group[0]
        lane, known = first.lane, seconds  # of which Redis knows
        if first.header.probe and seconds < LONG_S:
            return
        if guarded.direct or seconds >= EXCESS_S_MIN:
            known = guarded.expected_s + guarded.reported_s
        if seconds >= LONG_S:
            self._longest[lane] = max(seconds, self._longest.get(lane, 0.0))
            self._due = 0.0
        self._seconds[lane] = self._seconds.get(lane, 0.0) + max(0.0, seconds - known)

    def take(self) -> list[bytes | str]:
        """Return what `Consumer.send_next` tells, in triples: lane, run time, how long it counts as long; in ms."""
        if not self._seconds or (now := time.monotonic()) < self._due:
            return []
        self._due = now + TELL_S
        words: list[bytes | str] = []
        longest = self._longest
        lanes = sorted(self._seconds, key=lambda lane: (longest.get(lane, 0.0), self._seconds[lane]))
        for lane in lanes[-LANES_MAX:]:
            long_ms = long_life_ms(longest.get(lane, 0.0))
            words += (lane, b"%.3f" % (self._seconds[lane] * 1000), b"%d" % long_ms)
        self._seconds.clear()
        longest.clear()
        return words
