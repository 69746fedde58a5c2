"""Handles what is published to all gateways, and shows in metrics whether Redis answers this gateway.

supervisor: "died" ─> on_death ─> reclaim at once        this gateway: QuarantineNews ─> "poison" ─> on_quarantined
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from millstream.gateway.access.access_control import KeyWatch
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.waits import next_tick
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.death_notices import Death
from millstream.services.wire.worker_id import pool_of

EVERY_S = 1.0  # pause between two probes
ANSWER_S_MAX = 2.0  # a Redis that takes longer counts as not answering
MEMORY_EVERY = 5  # the memory is read with every fifth probe


class RedisProbe:
    """The probe of one gateway. Await `run` in the gateway's event loop.

    A connection to a Redis that is frozen or cut off looks open for a long time: only a probe tells.
    """

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
            await next_tick(EVERY_S)

    async def _read_memory(self) -> None:
        """Update the gauges of memory, which exist once Redis said it: a user of Redis may not be allowed to ask."""
        with suppress(Failure, TimeoutError):
            async with asyncio.timeout(ANSWER_S_MAX):
                memory = await self._cluster_state.memory()
            self._registry.gauge(catalogue.REDIS_MEMORY_USED_BYTES).set(memory.used)
            self._registry.gauge(catalogue.REDIS_MEMORY_LIMIT_BYTES).set(memory.limit)


class QuarantineNews:
    """Tells the other gateways of requests that this one puts in quarantine."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        self._tasks: set[asyncio.Task[None]] = set()

    def publish(self, digest: str) -> None:
        task = asyncio.create_task(self._publish(f"poison:{digest}"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish(self, message: str) -> None:
        with suppress(Failure):  # other gateways find out when the request kills their workers
            await self._cluster_state.publish(message)


def event_handlers(
    producer: Producer, quarantine: Quarantine, keys: KeyWatch
) -> dict[str, Callable[[str], Awaitable[None]]]:
    """Return the handlers of an event's text, by the event's name."""

    async def on_death(text: str) -> None:
        """Reclaim the leases of a worker that its supervisor saw die, without waiting for them to run out."""
        death = Death.read(text)
        pool = pool_of(death.worker)
        await producer.reclaimer.reclaim(pool, death)
        if death.blamed:
            await producer.circuit_breaker.count(pool, death.blamed, death.worker)

    async def on_quarantined(digest: str) -> None:
        """Refuse a request that some gateway, perhaps this one, put in quarantine."""
        quarantine.learn(digest)

    return {"died": on_death, "poison": on_quarantined, "keys": keys.reload}
