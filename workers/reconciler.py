"""reconciler: a thread that keeps the versions of this worker equal to those that the repository has for its pool.

token of the repository changed ─> wanted versions ─> loads that are missing (version_loads), unloads (unloads)
"""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from millstream.services.errors import Failure
from millstream.services.process.backoff import with_jitter
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import State
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.loader import LoadRequest
from millstream.workers.unloads import PROPAGATION_S, Unloads
from millstream.workers.version_loads import VersionLoads
from millstream.workers.wanted import Wanted, WantedVersions

log = logging.getLogger("millstream.reconciler")

PAUSE_S_MAX = 1.0  # longest pause after a failure, before the next look at the repository
CHECK_S = 0.2  # interval at which the repository's token is compared: one small file is read
BUSY_CHECK_S = 0.01  # the same interval after a change: models are often registered one after the other
BUSY_S = 1.0  # for this long after a change


class PoolMember(NamedTuple):
    """The place of this worker in its pool."""

    pool: str
    number: int  # from 0: versions with `instances_max` are loaded by the first workers
    formats: frozenset[str] = frozenset()  # model formats that its backend loads; empty: all


class Reconciler:
    """Loads and unloads models in threads of its own, while the main loop serves.

    Args:
        stopping: set by `stop`; unloads share it.
    """

    def __init__(
        self,
        repository: Repository,
        member: PoolMember,
        models: LoadedModels,
        loads: VersionLoads,
        unloads: Unloads,
        stopping: threading.Event,
    ) -> None:
        self._repository = repository
        self._member = member
        self._models = models
        self._loads = loads
        self._unloads = unloads
        self._stopping = stopping
        self._versions = WantedVersions(repository, member.pool, member.formats)
        self._alone: set[str] = set()  # content ids that are not batched because of their verdict
        self._by_verdict: set[str] = set()  # content ids that are not loaded because of their verdict
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        self._loads.start()
        self._thread.start()

    def stop(self) -> None:
        """Begin no further load. A load in progress that cannot be ended ends with the process."""
        self._stopping.set()
        self._loads.stop()

    def _run(self) -> None:
        token = ""
        busy_until = 0.0
        while not self._stopping.is_set():
            try:
                seen = self._repository.token()
                if seen != token or self._loads.any_retry_due:
                    busy_until = time.monotonic() + BUSY_S
                    self.sync()
                    token = seen
            except Failure as failure:
                log.warning("%s; trying again", failure.message)
                self._stopping.wait(with_jitter(PAUSE_S_MAX))
            except Exception:
                log.exception("reconciling failed; trying again")
                self._stopping.wait(with_jitter(PAUSE_S_MAX))
            self._stopping.wait(BUSY_CHECK_S if time.monotonic() < busy_until else CHECK_S)

    def sync(self) -> None:
        """Request the loads that are missing and unload what was removed, as the repository is now."""
        wanted = {
            content_id: one
            for content_id, one in self._versions.read().items()
            if not one.instances_max or self._member.number < one.instances_max
        }
        # Loads come first: an unwanted load ends now, and a new one need not wait until other versions have drained.
        self._loads.want([request for one in wanted.values() if (request := self._missing(one)) is not None])
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

    def _missing(self, wanted: Wanted) -> LoadRequest | None:
        """Return the request to load a version of this pool; None if it is loaded, or has failed."""
        manifest, verdict, content_id = wanted.manifest, wanted.verdict, wanted.manifest.content_id
        model = self._models.get(content_id)
        self._apply_batching(content_id, verdict)
        if verdict.failed:
            if model is None or model.state in {State.LOADING, State.WARMING, State.FAILED}:
                self._by_verdict.add(content_id)
                self._models.set(LoadedModel(manifest, State.FAILED, verdict.failed))
            return None
        due = self._loads.retry_due(content_id)
        if model is not None and model.state is State.FAILED and not due and content_id not in self._by_verdict:
            return None
        if model is not None and model.state in {State.READY, State.DRAINING}:
            return None
        self._loads.forget_failure(content_id)
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

    def _unload(self, model: LoadedModel) -> None:
        self._unloads.remove(model)
        content_id = model.manifest.content_id
        self._loads.forget_failure(content_id)
        self._by_verdict.discard(content_id)
        self._alone.discard(content_id)
