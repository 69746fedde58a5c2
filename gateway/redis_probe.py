"""redis_probe: loop that shows in metrics whether Redis answers this gateway, and how much memory Redis uses.

A probe of its own, because a connection to a Redis that is frozen or cut off looks open for a long time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.cluster_state import ClusterState

EVERY_S = 1.0  # pause between two probes
ANSWER_S_MAX = 2.0  # a Redis that takes longer counts as not answering
MEMORY_EVERY = 5  # the memory is read with every fifth probe


class RedisProbe:
    """The probe of one gateway. Await `run` in the gateway's event loop."""

    def __init__(self, cluster_state: ClusterState, registry: MetricsRegistry) -> None:
        self._cluster_state = cluster_state
        self._registry = registry
        self._up = registry.gauge(catalogue.REDIS_UP, registry.process)

    async def run(self) -> None:
        """Probe until cancelled."""
        probes = 0
        while True:
            up = await self._cluster_state.answers(ANSWER_S_MAX)
            self._up.set(up)
            if up and probes % MEMORY_EVERY == 0:
                await self._read_memory()
            probes += 1
            await asyncio.sleep(EVERY_S)

    async def _read_memory(self) -> None:
        """Update the gauges of memory, which exist once Redis said it: a user of Redis may not be allowed to ask."""
        with suppress(Failure, TimeoutError):
            async with asyncio.timeout(ANSWER_S_MAX):
                memory = await self._cluster_state.memory()
            self._registry.gauge(catalogue.REDIS_MEMORY_USED_BYTES).set(memory.used)
            self._registry.gauge(catalogue.REDIS_MEMORY_LIMIT_BYTES).set(memory.limit)
