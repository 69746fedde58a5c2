"""gateway: Triton's part of a gateway, which its routes and gRPC methods find as `deps.part(Triton)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream.gateway.catalog.interfaces import ModelCatalog
from millstream.gateway.catalog.snapshot import version_number
from millstream.gateway.parts import GatewayParts
from millstream.plugins.compat.triton.config.effective_config import effective_config
from millstream.plugins.compat.triton.loader import RepositoryLoader
from millstream.plugins.compat.triton.statistics import MachineStatistics


@dataclass(frozen=True, slots=True)
class Triton:
    """What Triton's clients ask of a gateway beyond inference."""

    catalog: ModelCatalog
    loader: RepositoryLoader
    statistics: MachineStatistics

    async def start(self) -> None:
        await self.loader.start()

    def config_of(self, model: str, version: str | None) -> dict[str, Any]:
        """Return the ModelConfig of a version in JSON form, defaults written out. Raises Failure(NOT_FOUND)."""
        view = self.catalog.snapshot.model(model)
        return effective_config(view.version(None if version is None else version_number(model, version)).manifest)


def build(parts: GatewayParts) -> Triton:
    """Return Triton's part of a gateway."""
    return Triton(
        parts.catalog,
        RepositoryLoader(
            parts.repository,
            parts.catalog,
            parts.settings,
            answering=parts.answering,
            have_loaded=parts.load,
            uploading=parts.uploading,
        ),
        MachineStatistics(parts.registry, lambda: parts.catalog.snapshot),
    )
