"""version_loads: loads versions in threads of the loader and publishes the progress of each load.

LoadRequest ─> loader ─> (suspect: trial load in a process of its own) ─> load, warm up, measure ─> READY or FAILED
a version whose verdict says that it failed is not loaded, also not after a restart, until the verdict is cleared
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from millstream.services.crashes.load_marks import DEATHS_CERTAIN, LoadMarks, with_death
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.process.backoff import with_jitter
from millstream.services.process.logs import about
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import LoadRecord, State
from millstream.workers.backends.base import Instance, OutOfMemory, Stop
from millstream.workers.exploration import Exploration
from millstream.workers.load_memory import LoadMemory, NotFree
from millstream.workers.load_version import LoadedVersion, LoadEnvironment, load, probe
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.loader import NOT_WANTED, Limits, Load, Loader, LoadRequest
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.variant_compiles import VariantCompiles

log = logging.getLogger("millstream.reconciler")

PROBE_START_S = 30.0  # to start the process of a trial load, in addition to the load itself
LOST_RETRY_S = 2.0  # longest pause before a version whose instance was lost is loaded again, the first time
RETRY_S = 30.0  # longest pause before a version that failed for want of a device or Redis is loaded again
FAILURES_MAX = 3  # loads of a version that failed in this worker, before orders for it are refused
FAILED_RETRY_S = 60.0  # longest pause before a version whose files or library failed is loaded again
FAILED_OFTEN_RETRY_S = 300.0  # the same after FAILURES_MAX failures


class LoadGuard(NamedTuple):
    """What limits loads, and what happens to a load that exceeds its limit or ends the process."""

    marks: LoadMarks  # say after a crash what was being loaded
    limits: Limits
    replace_process: Callable[[], None]  # called when a load cannot be ended: a new process takes over


class VersionLoads:
    """Loads versions while the main loop serves. Safe for several threads.

    Args:
        now: returns seconds on the Redis clock.
    """

    def __init__(
        self,
        repository: Repository,
        at: LoadEnvironment,
        models: LoadedModels,
        metrics: WorkerMetrics,
        guard: LoadGuard,
        now: Callable[[], float],
    ) -> None:
        self._repository = repository
        self._at = at
        self._models = models
        self._metrics = metrics
        self._guard = guard
        self._now = now
        #: Called when a load found no memory; True: it is tried again, or its failure is published.
        self._on_out_of_memory: Callable[[LoadRequest], bool] = lambda _: False
        self._stopping = False
        self._retry_at: dict[str, float] = {}  # content id -> monotonic time at which a failed load is tried again
        self._failures: dict[str, tuple[int, float]] = {}  # content id -> failed loads, time of the last (monotonic)
        self.memory = LoadMemory(repository, at)
        self._compiles = VariantCompiles(at, at.variants) if at.variants is not None else None
        self._settling = threading.Lock()  # locked while deciding whether a load that ends is still wanted
        self._loader = Loader(self._load, self._on_stuck, guard.limits)

    def follow(
        self,
        admit: Callable[[LoadRequest], bool],
        on_end: Callable[[str], None],
        on_out_of_memory: Callable[[LoadRequest], bool],
    ) -> None:
        """Set what is called before a load begins, after it has ended, and when it found no memory."""
        self._loader.admit, self._loader.on_end, self._on_out_of_memory = admit, on_end, on_out_of_memory

    def start(self) -> None:
        self._loader.start()

    def stop(self) -> None:
        """Begin no further load. A load in progress that cannot be ended ends with the process."""
        self._stopping = True
        self._loader.stop()
        if self._compiles is not None:
            self._compiles.stop()
        self._guard.marks.close()

    @property
    def kind(self) -> str:
        """The kind of this worker, for which verdicts on loads are kept."""
        return self._at.kind

    def give_way(self) -> bool:
        """End a compilation whose memory a load needs; False: there is none."""
        return self._compiles is not None and self._compiles.give_way()

    @property
    def busy(self) -> bool:
        """Whether a load is in progress."""
        return self._loader.busy

    @property
    def pending(self) -> bool:
        """Whether a load is in progress or waits."""
        return self._loader.pending

    def active(self) -> set[str]:
        """Return the content ids of versions that are being loaded or are demanded."""
        return self._loader.active()

    def in_progress(self, content_id: str) -> bool:
        """Return whether a version is being loaded, also if the load was requested to end."""
        return self._loader.in_progress(content_id)

    def records(self) -> tuple[LoadRecord, ...]:
        """Return what is being loaded and what waits for that, for other processes."""
        now = self._now()
        return tuple(
            LoadRecord(
                content_id=one.content_id,
                began=0.0 if one.began_s is None else round(now - one.began_s, 1),
                yields_s=one.yields_s,
            )
            for one in self._loader.ahead()
        )

    def want(self, missing: Sequence[LoadRequest], kept: Collection[str]) -> None:
        """Load these versions, and go on with the loads of the `kept` ones; end the loads of all others."""
        with self._settling:
            self._loader.want(missing, kept)

    def demand(self, request: LoadRequest) -> None:
        """Load a version that calls wait for, before all others."""
        self._retry_at.pop(request.content_id, None)
        self._loader.demand(request)

    @property
    def any_retry_due(self) -> bool:
        """Whether any version whose load failed is to be loaded again now."""
        return any(at <= time.monotonic() for at in list(self._retry_at.values()))

    def failures_of(self, content_id: str) -> tuple[int, float]:
        """Return how many loads of a version failed in a row, and how many seconds ago the last one did."""
        count, at = self._failures.get(content_id, (0, 0.0))
        return count, time.monotonic() - at

    def begin_retry(self, content_id: str) -> bool:
        """Return, once, whether a version whose load failed is to be loaded again now; its failures still count."""
        due = self._retry_at.get(content_id, float("inf")) <= time.monotonic()
        if due:
            self._retry_at.pop(content_id, None)
        return due

    def forget_failures(self, content_id: str) -> None:
        """Forget the failed loads of a version: it is new again, or it was removed."""
        self._retry_at.pop(content_id, None)
        self._failures.pop(content_id, None)

    def lose(self, manifest: Manifest, reason: str) -> None:
        """Publish that an instance is gone for a reason that may pass, and load the version again soon."""
        self._models.set(LoadedModel(manifest, State.FAILED, reason))
        self._retry_at[manifest.content_id] = time.monotonic() + with_jitter(LOST_RETRY_S)

    def _load(self, current: Load) -> None:
        """Load one version, in a thread of the loader."""
        manifest, stop = current.wanted.manifest, current.stop
        model = LoadedModel(
            manifest,
            State.LOADING,
            why=current.wanted.why,
            demanded=current.wanted.demanded and not current.wanted.staged,
            calls=self._models.usage.calls(manifest.content_id),
        )
        log.info("loading: %s version %s", manifest.model, manifest.version, extra=about_version(manifest))
        self._publish_progress(current, model)
        self._metrics.loading(manifest)

        def warming(instance: Instance) -> None:
            self._loader.warming(current)
            self._publish_progress(current, replace(model, state=State.WARMING, instance=instance))

        try:
            if current.wanted.suspect:
                self._load_on_trial(manifest, stop)
            began = time.monotonic()
            self.memory.reserve(manifest)
            with self._guard.marks.loading(manifest, self._at.kind):
                loaded = load(manifest, self._repository.folder_of(manifest), self._at, stop, warming)
        except Failure as failure:
            self.memory.failed(manifest, failure)
            short = isinstance(failure, OutOfMemory | NotFree) and not stop.reason
            if short and self._on_out_of_memory(current.wanted):
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
        """Load a suspect version in a process of its own. Raises Failure(MODEL) if that process dies, too."""
        seconds_max = PROBE_START_S + sum(self._guard.limits)
        died = probe(manifest, self._at, self._guard.marks.run_dir, seconds_max, stop)
        if died:
            kind, now = self._at.kind, time.time()  # noqa: TID251 - for people
            verdict = self._change_verdict(manifest, lambda one: with_death(one, kind, DEATHS_CERTAIN, died, now))
            # An operator may have cleared the verdict meanwhile: then the version is loaded again.
            failed = verdict.on(kind).failed
            code = Code.MODEL if failed else Code.UNAVAILABLE
            raise Failure(code, failed or f"the process that loaded it {died}")

    def _succeed(self, current: Load, model: LoadedModel, loaded: LoadedVersion, seconds: float) -> None:
        manifest, profile = model.manifest, loaded.profile
        footprint = self.memory.loaded(manifest, loaded.measurement, seconds)
        too_large = self.memory.budget.too_large(footprint) if loaded.measurement.alone else ""
        if too_large:
            loaded.instance.close()
            self.memory.failed(manifest)
            self._fail(current, too_large)
            return
        measured = dict(profile.seconds)
        ready = replace(
            model,
            state=State.READY,
            instance=loaded.instance,
            measured=measured,
            alone=self._repository.verdicts.of(manifest).batching_off,
            exploration=Exploration(measured, model.rows_max),
            rows_efficient=profile.rows_worth_running(model.rows_max),
            loaded_at=self._now(),
            footprint=footprint,
        )
        if not self._publish_progress(current, ready):
            loaded.instance.close()
            self.memory.failed(manifest)
            return
        self._failures.pop(manifest.content_id, None)
        self._metrics.bytes_of(ready, loaded.measurement.resident_bytes)
        self._metrics.loaded(manifest, seconds)
        if not loaded.compiled and self._compiles is not None:
            self._compiles.want(manifest)
        log.info("ready: %s version %s", manifest.model, manifest.version, extra=about_version(manifest))
        if current.wanted.suspect:
            self._change_verdict(manifest, lambda verdict: verdict.with_load(self._at.kind))

    def _fail(self, current: Load, reason: str, *, passing: bool = False) -> None:
        """Publish a failed load, and plan the next try. `passing`: it was for want of a device or of Redis."""
        manifest, now = current.wanted.manifest, time.monotonic()
        content_id = manifest.content_id
        if self._publish_progress(current, LoadedModel(manifest, State.FAILED, reason)):
            failures = 0 if passing else self.failures_of(content_id)[0] + 1
            self._failures[content_id] = (failures, now)
            often = failures >= FAILURES_MAX
            pause_s = RETRY_S if passing else FAILED_OFTEN_RETRY_S if often else FAILED_RETRY_S
            if not current.stop.reason:  # otherwise its verdict says that no worker of this kind loads it again
                self._retry_at[content_id] = now + with_jitter(pause_s)
            self._metrics.load_failed(manifest)
            log.error(
                "failed: %s version %s: %s", manifest.model, manifest.version, reason, extra=about_version(manifest)
            )

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
