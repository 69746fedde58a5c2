"""model_config: the effective ModelConfig of published versions, for Triton's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.gateway.catalog.snapshot import Snapshot, version_number
from millstream.plugins.compat.triton.config.effective_config import effective_config


class VersionConfigurations:
    """Implements interfaces.Configurations with the catalog. `snapshot` returns the current snapshot."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def of(self, model: str, version: str | None) -> dict[str, Any]:
        """Return the ModelConfig of a version in JSON form. Raises Failure(NOT_FOUND)."""
        view = self._snapshot().model(model)
        return effective_config(view.version(None if version is None else version_number(model, version)).manifest)
