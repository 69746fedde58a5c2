"""loader: a thread that loads versions, one after the other, and lets none of them stop the others.

wanted ─> queue ─(nothing else loads, or it is set aside)─> a thread for each load ─> done
                 runs longer than SET_ASIDE_S: set aside, the next begins beside it
                 over its time, or not wanted any more: asked to end ─(GRACE_S)─> stuck: this process has to go
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

SET_ASIDE_S = 3.0  # measuring wants the machine for itself, but nobody waits longer than this for another's load
LOADS_MAX = 8  # under way at once; beyond it the next waits until one ends or its time is over
GRACE_S = 5.0  # for a load to end after it was asked to
LOOK_S = 0.05
NOT_WANTED = "it is not wanted any more"


class Limits(NamedTuple):
    """Seconds that the two parts of a load may take."""

    load_s: float
    warm_up_s: float


class LoadRequest(NamedTuple):
    """A version to load. `suspect`: a process died while loading it; such ones come last, one at a time."""

    manifest: Manifest
    suspect: bool = False


@dataclass
class Load:
    """A load under way. `deadline`: by the clock; moved when another part of it begins."""

    wanted: LoadRequest
    began: float
    what: str = "loading"
    limit_s: float = 0.0
    deadline: float = float("inf")
    stop: Stop = field(default_factory=Stop)
    asked: float = float("inf")  # when it was asked to end
    stuck: bool = False

    @property
    def content_id(self) -> str:
        return self.wanted.manifest.content_id


class Loader:
    """`run`: loads one version, in a thread of its own, to whatever end. `on_stuck`: one cannot be ended."""

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
        self._under_way: list[Load] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="loads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin no more, and end what is under way; what cannot be ended goes with the process."""
        with self._lock:
            self._stopping = True
            under_way = list(self._under_way)
            self._lock.notify_all()
        for load in under_way:
            self._ask(load, NOT_WANTED)

    def want(self, wanted: Sequence[LoadRequest]) -> None:
        """Load these, in this order, suspects last; whatever else is under way is asked to end."""
        content_ids = {one.manifest.content_id for one in wanted}
        with self._lock:
            under_way = {load.content_id for load in self._under_way if load.stop.reason != NOT_WANTED}
            self._queue = sorted(
                (one for one in wanted if one.manifest.content_id not in under_way), key=lambda one: one.suspect
            )
            gone = [load for load in self._under_way if load.content_id not in content_ids and not load.stop.reason]
            self._lock.notify_all()
        for load in gone:
            self._ask(load, NOT_WANTED)

    def warming(self, load: Load) -> None:
        """From now on `load` runs its warm-up requests."""
        self._phase(load, "warming up", self._limits.warm_up_s)

    @property
    def busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._under_way)

    def _phase(self, load: Load, what: str, limit_s: float) -> None:
        load.what, load.limit_s, load.deadline = what, limit_s, self._clock() + limit_s

    def _ask(self, load: Load, reason: str) -> None:
        load.asked = self._clock()
        load.stop.ask(reason)

    def _watch(self) -> None:
        while not self._stopping:
            with self._lock:
                if not self._under_way and not self._queue:
                    self._lock.wait()
                self._begin()
                under_way = list(self._under_way)
            for load in under_way:
                self._check(load)
            with self._lock:
                self._lock.wait(LOOK_S)

    def _begin(self) -> None:
        now = self._clock()
        while self._queue and not self._stopping:
            beside = [load for load in self._under_way if now - load.began < SET_ASIDE_S]
            busy = {load.content_id for load in self._under_way}
            wanted = next((one for one in self._queue if one.manifest.content_id not in busy), None)
            if wanted is None or beside or len(self._under_way) >= LOADS_MAX:
                return
            self._queue.remove(wanted)
            load = Load(wanted, now)
            self._phase(load, "loading", self._limits.load_s)
            self._under_way.append(load)
            threading.Thread(target=self._live, args=(load,), name=f"load {load.content_id}", daemon=True).start()

    def _live(self, load: Load) -> None:
        try:
            self._run(load)
        except Exception:
            log.exception("loading %s failed", load.content_id)
        finally:
            with self._lock:
                self._under_way.remove(load)
                self._lock.notify_all()

    def _check(self, load: Load) -> None:
        now = self._clock()
        if not load.stop.reason and now > load.deadline:
            self._ask(load, took_too_long(load.what, load.limit_s))
        if now > load.asked + GRACE_S and not load.stuck:
            load.stuck = True
            self._on_stuck(load)
