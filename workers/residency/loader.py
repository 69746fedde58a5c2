"""A thread that loads versions one after the other, so that no load blocks the others.

wanted, demanded ─> queue ─(no other load, or only ones that are set aside)─> a thread for each load ─> done
                 demanded versions come first
                 longer than SET_ASIDE_S: set aside, the next load begins
                 over its limit, or no longer wanted: end requested ─(GRACE_S)─> stuck: the process must be replaced
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from millstream.services.model.manifest import Manifest
from millstream.workers.backends.base import Stop
from millstream.workers.models.load_version import took_too_long

log = logging.getLogger("millstream.loads")

#: Only one load runs at a time, since others would distort its measurement; after this time the next begins beside it.
SET_ASIDE_S = 3.0
#: A demanded load waits only for this time for one that no call waits for.
DEMAND_WAITS_S = 0.5
LOADS_MAX = 8  # in progress at once; beyond it the next waits until one ends or reaches its limit
TRIAL_START_S = 30.0  # to start the process of a trial load, in addition to the load and its warm-up
GRACE_S = 5.0  # for a load to end after its end was requested
CHECK_S = 0.05  # interval of the checks
NOT_WANTED = "it is no longer wanted"


STACK_BYTES = 8 << 20  # libraries descend into nested models
BEGIN_S_MAX = 1.0  # for a new thread to begin; with too little memory it may never do so


class LoadThreads:
    """A fixed number of threads, from the first `renew` on, which is called by one thread at a time."""

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


class Limits(NamedTuple):
    """Limits of the two phases of a load. A trial load before it has both, and TRIAL_START_S."""

    load_s: float
    warm_up_s: float


class LoadRequest(NamedTuple):
    """A version to load."""

    manifest: Manifest
    suspect: bool = False  # a process died while loading it: suspects are loaded last
    demanded: bool = False  # calls wait for it, or a load that is staged
    staged: bool = False  # no call waits for it
    why: str = ""  # for people

    @property
    def content_id(self) -> str:
        return self.manifest.content_id


class LoadAhead(NamedTuple):
    """A load that a further demanded one comes after.

    Args:
        began_s: seconds since it began; None: it waits.
        yields_s: seconds after its beginning at which the next demanded load begins beside it.
    """

    content_id: str
    began_s: float | None
    yields_s: float


@dataclass
class Load:
    """A load in progress. Times are of the loader's clock."""

    wanted: LoadRequest
    began: float
    phase: str = "loading"
    limit_s: float = 0.0  # of the phase
    deadline: float = float("inf")  # of the phase
    stop: Stop = field(default_factory=Stop)
    end_requested_at: float = float("inf")
    stuck: bool = False

    @property
    def content_id(self) -> str:
        return self.wanted.content_id


class LoadPolicy:
    """Decides on the loads of a worker, in their threads. This one lets all begin."""

    def admits(self, request: LoadRequest) -> bool:
        """Return whether a load may begin now; False: it does not begin, and is not asked for again."""
        return True

    def load_ended(self, content_id: str) -> None:
        """Take note of a load that has ended."""

    def found_no_memory(self, request: LoadRequest) -> bool:
        """Return whether a load that found no memory is tried again, or its failure was published; False: it failed."""
        return False


class Loader:
    """Runs loads in threads of their own and ends those that exceed their limits.

    Args:
        on_stuck: called when a load does not end within GRACE_S after its end was requested.
    """

    def __init__(
        self,
        run: Callable[[Load], None],
        on_stuck: Callable[[Load], None],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._policy = LoadPolicy()
        self._stuck = on_stuck
        self._limits = limits
        self._clock = clock
        self._lock = threading.Condition()
        self._queue: list[LoadRequest] = []
        self._loads: list[Load] = []  # in progress
        self._stopping = False
        self._threads = LoadThreads(LOADS_MAX)
        self._thread = threading.Thread(target=self._watch, name="loads", daemon=True)

    def start(self, policy: LoadPolicy) -> None:
        """Let loads begin. `policy` decides on them."""
        self._policy = policy
        self._threads.renew()
        self._thread.start()

    def stop(self) -> None:
        """Begin no further load and request the end of those in progress; a load that goes on ends with the process."""
        with self._lock:
            self._stopping = True
            loads = list(self._loads)
            self._lock.notify_all()
        for load in loads:
            self._request_end(load, NOT_WANTED)

    def want(self, wanted: Sequence[LoadRequest], kept: Collection[str] = ()) -> None:
        """Load these versions, in this order, suspects last; request the end of all other loads in progress.

        Args:
            wanted: what is to be loaded besides the demanded versions.
            kept: content ids of versions whose loads go on, and which stay demanded if they are.
        """
        content_ids = {request.content_id for request in wanted}.union(kept)
        with self._lock:
            loading = {load.content_id for load in self._loads if load.stop.reason != NOT_WANTED}
            demanded = [request for request in self._queue if request.demanded and request.content_id in content_ids]
            loading.update(request.content_id for request in demanded)
            missing = [request for request in wanted if request.content_id not in loading]
            self._queue = [*demanded, *sorted(missing, key=lambda request: request.suspect)]
            unwanted = [load for load in self._loads if load.content_id not in content_ids and not load.stop.reason]
            self._lock.notify_all()
        for load in unwanted:
            self._request_end(load, NOT_WANTED)

    def demand(self, request: LoadRequest) -> bool:
        """Load a version before all that no call waits for; False if it is being loaded or demanded already."""
        with self._lock:
            if any(load.content_id == request.content_id and not load.stop.reason for load in self._loads):
                return False
            if any(known.content_id == request.content_id and known.demanded for known in self._queue):
                return False
            others = [known for known in self._queue if known.content_id != request.content_id]
            first = next((i for i, known in enumerate(others) if not known.demanded), len(others))
            self._queue = [*others[:first], request, *others[first:]]
            self._begin()  # here, not in the thread that watches: a call waits
            self._lock.notify_all()
            return True

    def trying(self, load: Load) -> None:
        """Begin the trial of a load in another process, which does not count against the limits of the load itself."""
        self._begin_phase(load, "loading on trial", TRIAL_START_S + sum(self._limits))

    def loading(self, load: Load) -> None:
        """Begin the first phase of a load, after its trial."""
        self._begin_phase(load, "loading", self._limits.load_s)

    def warming(self, load: Load) -> None:
        """Begin the second phase of a load, the warm-up, with a time limit of its own."""
        self._begin_phase(load, "warming up", self._limits.warm_up_s)

    @property
    def busy(self) -> bool:
        """Whether a load is in progress."""
        return bool(self._loads)

    @property
    def takes_demanded(self) -> bool:
        """Whether a load that calls wait for would begin at once."""
        now = self._clock()
        with self._lock:
            if any(request.demanded for request in self._queue) or len(self._loads) >= LOADS_MAX:
                return False
            return all(now - load.began >= _waits_s(True, load.wanted.demanded) for load in self._loads)

    @property
    def pending(self) -> bool:
        """Whether a load is in progress or waits."""
        return bool(self._loads or self._queue)

    def active(self) -> set[str]:
        """Return the content ids of versions that are being loaded or are demanded."""
        with self._lock:
            loading = {load.content_id for load in self._loads if not load.stop.reason}
            return loading.union(request.content_id for request in self._queue if request.demanded)

    def ahead(self) -> list[LoadAhead]:
        """Return the loads in progress, then the demanded ones that wait, in the order in which they begin."""
        now = self._clock()
        with self._lock:
            begun = [
                LoadAhead(one.content_id, now - one.began, _waits_s(True, one.wanted.demanded)) for one in self._loads
            ]
            waiting = [
                LoadAhead(one.content_id, None, SET_ASIDE_S)
                for one in self._queue
                if one.demanded and all(one.content_id != other.content_id for other in begun)
            ]
        return begun + waiting

    def in_progress(self, content_id: str) -> bool:
        """Return whether a version is being loaded, also if the load was requested to end."""
        with self._lock:
            return any(load.content_id == content_id for load in self._loads)

    def _begin_phase(self, load: Load, phase: str, limit_s: float) -> None:
        load.phase, load.limit_s, load.deadline = phase, limit_s, self._clock() + limit_s

    def _request_end(self, load: Load, reason: str) -> None:
        load.end_requested_at = self._clock()
        load.stop.request(reason)

    def _watch(self) -> None:
        while not self._stopping:
            if not self._loads or not self._threads.waiting:
                self._threads.renew()
            with self._lock:
                if not self._loads and not self._queue:
                    self._lock.wait()
                self._begin()
                loads = list(self._loads)
            for load in loads:
                self._check(load)
            with self._lock:
                self._lock.wait(CHECK_S)

    def _begin(self) -> None:
        now = self._clock()
        while self._queue and not self._stopping:
            busy = {load.content_id for load in self._loads}
            wanted = next((request for request in self._queue if request.content_id not in busy), None)
            if wanted is None or len(self._loads) >= LOADS_MAX:
                return
            if any(now - load.began < _waits_s(wanted.demanded, load.wanted.demanded) for load in self._loads):
                return
            self._queue.remove(wanted)
            if not self._policy.admits(wanted):
                continue
            load = Load(wanted, now)
            self.loading(load)
            self._loads.append(load)
            self._threads.run(partial(self._live, load))

    def _live(self, load: Load) -> None:
        try:
            self._run(load)
        except Exception:
            log.exception("loading %s failed", load.content_id)
        finally:
            with self._lock:
                self._loads.remove(load)
                self._lock.notify_all()
            self._policy.load_ended(load.content_id)

    def _check(self, load: Load) -> None:
        now = self._clock()
        if not load.stop.reason and now > load.deadline:
            self._request_end(load, took_too_long(load.phase, load.limit_s))
        if now > load.end_requested_at + GRACE_S and not load.stuck:
            load.stuck = True
            self._stuck(load)


def _waits_s(demanded: bool, before_demanded: bool) -> float:
    """Return for how long after the beginning of a load the next one waits for its end.

    Args:
        demanded: whether calls wait for the next one.
        before_demanded: likewise for the one that has begun.
    """
    return DEMAND_WAITS_S if demanded and not before_demanded else SET_ASIDE_S
