"""A thread that keeps the versions of this worker equal to those that the repository has for its pool.

token of the repository changed ─> wanted versions ─> residency: what is missing; unloads: what was removed
"""

from __future__ import annotations

import logging
import threading
import time

from millstream.services.errors import Failure
from millstream.services.process.threads import lower_priority
from millstream.services.process.waits import with_jitter
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import State
from millstream.workers.models.loaded_models import LoadedModels
from millstream.workers.models.wanted import WantedVersions
from millstream.workers.residency.residency import Residency
from millstream.workers.residency.unloads import PROPAGATION_S, Unloads
from millstream.workers.residency.version_loads import VersionLoads, about_version

log = logging.getLogger("millstream.reconciler")

PAUSE_S_MAX = 1.0  # longest pause after a failure, before the next look at the repository
CHECK_S = 0.2  # interval at which the repository's token is compared: one small file is read
IDLE_CHECK_S = 0.5  # the same interval while nothing has changed for IDLE_AFTER_S
IDLE_AFTER_S = 30.0
BUSY_CHECK_S = 0.01  # the same interval after a change: models are often registered one after the other
SERIES_S = 60.0  # interval at which the metrics of deleted versions are looked for
BUSY_S = 1.0  # for this long after a change


class Reconciler:
    """Loads and unloads models in threads of its own, while the main loop serves.

    Args:
        stopping: set by `stop`; unloads share it.
    """

    def __init__(
        self,
        repository: FolderRepository,
        versions: WantedVersions,
        models: LoadedModels,
        loads: VersionLoads,
        unloads: Unloads,
        residency: Residency,
        stopping: threading.Event,
    ) -> None:
        self.token = ""  # of the repository state that the instances follow; also "" of one without models
        self.synced = False  # whether they follow any
        self._repository = repository
        self._models = models
        self._loads = loads
        self._unloads = unloads
        self._residency = residency
        self._stopping = stopping
        self._versions = versions
        self._series_due = 0.0
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        self._loads.start(self._residency)
        self._thread.start()

    def stop(self) -> None:
        """Begin no further load. A load in progress that cannot be ended ends with the process."""
        self._stopping.set()
        self._models.lost.set()
        self._loads.stop()

    def _run(self) -> None:
        # Closing an instance takes milliseconds. Calls wait for it only while it looks at what changed (`sync`).
        lower_priority()
        token: str | None = None
        busy_until = 0.0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                seen = self._repository.token()
                if seen != token or self._loads.failed.any_due():
                    busy_until = time.monotonic() + BUSY_S
                    self.sync(seen)
                    token = seen
                self._residency.quotas.read()
                self._residency.reconsider()
                unload_lost(self._models, self._unloads, self._loads)
                if began >= self._series_due:
                    self._series_due = began + SERIES_S
                    self._unloads.end_series(self._versions.exists, began)
            except Failure as failure:
                log.warning("%s; trying again", failure.message)
                self._stopping.wait(with_jitter(PAUSE_S_MAX))
            except Exception:
                log.exception("reconciling failed; trying again")
                self._stopping.wait(with_jitter(PAUSE_S_MAX))
            now = time.monotonic()
            # Among thousands of versions a look takes long: it takes at most a quarter of the time.
            busy_check_s = min(CHECK_S, max(BUSY_CHECK_S, 3 * (now - began)))
            idle_check_s = CHECK_S if now < busy_until + IDLE_AFTER_S else IDLE_CHECK_S
            self._models.lost.wait(busy_check_s if now < busy_until else idle_check_s)
            self._models.lost.clear()

    def sync(self, token: str) -> None:
        """Request the loads that are missing and unload what was removed, as the repository is now.

        `token` was read before, so that what is read now is that state or a later one.
        """
        wanted = self._versions.read()
        # Loads come first: an unwanted load ends now, and a new one need not wait until other versions have drained.
        self._residency.update(wanted)
        self.synced = True
        if token != self.token:
            self.token = token
            self._models.signal.now()
        # A version that was draining when Redis became unreachable, and is wanted again, is unloaded and loaded again.
        unwanted = [
            model
            for content_id, model in self._models.all().items()
            if content_id not in wanted or model.state is State.DRAINING
        ]
        unwanted = [model for model in unwanted if not self._unloads.any_closing([model.manifest.content_id])]
        if any(model.state is State.READY for model in unwanted):
            self._stopping.wait(PROPAGATION_S)
        for model in unwanted:
            if not self._stopping.is_set():
                self._unloads.remove(model)
        if any(model.state is State.DRAINING for model in unwanted) and not self._stopping.is_set():
            self.sync(token)


def unload_lost(models: LoadedModels, unloads: Unloads, loads: VersionLoads) -> None:
    """Unload the instances that cannot run any longer, so that gateways send their requests elsewhere.

    Raises Failure(UNAVAILABLE) without Redis.
    """
    for model in models.all().values():
        reason = model.lost if model.state is State.READY else ""
        if reason:
            manifest = model.manifest
            log.warning(
                "lost: %s version %s: %s", manifest.model, manifest.version, reason, extra=about_version(manifest)
            )
            unloads.remove(model)
            loads.lose(manifest, reason)
