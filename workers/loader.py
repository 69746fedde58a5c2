"""loader: a thread that loads versions one after the other, so that no load blocks the others.

wanted ─> queue ─(no other load, or only ones that are set aside)─> a thread for each load ─> done
                 longer than SET_ASIDE_S: set aside, the next load begins
                 over its limit, or no longer wanted: end requested ─(GRACE_S)─> stuck: the process must be replaced
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.services.model.manifest import Manifest
from millstream.workers.backends.base import Stop
from millstream.workers.load_version import took_too_long

log = logging.getLogger("millstream.loads")

#: Only one load runs at a time, since others would distort its measurement; after this time the next begins beside it.
SET_ASIDE_S = 3.0
LOADS_MAX = 8  # in progress at once; beyond it the next waits until one ends or reaches its limit
GRACE_S = 5.0  # for a load to end after its end was requested
CHECK_S = 0.05  # interval of the checks
NOT_WANTED = "it is no longer wanted"


class Limits(NamedTuple):
    """Limits of the two phases of a load."""

    load_s: float
    warm_up_s: float


class LoadRequest(NamedTuple):
    """A version to load."""

    manifest: Manifest
    suspect: bool = False  # a process died while loading it: suspects are loaded last


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
        return self.wanted.manifest.content_id


class Loader:
    """Runs loads in threads of their own and ends those that exceed their limits.

    Args:
        run: loads one version, and handles its failures.
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
        self._on_stuck = on_stuck
        self._limits = limits
        self._clock = clock
        self._lock = threading.Condition()
        self._queue: list[LoadRequest] = []
        self._loads: list[Load] = []  # in progress
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="loads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin no further load and request the end of those in progress; a load that goes on ends with the process."""
        with self._lock:
            self._stopping = True
            loads = list(self._loads)
            self._lock.notify_all()
        for load in loads:
            self._request_end(load, NOT_WANTED)

    def want(self, wanted: Sequence[LoadRequest]) -> None:
        """Load these versions, in this order, suspects last; request the end of all other loads in progress."""
        content_ids = {request.manifest.content_id for request in wanted}
        with self._lock:
            loading = {load.content_id for load in self._loads if load.stop.reason != NOT_WANTED}
            missing = [request for request in wanted if request.manifest.content_id not in loading]
            self._queue = sorted(missing, key=lambda request: request.suspect)
            unwanted = [load for load in self._loads if load.content_id not in content_ids and not load.stop.reason]
            self._lock.notify_all()
        for load in unwanted:
            self._request_end(load, NOT_WANTED)

    def warming(self, load: Load) -> None:
        """Begin the second phase of a load, the warm-up, with a time limit of its own."""
        self._begin_phase(load, "warming up", self._limits.warm_up_s)

    @property
    def busy(self) -> bool:
        """Whether a load is in progress."""
        return bool(self._loads)

    def _begin_phase(self, load: Load, phase: str, limit_s: float) -> None:
        load.phase, load.limit_s, load.deadline = phase, limit_s, self._clock() + limit_s

    def _request_end(self, load: Load, reason: str) -> None:
        load.end_requested_at = self._clock()
        load.stop.request(reason)

    def _watch(self) -> None:
        while not self._stopping:
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
            recent = [load for load in self._loads if now - load.began < SET_ASIDE_S]
            busy = {load.content_id for load in self._loads}
            wanted = next((request for request in self._queue if request.manifest.content_id not in busy), None)
            if wanted is None or recent or len(self._loads) >= LOADS_MAX:
                return
            self._queue.remove(wanted)
            load = Load(wanted, now)
            self._begin_phase(load, "loading", self._limits.load_s)
            self._loads.append(load)
            threading.Thread(target=self._live, args=(load,), name=f"load {load.content_id}", daemon=True).start()

    def _live(self, load: Load) -> None:
        try:
            self._run(load)
        except Exception:
            log.exception("loading %s failed", load.content_id)
        finally:
            with self._lock:
                self._loads.remove(load)
                self._lock.notify_all()

    def _check(self, load: Load) -> None:
        now = self._clock()
        if not load.stop.reason and now > load.deadline:
            self._request_end(load, took_too_long(load.phase, load.limit_s))
        if now > load.end_requested_at + GRACE_S and not load.stuck:
            load.stuck = True
            self._on_stuck(load)
