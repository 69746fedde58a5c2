"""What a worker learns from runs: rows that influence each other run alone, and sizes that find no memory are left out.

A size counts as too large only if its halves ran. A request that finds no memory alone is itself at fault and does not
change the sizes of other requests.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.process.process_memory import trim
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import Verdict
from millstream.workers.batches.live_check import Outcome
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import LoadedModels

log = logging.getLogger("millstream.memory")

#: Least time between two rebuilds of an instance, and between two log lines: a caller who repeats a request that is too
#: large must not cause a load each time.
REBUILD_S_MIN = 10.0
#: Least time between two garbage collections.
COLLECT_S_MIN = 1.0


class BatchingOff:
    """Turns batching off: in this worker at once, in other workers and in gateways through the version's verdict."""

    def __init__(self, repository: FolderRepository, models: LoadedModels, metrics: WorkerMetrics) -> None:
        self._repository = repository
        self._models = models
        self._metrics = metrics

    def settle(self, manifest: Manifest, outcome: Outcome, why: str) -> None:
        """Handle the outcome of a check; `why` describes the difference, or why there is no decision."""
        self._metrics.batch_checked(manifest, outcome)
        if outcome is Outcome.FORM_DIFFERS:
            log.error("version %s of %s: %s; the form serves no longer", manifest.version, manifest.model, why)
        if outcome is Outcome.UNDECIDED:
            log.info("a batch of %s was not checked: %s", manifest.content_id, why)
        if outcome is not Outcome.DIFFERS:
            return
        reason = f"rows of a live batch gave other outputs than they give alone: {why}"
        log.error(
            "version %s of %s: %s; its requests run one at a time from now on", manifest.version, manifest.model, reason
        )
        self._models.run_alone(manifest.content_id, reason)

        def turn_off(verdict: Verdict) -> Verdict:
            counted = verdict.model_copy(update={"mismatches": verdict.mismatches + 1})
            return counted if verdict.batching_off else counted.with_batching_off(reason, time.time())  # noqa: TID251 - for people

        try:
            self._repository.verdicts.change(manifest, turn_off)
        except Failure as failure:
            log.error("other workers still batch %s: %s", manifest.content_id, failure.message)  # noqa: TRY400


class OutOfMemoryPolicy:
    """Handles runs that found no memory. Called by the main loop only."""

    def __init__(
        self, models: LoadedModels, metrics: WorkerMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._clock = clock
        self._collected_at = float("-inf")
        self._logged_at: dict[str, float] = {}
        self._rebuilt_at: dict[str, float] = {}

    def failed(self, lane: str, rows: int) -> None:
        """Handle a run of `rows` rows that found no memory.

        If the run can be halved, the instance is rebuilt first, which frees the memory that earlier runs left behind.
        Raises RuntimeError if the rebuild fails: then the process must be replaced.
        """
        model = self._models.get(lane)
        if model is None or model.instance is None:
            return
        self._metrics.out_of_memory(model)
        now = self._clock()
        if _is_due(self._logged_at, lane, now):
            log.warning("no memory for a run of %d rows of %s", rows, lane)
        if now - self._collected_at >= COLLECT_S_MIN:
            self._collected_at = now
            gc.collect()
            trim()
        if rows < 2 or not _is_due(self._rebuilt_at, lane, now):
            return
        try:
            model.instance.rebuild()
        except Failure as failure:
            raise RuntimeError(f"the instance of {lane} cannot be rebuilt: {failure.message}") from failure

    def halves_ran(self, lane: str, rows: int) -> None:
        """Limit the runs of the instance to half of `rows`, which found no memory together but ran in halves."""
        model = self._models.get(lane)
        if model is not None and model.rows_efficient > rows // 2:
            log.warning("%s runs at most %d rows from now on", lane, rows // 2)
            self._models.learn(lane, model.exploration, rows // 2, fitting=rows // 2)


def _is_due(last_at: dict[str, float], lane: str, now: float) -> bool:
    """Return whether the lane's last time is more than REBUILD_S_MIN ago; if so, set it to `now`."""
    if now - last_at.get(lane, float("-inf")) < REBUILD_S_MIN:
        return False
    for past in [known for known, at in last_at.items() if now - at >= REBUILD_S_MIN]:
        del last_at[past]
    last_at[lane] = now
    return True
