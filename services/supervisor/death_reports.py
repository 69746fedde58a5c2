"""death_reports: finds out why a worker died, and announces its death to the gateways."""

from __future__ import annotations

import asyncio

from millstream.services.crashes.analyzer import CrashAnalyzer
from millstream.services.queue.death_notices import publish_death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.supervisor.child import Child


class DeathReports:
    """The reports of one supervisor."""

    def __init__(self, crashes: CrashAnalyzer, address: RedisAddress, keys: InstallationKeys) -> None:
        self._crashes = crashes
        self._address = address
        self._keys = keys
        self._notices: set[asyncio.Task[bool]] = set()

    async def report(self, child: Child) -> bool:
        """Announce the death of a worker; return whether a model is at fault."""
        # Before the restart: the new worker must already see which version not to load.
        report = await asyncio.to_thread(
            self._crashes.analyze, child.worker, child.code, planned=child.stopped, hung=child.hung
        )
        # Gateways requeue its batches now instead of after the lease.
        task = asyncio.create_task(publish_death(self._address, self._keys, report.death))
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)
        return report.model_at_fault

    async def settle(self, seconds: float) -> None:
        """Return when all deaths are announced, or could not be; at the latest after some seconds."""
        if self._notices:
            _, late = await asyncio.wait(self._notices, timeout=seconds)
            for notice in late:
                notice.cancel()
