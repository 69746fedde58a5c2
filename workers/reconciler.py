"""reconciler: a thread that keeps what this worker holds equal to what the repository has for its pool.

new version: load, warm up and measure, in a thread of its own (loads) -> ready; then the heart holds its lane
gone version: draining -> its stream runs dry -> remove its lane -> nothing leased any more -> close
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

from millstream.services.crashes.load_marks import DEATHS_CERTAIN, LoadMarks, with_death
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.base import Repository
from millstream.services.repository.stored_models import StoredModels
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import State
from millstream.workers.backends.base import Instance, Stop
from millstream.workers.consumer import Consumer
from millstream.workers.exploration import Exploration
from millstream.workers.load_version import LoadedVersion, Placement, load, probe
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.loader import NOT_WANTED, Limits, Load, Loader, LoadRequest
from millstream.workers.metrics import WorkerMetrics

log = logging.getLogger("millstream.reconciler")

LOOK_S = 0.2  # how often the repository's token is compared; one stat of a file
DRAIN_S_MAX = 30.0
NEWS_S = 0.3  # how long gateways may take to hear of a change, and to send what waits for a version that goes
PROBE_START_S = 30.0
RETRY_S = 30.0  # a version that failed for want of a device or of Redis is tried again after this


class Reconciler:
    """`connect` opens an exchange of the keeper's own. The main loop goes on serving meanwhile.

    `place`: of this worker among those of its pool, from 0; versions that few workers are to hold are held by the first.
    `replace`: called when a load cannot be ended: this process has to give way to a fresh one.
    """

    def __init__(
        self,
        repository: Repository,
        pool: str,
        at: Placement,
        held: LoadedModels,
        connect: Callable[[], Consumer],
        tallies: WorkerMetrics,
        marks: LoadMarks,
        limits: Limits,
        replace: Callable[[], None],
        place: int = 0,
    ) -> None:
        self._place = place
        self._repository = repository
        self._pool = pool
        self._at = at
        self._held = held
        self._connect = connect
        self._tallies = tallies
        self._marks = marks
        self._limits = limits
        self._replace = replace
        self._stored = StoredModels(repository)
        self._stopping = threading.Event()
        self._retry_at: dict[str, float] = {}
        self._alone: set[str] = set()  # content ids that are not batched because of it
        self._by_verdict: set[str] = set()  # content ids that are not loaded because of their verdict
        self._settling = threading.Lock()  # whether a load that ends is still wanted
        self._loads = Loader(self._load, self._on_stuck, limits)
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        self._loads.start()
        self._thread.start()

    def stop(self) -> None:
        """Take up nothing more. A load that is under way, and cannot be ended, is left to end with the process."""
        self._stopping.set()
        self._loads.stop()
        self._marks.close()

    @property
    def loading(self) -> bool:
        """Whether a load is under way."""
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
                self._stopping.wait(1)
            except Exception:
                log.exception("keeping the instances failed; trying again")
                self._stopping.wait(1)
            self._stopping.wait(LOOK_S)

    def sync(self) -> None:
        """Have what is missing loaded and close what is gone, as the repository is now."""
        wanted = self._wanted()
        missing = [one for manifest in wanted.values() if (one := self._missing(manifest)) is not None]
        # First: a load that nobody wants any more ends now, and what is new need not wait for what drains.
        with self._settling:
            self._loads.want(missing)
        held = self._held.all()
        # What was on its way out when Redis went away, and is wanted again, begins anew.
        gone = [one for content_id, one in held.items() if content_id not in wanted or one.state is State.DRAINING]
        if any(holding.state is State.READY for holding in gone):
            self._stopping.wait(NEWS_S)
        for holding in gone:
            if not self._stopping.is_set():
                self._unload(holding)
        if any(holding.state is State.DRAINING for holding in gone) and not self._stopping.is_set():
            self.sync()

    def _missing(self, manifest: Manifest) -> LoadRequest | None:
        """What is to be loaded of a version that this worker is to hold; None: it is there, or has failed."""
        content_id = manifest.content_id
        holding = self._held.get(content_id)
        verdict = self._repository.verdicts.of(manifest)
        self._heed_batching(content_id, verdict)
        if verdict.failed:
            if holding is None or holding.state in {State.LOADING, State.WARMING, State.FAILED}:
                self._by_verdict.add(content_id)
                self._held.set(LoadedModel(manifest, State.FAILED, verdict.failed))
            return None
        retry_at = self._retry_at.get(content_id)
        due = retry_at is not None and retry_at <= time.monotonic()
        if holding is not None and holding.state is State.FAILED and not due and content_id not in self._by_verdict:
            return None
        if holding is not None and holding.state in {State.READY, State.DRAINING}:
            return None
        self._retry_at.pop(content_id, None)
        self._by_verdict.discard(content_id)
        if holding is None or holding.state is State.FAILED:
            self._held.set(LoadedModel(manifest, State.LOADING))
        return LoadRequest(manifest, suspect=verdict.load_deaths > 0)

    def _heed_batching(self, content_id: str, verdict: Verdict) -> None:
        """Requests of a version share runs, or not, as its verdict says since it was last looked at."""
        if verdict.batching_off:
            self._alone.add(content_id)
            self._held.run_alone(content_id, verdict.batching_off)
        elif content_id in self._alone:
            self._alone.discard(content_id)
            self._held.run_alone(content_id, "")

    def _wanted(self) -> dict[str, Manifest]:
        wanted: dict[str, Manifest] = {}
        for manifest in chain(self._published(), self._staged()):
            few = manifest.config.instances_max
            if manifest.config.pool == self._pool and (not few or self._place < few):
                wanted[manifest.content_id] = manifest
        return wanted

    def _published(self) -> Iterator[Manifest]:
        self._stored.read()
        for model in self._stored.models.values():
            for version, (manifest, _) in model.versions.items():
                if model.endpoint.serves(version):
                    yield manifest

    def _staged(self) -> Iterator[Manifest]:
        """Versions on trial, which are loaded beside those that serve."""
        for model in self._repository.staged.models():
            with _skipping_damage():
                yield from self._repository.staged.of(model)

    def _load(self, under_way: Load) -> None:
        """Load one version, in a thread of `loads`."""
        manifest, stop = under_way.wanted.manifest, under_way.stop
        holding = LoadedModel(manifest, State.LOADING)
        self._set(under_way, holding)

        def warming(instance: Instance) -> None:
            self._loads.warming(under_way)
            self._set(under_way, replace(holding, state=State.WARMING, instance=instance))

        try:
            if under_way.wanted.suspect:
                self._try_apart(manifest, stop)
            with self._marks.loading(manifest):
                loaded = load(manifest, self._repository.folder_of(manifest), self._at, stop, warming)
        except Failure as failure:
            if stop.reason and stop.reason != NOT_WANTED:
                self._give_up(manifest, stop.reason)
            self._fail(under_way, stop.reason or failure.message)
            if failure.code is not Code.MODEL and not stop.reason:
                self._retry_at[manifest.content_id] = time.monotonic() + RETRY_S
        except Exception as error:
            log.exception("version %s of %s cannot be loaded", manifest.version, manifest.model)
            self._fail(under_way, f"{type(error).__name__}: {error}")
        else:
            self._succeed(under_way, holding, loaded)

    def _try_apart(self, manifest: Manifest, stop: Stop) -> None:
        """Load a suspect in a process of its own. Raises Failure(MODEL) when that process dies, too."""
        seconds_max = PROBE_START_S + sum(self._limits)
        died = probe(manifest, self._at, self._marks.run_dir, seconds_max, stop)
        if died:
            verdict = self._judge(manifest, lambda one: with_death(one, DEATHS_CERTAIN, died, time.time()))  # noqa: TID251 - for people
            code = Code.MODEL if verdict.failed else Code.UNAVAILABLE  # cleared in between: tried again
            raise Failure(code, verdict.failed or f"the process that loaded it {died}")

    def _succeed(self, under_way: Load, holding: LoadedModel, loaded: LoadedVersion) -> None:
        manifest, profile = holding.manifest, loaded.profile
        measured = dict(profile.seconds)
        ready = replace(
            holding,
            state=State.READY,
            instance=loaded.instance,
            measured=measured,
            alone=self._repository.verdicts.of(manifest).batching_off,
            exploration=Exploration(measured, holding.rows_max),
            rows_efficient=profile.rows_worth_running(holding.rows_max),
        )
        if not self._set(under_way, ready):
            loaded.instance.close()
            return
        self._tallies.bytes_of(ready, loaded.instance.size_bytes)
        log.info("ready: %s version %s", manifest.model, manifest.version)
        if under_way.wanted.suspect:
            self._judge(manifest, lambda verdict: verdict.model_copy(update={"load_deaths": 0}))

    def _fail(self, under_way: Load, reason: str) -> None:
        manifest = under_way.wanted.manifest
        if self._set(under_way, LoadedModel(manifest, State.FAILED, reason)):
            log.error("failed: %s version %s: %s", manifest.model, manifest.version, reason)

    def _set(self, under_way: Load, holding: LoadedModel) -> bool:
        """Show a load's progress, unless nobody wants it any more."""
        with self._settling:
            wanted = under_way.stop.reason != NOT_WANTED
            if wanted:
                self._held.set(holding)
            return wanted

    def _on_stuck(self, under_way: Load) -> None:
        """A load that was asked to end does not."""
        manifest, reason = under_way.wanted.manifest, under_way.stop.reason
        log.error("version %s of %s: %s, and cannot be ended", manifest.version, manifest.model, reason)
        if reason != NOT_WANTED:
            self._give_up(manifest, reason)
            self._fail(under_way, reason)
        if not self._stopping.is_set():
            self._replace()

    def _give_up(self, manifest: Manifest, reason: str) -> None:
        """No worker loads the version again until an operator asks for it."""
        self._judge(manifest, lambda verdict: verdict.with_failure(reason, time.time()))  # noqa: TID251 - for people

    def _judge(self, manifest: Manifest, change: Callable[[Verdict], Verdict]) -> Verdict:
        try:
            return self._repository.verdicts.change(manifest, change)
        except Failure as failure:
            log.warning("what is known about %s cannot be kept: %s", manifest.content_id, failure.message)
            return change(self._repository.verdicts.of(manifest))

    def _unload(self, holding: LoadedModel) -> None:
        content_id = holding.manifest.content_id
        if holding.state is State.READY:
            consumer = self._connect()
            try:
                self._drain(consumer, content_id)
            finally:
                consumer.close()
        self._held.remove(content_id)
        self._retry_at.pop(content_id, None)
        self._by_verdict.discard(content_id)
        self._alone.discard(content_id)
        self._tallies.gone(holding)
        if holding.instance is not None and holding.state is not State.WARMING:  # that is its load's to close
            holding.instance.close()
        log.info("unloaded: %s version %s", holding.manifest.model, holding.manifest.version)

    def _drain(self, consumer: Consumer, content_id: str) -> None:
        """Gateways stop sending when they see the version gone; what they sent before is still run."""
        self._held.move(content_id, State.DRAINING)
        until = time.monotonic() + DRAIN_S_MAX
        while consumer.pending(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        consumer.remove_lane(content_id)
        while consumer.leased(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        consumer.remove_lane(content_id)  # once more: the last to leave takes the empty stream along


@contextmanager
def _skipping_damage() -> Iterator[None]:
    """What was removed in between, or is damaged, is left out; the others go on."""
    try:
        yield
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            log.warning("%s", failure.message)
