"""Loads versions in threads of the loader, publishes the progress of each load, and tries failed ones again.

LoadRequest ─> loader ─> (suspect: trial load in a process of its own) ─> load, warm up, measure ─> READY or FAILED
load failed ─> next ─> FailedLoad (when it is tried again, whether it is worth a line) ─> note ─> due, once
a version whose verdict says that it failed is not loaded, also not after a restart, until the verdict is cleared
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from millstream.services.crashes.load_marks import DEATHS_CERTAIN, LoadMarks, with_death
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.process.logs import about
from millstream.services.process.waits import Draw, with_jitter
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import Verdict, why_unmerged
from millstream.services.wire.records import LoadRecord, State
from millstream.workers.backends.base import Instance, OutOfMemory, Stop
from millstream.workers.heartbeat import YIELD_S
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.load_version import LoadedVersion, LoadEnvironment, load, probe
from millstream.workers.models.loaded_models import Exploration, LoadedModel, LoadedModels
from millstream.workers.residency.load_memory import LoadMemory, NotFree
from millstream.workers.residency.loader import NOT_WANTED, Limits, Load, Loader, LoadRequest
from millstream.workers.variants.compiles import VariantCompiles

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


log = logging.getLogger("millstream.reconciler")


class LoadGuard(NamedTuple):
    """What limits loads, and what happens to a load that exceeds its limit or ends the process."""

    marks: LoadMarks  # say after a crash what was being loaded
    limits: Limits
    replace_process: Callable[[], None]  # called when a load cannot be ended: a new process takes over


class VersionLoads(Loader):
    """Loads versions while the main loop serves. Safe for several threads.

    Args:
        now: returns seconds on the Redis clock.
    """

    def __init__(
        self,
        repository: FolderRepository,
        at: LoadEnvironment,
        models: LoadedModels,
        metrics: WorkerMetrics,
        guard: LoadGuard,
        now: Callable[[], float],
        failed: FailedLoads | None = None,
    ) -> None:
        super().__init__(self._load, self._on_stuck, guard.limits)
        self._repository = repository
        self._at = at
        self._models = models
        self._metrics = metrics
        self._guard = guard
        self._now = now
        self.failed = FailedLoads() if failed is None else failed
        self.memory = LoadMemory(repository, at)
        self._compiles = VariantCompiles(at, at.variants) if at.variants is not None else None
        self._settling = threading.Lock()  # locked while deciding whether a load that ends is still wanted

    def stop(self) -> None:
        """Begin no further load. A load in progress that cannot be ended ends with the process."""
        super().stop()
        if self._compiles is not None:
            self._compiles.stop()
        self._guard.marks.close()

    @property
    def kind(self) -> str:
        """The kind of this worker, for which verdicts on loads are kept."""
        return self._at.kind

    def give_way(self) -> bool:
        """End one piece of work whose memory a load needs, and return whether that memory is free now."""
        return any(memory.give_way() for memory in self.memory.budget.spare)

    @property
    def giving_way(self) -> bool:
        """Whether work in the background is being ended for a load."""
        return any(memory.giving_way for memory in self.memory.budget.spare)

    def records(self) -> tuple[LoadRecord, ...]:
        """Return what is being loaded and what waits for that, for other processes.

        A load that has succeeded is none, although its measurements may still be written: the record that says that
        the version is ready would say for seconds that other loads wait for it.
        """
        now = self._now()
        return tuple(
            LoadRecord(
                content_id=one.content_id,
                began=0.0 if one.began_s is None else round(now - one.began_s, 1),
                yields_s=one.yields_s,
            )
            for one in self.ahead()
            if (model := self._models.get(one.content_id)) is None or model.state is not State.READY
        )

    def want(self, wanted: Sequence[LoadRequest], kept: Collection[str] = ()) -> None:
        """Load these versions, and go on with the loads of the `kept` ones; end the loads of all others."""
        with self._settling:
            super().want(wanted, kept)

    def demand(self, request: LoadRequest) -> bool:
        """Load a version that calls wait for, before all others; False if it is being loaded or demanded already."""
        self.failed.being_tried(request.content_id)
        return super().demand(request)

    def lose(self, manifest: Manifest, reason: str) -> None:
        """Publish that an instance is gone for a reason that may pass, and load the version again soon."""
        failed = self.failed.lost(manifest.content_id, reason)
        self._models.set(LoadedModel(manifest, State.FAILED, reason, retry_at=_retry_at(failed)))

    def _load(self, current: Load) -> None:
        """Load one version, in a thread of the loader."""
        manifest, stop = current.wanted.manifest, current.stop
        model = LoadedModel(
            manifest,
            State.LOADING,
            why=current.wanted.why,
            demanded=current.wanted.demanded and not current.wanted.staged,
            staged=current.wanted.staged,
            calls=self._models.usage.calls(manifest.content_id),
        )
        log.info("loading: %s version %s", manifest.model, manifest.version, extra=about_version(manifest))
        self._publish_progress(current, model)
        self._metrics.loading(manifest)

        def warming(instance: Instance) -> None:
            self.warming(current)
            self._publish_progress(current, replace(model, state=State.WARMING, instance=instance))

        try:
            if current.wanted.suspect:
                self.trying(current)
                self._load_on_trial(manifest, stop)
                self.loading(current)
            began = time.monotonic()
            self.memory.reserve(manifest)
            with self._guard.marks.loading(manifest, self._at.kind):
                loaded = load(manifest, self._repository.folder_of(manifest), self._at, stop, warming)
        except Failure as failure:
            self.memory.failed(manifest, failure)
            short = isinstance(failure, OutOfMemory | NotFree) and not stop.reason
            if short and self._policy.found_no_memory(current.wanted):
                return
            if stop.reason and stop.reason != NOT_WANTED:
                self._give_up(manifest, stop.reason)
            passing = failure.code is not Code.MODEL and not stop.reason
            self._fail(current, stop.reason or failure.message, passing=passing)
        except Exception as error:
            self.memory.failed(manifest)
            log.exception("version %s of %s cannot be loaded", manifest.version, manifest.model)
            self._fail(current, f"{type(error).__name__}: {error}")
        else:
            self._succeed(current, model, loaded, time.monotonic() - began)

    def _load_on_trial(self, manifest: Manifest, stop: Stop) -> None:
        """Load a suspect version in a process of its own. Raises Failure(MODEL) if that process dies, too.

        Its warm-up has the limit of any other, and fails the version for good beyond it.
        """
        died = probe(manifest, self._at, self._guard.marks.run_dir, self._guard.limits.warm_up_s, stop)
        if died:
            kind, now = self._at.kind, time.time()  # noqa: TID251 - for people
            verdict = self._change_verdict(manifest, lambda one: with_death(one, kind, DEATHS_CERTAIN, died, now))
            # An operator may have cleared the verdict meanwhile: then the version is loaded again.
            failed = verdict.on(kind).failed
            code = Code.MODEL if failed else Code.UNAVAILABLE
            raise Failure(code, failed or f"the process that loaded it {died}")

    def _succeed(self, current: Load, model: LoadedModel, loaded: LoadedVersion, seconds: float) -> None:
        manifest, profile = model.manifest, loaded.profile
        footprint, measured_now = self.memory.loaded(manifest, loaded.measurement, seconds)
        too_large = self.memory.budget.too_large(footprint) if loaded.measurement.alone else ""
        if too_large:
            loaded.instance.close()
            self.memory.keep(manifest, measured_now)
            self.memory.failed(manifest)
            self._fail(current, too_large)
            return
        measured = dict(profile.seconds)
        ready = replace(
            model,
            state=State.READY,
            instance=loaded.instance,
            measured=measured,
            alone=why_unmerged(manifest, self._repository.verdicts.of(manifest)),
            exploration=Exploration(measured, model.rows_max),
            rows_efficient=profile.rows_worth_running(model.rows_max),
            loaded_at=time.monotonic(),
            footprint=footprint,
        )
        if not self._publish_progress(current, ready):
            loaded.instance.close()
            self.memory.keep(manifest, measured_now)
            self.memory.failed(manifest)
            return
        time.sleep(YIELD_S)  # the calls that wait need neither wait for the file, nor for the interpreter's lock
        self.memory.keep(manifest, measured_now)
        self.failed.forget(manifest.content_id)
        self._metrics.bytes_of(ready, loaded.measurement.resident_bytes)
        self._metrics.loaded(manifest, seconds)
        if not loaded.compiled and self._compiles is not None:
            self._compiles.want(manifest)
        log.info("ready: %s version %s", manifest.model, manifest.version, extra=about_version(manifest))
        if current.wanted.suspect:
            self._change_verdict(manifest, lambda verdict: verdict.with_load(self._at.kind))

    def _fail(self, current: Load, reason: str, *, passing: bool = False) -> None:
        """Publish a failed load, and plan the next try. `passing`: it was for want of a device or of Redis."""
        manifest = current.wanted.manifest
        content_id = manifest.content_id
        # Its verdict says that no worker of this kind loads it again, if its end was requested.
        failed = self.failed.next(content_id, reason, passing=passing, final=bool(current.stop.reason))
        model = LoadedModel(manifest, State.FAILED, reason, retry_at=_retry_at(failed))
        if self._publish_progress(current, model):
            self.failed.note(content_id, failed)
            self._metrics.load_failed(manifest)
            level = logging.INFO if failed.repeated else logging.ERROR
            version = manifest.model, manifest.version
            log.log(level, "failed: %s version %s: %s", *version, reason, extra=about_version(manifest))

    def _publish_progress(self, current: Load, model: LoadedModel) -> bool:
        """Publish the progress of a load, unless it is no longer wanted; returns whether it is."""
        with self._settling:
            wanted = current.stop.reason != NOT_WANTED
            if wanted:
                self._models.set(model)
            return wanted

    def _on_stuck(self, current: Load) -> None:
        """Handle a load that does not end although its end was requested."""
        manifest, reason = current.wanted.manifest, current.stop.reason
        log.error("version %s of %s: %s, and cannot be ended", manifest.version, manifest.model, reason)
        if reason != NOT_WANTED:
            self._give_up(manifest, reason)
            self._fail(current, reason)
        if not self._stopping:
            self._guard.replace_process()

    def _give_up(self, manifest: Manifest, reason: str) -> None:
        """Record the failure in the version's verdict: no worker of this kind loads it until it is asked to."""
        now = time.time()  # noqa: TID251 - for people
        self._change_verdict(manifest, lambda verdict: verdict.with_failure(self._at.kind, reason, now))

    def _change_verdict(self, manifest: Manifest, change: Callable[[Verdict], Verdict]) -> Verdict:
        """Store the changed verdict of a version and return it; if it cannot be stored, only return it."""
        try:
            return self._repository.verdicts.change(manifest, change)
        except Failure as failure:
            log.warning("the verdict on %s cannot be stored: %s", manifest.content_id, failure.message)
            return change(self._repository.verdicts.of(manifest))


def about_version(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of a log entry about a version."""
    return about(manifest.model, version=manifest.version)


def _retry_at(failed: FailedLoad) -> float:
    """Return when a version is tried again (monotonic); 0: an operator decides."""
    return failed.retry_at if failed.retry_at < float("inf") else 0.0
