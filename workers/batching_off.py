"""Acts on the outcome of a live check: counts it, and turns batching off if rows influence each other."""

from __future__ import annotations

import logging
import time

from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import Verdict
from millstream.workers.batches.live_check import Outcome
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import LoadedModels

log = logging.getLogger("millstream.live_check")


class BatchingOff:
    """Turns batching off: in this worker at once, in other workers and in gateways through the version's verdict."""

    def __init__(self, repository: Repository, models: LoadedModels, metrics: WorkerMetrics) -> None:
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
