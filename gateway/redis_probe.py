"""redis_probe: loop that shows whether Redis answers this gateway, as the metric `millstream_redis_up`.

A probe of its own, because a connection to a Redis that is frozen or cut off looks open for a long time.
"""

from __future__ import annotations

import asyncio

from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.cluster_state import ClusterState

EVERY_S = 1.0  # pause between two probes
ANSWER_S_MAX = 2.0  # a Redis that takes longer counts as not answering


class RedisProbe:
    """The probe of one gateway. Await `run` in the gateway's event loop."""

    def __init__(self, cluster_state: ClusterState, registry: MetricsRegistry) -> None:
        self._cluster_state = cluster_state
        self._up = registry.gauge(catalogue.REDIS_UP, registry.process)

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            self._up.set(await self._cluster_state.answers(ANSWER_S_MAX))
            await asyncio.sleep(EVERY_S)
