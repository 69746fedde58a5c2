"""reconciler: a thread that loads and unloads models until they are those that the repository has for this pool.

new version: load, warm up and measure, in a thread of the loader -> ready; then the heartbeat adds its lane
removed version: draining -> its stream is empty -> remove its lane -> no lease is left -> close
failed by its verdict: not loaded, also not after a restart, until the verdict is cleared
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from millstream.services.crashes.load_marks import DEATHS_CERTAIN, LoadMarks, with_death
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.process.backoff import with_jitter
from millstream.services.process.logs import about
from millstream.services.repository.base import Repository
from millstream.services.repository.stored_models import StoredModels
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import State
from millstream.workers.backends.base import Instance, Stop
from millstream.workers.consumer import Consumer
from millstream.workers.exploration import Exploration
from millstream.workers.load_version import LoadedVersion, LoadEnvironment, load, probe
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.loader import NOT_WANTED, Limits, Load, Loader, LoadRequest
from millstream.workers.metrics import WorkerMetrics

log = logging.getLogger("millstream.reconciler")

PAUSE_S_MAX = 1.0  # longest pause after a failure, before the next look at the repository
CHECK_S = 0.2  # interval at which the repository's token is compared: one stat of a file
DRAIN_S_MAX = 30.0
PROPAGATION_S = 0.3  # for gateways to learn that a version was removed, and to send its waiting requests
PROBE_START_S = 30.0  # to start the process of a trial load, in addition to the load itself
RETRY_S = 30.0  # longest pause before a version that failed for want of a device or Redis is loaded again


class PoolMember(NamedTuple):
    """The place of this worker in its pool."""

    pool: str
    number: int  # from 0: versions with `instances_max` are loaded by the first workers


class LoadGuard(NamedTuple):
    """What limits loads, and what happens to a load that exceeds its limit or ends the process."""

    marks: LoadMarks  # say after a crash what was being loaded
    limits: Limits
    replace_process: Callable[[], None]  # called when a load cannot be ended: a new process takes over


class Reconciler:
    """Loads and unloads models in threads of its own, while the main loop serves.

    Args:
        connect: opens a consumer for the reconciler.
    """

    def __init__(
        self,
        repository: Repository,
        member: PoolMember,
        at: LoadEnvironment,
        models: LoadedModels,
        connect: Callable[[], Consumer],
        metrics: WorkerMetrics,
        guard: LoadGuard,
    ) -> None:
        self._repository = repository
        self._member = member
        self._at = at
        self._models = models
        self._connect = connect
        self._metrics = metrics
        self._guard = guard
        self._stored = StoredModels(repository)
        self._stopping = threading.Event()
        self._retry_at: dict[str, float] = {}
        self._alone: set[str] = set()  # content ids that are not batched because of their verdict
        self._by_verdict: set[str] = set()  # content ids that are not loaded because of their verdict
        self._settling = threading.Lock()  # locked while deciding whether a load that ends is still wanted
        self._loads = Loader(self._load, self._on_stuck, guard.limits)
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        self._loads.start()
        self._thread.start()

    def stop(self) -> None:
        """Begin no further load. A load in progress that cannot be ended ends with the process."""
        self._stopping.set()
        self._loads.stop()
        self._guard.marks.close()

    @property
    def loading(self) -> bool:
        """Whether a load is in progress."""
        return self._loads.busy

    def _run(self) -> None:
        token = ""
        while not self._stopping.is_set():
            try:
                seen = self._repository.token()
                if seen != token or any(at <= time.monotonic() for at in list(self._retry_at.values())):
                    self.sync()
                    token = seen
            except Failure as failure:
                log.warning("%s; trying again", failure.message)
                self._stopping.wait(with_jitter(PAUSE_S_MAX))
            except Exception:
                log.exception("reconciling failed; trying again")
                self._stopping.wait(with_jitter(PAUSE_S_MAX))
            self._stopping.wait(CHECK_S)

    def sync(self) -> None:
        """Request the loads that are missing and unload what was removed, as the repository is now."""
        wanted = self._wanted()
        missing = [request for manifest in wanted.values() if (request := self._missing(manifest)) is not None]
        # Loads come first: an unwanted load ends now, and a new one need not wait until other versions have drained.
        with self._settling:
            self._loads.want(missing)
        loaded = self._models.all()
        # A version that was draining when Redis became unreachable, and is wanted again, is unloaded and loaded again.
        unwanted = [
            model for content_id, model in loaded.items() if content_id not in wanted or model.state is State.DRAINING
        ]
        if any(model.state is State.READY for model in unwanted):
            self._stopping.wait(PROPAGATION_S)
        for model in unwanted:
            if not self._stopping.is_set():
                self._unload(model)
        if any(model.state is State.DRAINING for model in unwanted) and not self._stopping.is_set():
            self.sync()

    def _missing(self, manifest: Manifest) -> LoadRequest | None:
        """Return the request to load a version of this pool; None if it is loaded, or has failed."""
        content_id = manifest.content_id
        model = self._models.get(content_id)
        verdict = self._repository.verdicts.of(manifest)
        self._apply_batching(content_id, verdict)
        if verdict.failed:
            if model is None or model.state in {State.LOADING, State.WARMING, State.FAILED}:
                self._by_verdict.add(content_id)
                self._models.set(LoadedModel(manifest, State.FAILED, verdict.failed))
            return None
        retry_at = self._retry_at.get(content_id)
        due = retry_at is not None and retry_at <= time.monotonic()
        if model is not None and model.state is State.FAILED and not due and content_id not in self._by_verdict:
            return None
        if model is not None and model.state in {State.READY, State.DRAINING}:
            return None
        self._retry_at.pop(content_id, None)
        self._by_verdict.discard(content_id)
        if model is None or model.state is State.FAILED:
            self._models.set(LoadedModel(manifest, State.LOADING))
        return LoadRequest(manifest, suspect=verdict.load_deaths > 0)

    def _apply_batching(self, content_id: str, verdict: Verdict) -> None:
        """Turn batching of a loaded version off, or on again, as its verdict says."""
        if verdict.batching_off:
            self._alone.add(content_id)
            self._models.run_alone(content_id, verdict.batching_off)
        elif content_id in self._alone:
            self._alone.discard(content_id)
            self._models.run_alone(content_id, "")

    def _wanted(self) -> dict[str, Manifest]:
        wanted: dict[str, Manifest] = {}
        for manifest in chain(self._published(), self._staged()):
            instances_max = manifest.config.instances_max
            if manifest.config.pool == self._member.pool and (not instances_max or self._member.number < instances_max):
                wanted[manifest.content_id] = manifest
        return wanted

    def _published(self) -> Iterator[Manifest]:
        self._stored.read()
        for model in self._stored.models.values():
            for version, (manifest, _) in model.versions.items():
                if model.endpoint.serves(version):
                    yield manifest

    def _staged(self) -> Iterator[Manifest]:
        """Yield versions that are tried before they are published; they are loaded besides those that serve."""
        for model in self._repository.staged.models():
            with _skipping_damage():
                yield from self._repository.staged.of(model)

    def _load(self, current: Load) -> None:
        """Load one version, in a thread of the loader."""
        manifest, stop = current.wanted.manifest, current.stop
        model = LoadedModel(manifest, State.LOADING)
        log.info("loading: %s version %s", manifest.model, manifest.version, extra=_about(manifest))
        self._publish_progress(current, model)
        self._metrics.loading(manifest)

        def warming(instance: Instance) -> None:
            self._loads.warming(current)
            self._publish_progress(current, replace(model, state=State.WARMING, instance=instance))

        try:
            if current.wanted.suspect:
                self._load_on_trial(manifest, stop)
            began = time.monotonic()
            with self._guard.marks.loading(manifest):
                loaded = load(manifest, self._repository.folder_of(manifest), self._at, stop, warming)
        except Failure as failure:
            if stop.reason and stop.reason != NOT_WANTED:
                self._give_up(manifest, stop.reason)
            self._fail(current, stop.reason or failure.message)
            if failure.code is not Code.MODEL and not stop.reason:
                self._retry_at[manifest.content_id] = time.monotonic() + with_jitter(RETRY_S)
        except Exception as error:
            log.exception("version %s of %s cannot be loaded", manifest.version, manifest.model)
            self._fail(current, f"{type(error).__name__}: {error}")
        else:
            self._succeed(current, model, loaded, time.monotonic() - began)

    def _load_on_trial(self, manifest: Manifest, stop: Stop) -> None:
        """Load a suspect version in a process of its own. Raises Failure(MODEL) if that process dies, too."""
        seconds_max = PROBE_START_S + sum(self._guard.limits)
        died = probe(manifest, self._at, self._guard.marks.run_dir, seconds_max, stop)
        if died:
            verdict = self._change_verdict(manifest, lambda one: with_death(one, DEATHS_CERTAIN, died, time.time()))  # noqa: TID251 - for people
            # An operator may have cleared the verdict meanwhile: then the version is loaded again.
            code = Code.MODEL if verdict.failed else Code.UNAVAILABLE
            raise Failure(code, verdict.failed or f"the process that loaded it {died}")

    def _succeed(self, current: Load, model: LoadedModel, loaded: LoadedVersion, seconds: float) -> None:
        manifest, profile = model.manifest, loaded.profile
        measured = dict(profile.seconds)
        ready = replace(
            model,
            state=State.READY,
            instance=loaded.instance,
            measured=measured,
            alone=self._repository.verdicts.of(manifest).batching_off,
            exploration=Exploration(measured, model.rows_max),
            rows_efficient=profile.rows_worth_running(model.rows_max),
        )
        if not self._publish_progress(current, ready):
            loaded.instance.close()
            return
        self._metrics.bytes_of(ready, loaded.instance.size_bytes)
        self._metrics.loaded(manifest, seconds)
        log.info("ready: %s version %s", manifest.model, manifest.version, extra=_about(manifest))
        if current.wanted.suspect:
            self._change_verdict(manifest, lambda verdict: verdict.model_copy(update={"load_deaths": 0}))

    def _fail(self, current: Load, reason: str) -> None:
        manifest = current.wanted.manifest
        if self._publish_progress(current, LoadedModel(manifest, State.FAILED, reason)):
            self._metrics.load_failed(manifest)
            log.error("failed: %s version %s: %s", manifest.model, manifest.version, reason, extra=_about(manifest))

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
        if not self._stopping.is_set():
            self._guard.replace_process()

    def _give_up(self, manifest: Manifest, reason: str) -> None:
        """Record the failure in the version's verdict: no worker loads it again until an operator asks for it."""
        self._change_verdict(manifest, lambda verdict: verdict.with_failure(reason, time.time()))  # noqa: TID251 - for people

    def _change_verdict(self, manifest: Manifest, change: Callable[[Verdict], Verdict]) -> Verdict:
        """Store the changed verdict of a version and return it; if it cannot be stored, only return it."""
        try:
            return self._repository.verdicts.change(manifest, change)
        except Failure as failure:
            log.warning("the verdict on %s cannot be stored: %s", manifest.content_id, failure.message)
            return change(self._repository.verdicts.of(manifest))

    def _unload(self, model: LoadedModel) -> None:
        content_id = model.manifest.content_id
        if model.state is State.READY:
            consumer = self._connect()
            try:
                self._drain(consumer, content_id)
            finally:
                consumer.close()
        self._models.remove(content_id)
        self._retry_at.pop(content_id, None)
        self._by_verdict.discard(content_id)
        self._alone.discard(content_id)
        self._metrics.unloaded(model)
        if model.instance is not None and model.state is not State.WARMING:  # a load closes its instance itself
            model.instance.close()
        log.info("unloaded: %s version %s", model.manifest.model, model.manifest.version, extra=_about(model.manifest))

    def _drain(self, consumer: Consumer, content_id: str) -> None:
        """Wait until the lane's batches are run, then remove the lane. Gateways stop sending when the state changes."""
        self._models.move(content_id, State.DRAINING)
        until = time.monotonic() + DRAIN_S_MAX
        while consumer.pending(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        consumer.remove_lane(content_id)
        while consumer.leased(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        consumer.remove_lane(content_id)  # again: the stream is empty now, and the last worker deletes it


def _about(manifest: Manifest) -> dict[str, Any]:
    return about(manifest.model, version=manifest.version)


@contextmanager
def _skipping_damage() -> Iterator[None]:
    """Skip a model that was just removed or is damaged, so that the others are still handled."""
    try:
        yield
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            log.warning("%s", failure.message)
