"""What follows from a live check: it is counted, and a version whose rows influence each other is batched no more."""

from __future__ import annotations

import logging
import time

from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import Verdict
from millstream.workers.live_check import Outcome
from millstream.workers.loaded_models import LoadedModels
from millstream.workers.metrics import WorkerMetrics

log = logging.getLogger("millstream.live_check")


class BatchingOff:
    """Turns batching off: in this worker at once, and by the version's verdict in all others and in the gateways."""

    def __init__(self, repository: Repository, held: LoadedModels, tallies: WorkerMetrics) -> None:
        self._repository = repository
        self._held = held
        self._tallies = tallies

    def settle(self, manifest: Manifest, outcome: Outcome, why: str) -> None:
        """The end of a check of a live batch; `why`: what was found."""
        self._tallies.batch_checked(manifest, outcome)
        if outcome is Outcome.UNDECIDED:
            log.info("a batch of %s was not checked: %s", manifest.content_id, why)
        if outcome is not Outcome.DIFFERS:
            return
        reason = f"a live batch gave what its rows do not give alone: {why}"
        log.error(
            "version %s of %s: %s; its requests run one at a time from now on", manifest.version, manifest.model, reason
        )
        self._held.run_alone(manifest.content_id, reason)

        def off(verdict: Verdict) -> Verdict:
            counted = verdict.model_copy(update={"mismatches": verdict.mismatches + 1})
            return counted if verdict.batching_off else counted.with_batching_off(reason, time.time())  # noqa: TID251 - for people

        try:
            self._repository.verdicts.change(manifest, off)
        except Failure as failure:
            log.error("other workers go on batching %s: %s", manifest.content_id, failure.message)  # noqa: TRY400
