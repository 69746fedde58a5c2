"""batching_verdicts: turns batching of loaded versions off, or on again, as their verdicts say."""

from __future__ import annotations

from millstream.services.repository.verdicts import Verdict
from millstream.workers.models.loaded_models import LoadedModels


class BatchingVerdicts:
    """Applies verdicts on batching. Called by one thread at a time."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models
        self._alone: set[str] = set()  # content ids that are not batched because of their verdict

    def apply(self, content_id: str, verdict: Verdict) -> None:
        """Let a loaded version follow its verdict."""
        if verdict.batching_off:
            self._alone.add(content_id)
            self._models.run_alone(content_id, verdict.batching_off)
        elif content_id in self._alone:
            self._alone.discard(content_id)
            self._models.run_alone(content_id, "")

    def forget(self, content_id: str) -> None:
        """Forget a version that was removed."""
        self._alone.discard(content_id)
