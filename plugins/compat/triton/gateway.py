"""Triton's part of a gateway, which its routes and gRPC methods find as `deps.part(Triton)`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.snapshot import version_number
from millstream.gateway.http.deps import part_of
from millstream.gateway.parts import GatewayParts
from millstream.plugins.compat.triton.config.effective_config import effective_config
from millstream.plugins.compat.triton.loader import RepositoryLoader
from millstream.plugins.compat.triton.log import SharedLogSettings
from millstream.plugins.compat.triton.shared_memory import ClientMemory
from millstream.plugins.compat.triton.shared_settings import SharedDocument, watch
from millstream.plugins.compat.triton.statistics import MachineStatistics
from millstream.plugins.compat.triton.trace import SharedTraceSettings
from millstream.plugins.compat.triton.traces import Traces
from millstream.services.process.cancellation import cancel_all


@dataclass(slots=True)
class Triton:
    """What Triton's clients ask of a gateway beyond inference."""

    catalog: Catalog
    loader: RepositoryLoader
    statistics: MachineStatistics
    memory: ClientMemory
    traces: SharedTraceSettings
    logs: SharedLogSettings
    _loops: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Abort the staged loads of gateways that died, and follow the settings that other gateways change."""
        await self.loader.start()
        self.logs.start(logging.getLogger().handlers)
        documents = {self.traces.document: self.traces.apply, self.logs.document: self.logs.apply}
        self._loops = [asyncio.create_task(watch(documents, self.traces.flush))]

    async def stop(self) -> None:
        """Write the traces that wait. Call it when no batch is in flight."""
        await cancel_all(self._loops)
        await self.traces.close()
        self.logs.stop()

    def config_of(self, model: str, version: str | None) -> dict[str, Any]:
        """Return the ModelConfig of a version in JSON form, defaults written out. Raises Failure(NOT_FOUND)."""
        view = self.catalog.snapshot.model(model)
        return effective_config(view.version(None if version is None else version_number(model, version)).manifest)


def build(parts: GatewayParts) -> Triton:
    """Return Triton's part of a gateway."""
    settings, catalog = parts.settings, parts.catalog
    run = settings.home / "run"  # the supervisor deletes these documents at its next start
    return Triton(
        catalog,
        RepositoryLoader(
            parts.repository,
            catalog,
            settings,
            answering=parts.answering,
            have_loaded=parts.load,
            uploading=parts.uploading,
        ),
        MachineStatistics(parts.registry, lambda: catalog.snapshot),
        part_of((parts.client_memory,), ClientMemory),
        SharedTraceSettings(
            SharedDocument(run / "trace-settings.json"),
            part_of(parts.recorded, Traces),
            settings.home / "logs" / "trace.json",
            lambda: catalog.snapshot.models,
        ),
        SharedLogSettings(SharedDocument(run / "log-settings.json"), parts.set_verbose),
    )
