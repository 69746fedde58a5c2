"""live_settings: builds the settings that clients and operators change while gateways run: traces, logs, log levels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from millstream.gateway.catalog.shared_settings import SharedDocument, watch
from millstream.plugins.compat.triton.log import SharedLogSettings
from millstream.plugins.compat.triton.trace import SharedTraceSettings
from millstream.plugins.compat.triton.trace_settings import at_start
from millstream.plugins.compat.triton.traces import Traces
from millstream.services.process.log_level import LogLevel
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import InstallationLevel, StoredLogLevels
from millstream.services.queue.url import RedisAddress
from millstream.services.settings import LOG_LEVELS, LOG_SETTINGS, TRACE_SETTINGS, Settings


class LiveSettings:
    """The live settings of one gateway.

    Args:
        settings: of the installation.
        address: the Redis that has the installation's log levels.
        keys: its keys.
        traces: of the gateway's lanes.
        models: returns the names of all models.
    """

    def __init__(
        self,
        settings: Settings,
        address: RedisAddress,
        keys: InstallationKeys,
        traces: Traces,
        models: Callable[[], Collection[str]],
    ) -> None:
        folder = settings.home / "run"
        self.traces = SharedTraceSettings(
            SharedDocument(folder / TRACE_SETTINGS),
            traces,
            settings.trace_file or settings.home / "logs" / "trace.json",
            models,
            at_start(settings.trace_config),
        )
        self._log_level = LogLevel("gateway", folder / LOG_LEVELS, InstallationLevel(address, keys, "gateway").read)
        self.logs = SharedLogSettings(
            SharedDocument(folder / LOG_SETTINGS), logging.getLogger().handlers, self._log_level.set_verbose
        )
        self.log_levels = StoredLogLevels(address, keys)

    def start(self) -> None:
        """Follow the log levels. Call it in the main thread."""
        self._log_level.start()

    async def run(self) -> None:
        """Follow the documents, and write traces, until cancelled."""
        documents = {self.traces.document: self.traces.apply, self.logs.document: self.logs.apply}
        await watch(documents, self.traces.flush)

    async def close(self) -> None:
        """Write the traces that wait, and follow no longer. Call it when `run` has ended."""
        await self.traces.close()
        self._log_level.stop()
        await self.log_levels.close()
