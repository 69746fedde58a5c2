"""cluster_events: handles events that are published to all gateways: a worker died, a request is in quarantine.

supervisor: "died" ─> on_death ─> reclaim at once        this gateway: QuarantineNews ─> "poison" ─> on_quarantined
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from millstream.gateway.access.key_watch import KeyWatch
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.services.errors import Failure
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.death_notices import Death
from millstream.services.wire.worker_id import pool_of


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


class ClusterEvents:
    """Handles the events of one gateway. `handlers`: the handler of an event's text, by the event's name."""

    def __init__(self, producer: Producer, quarantine: Quarantine, keys: KeyWatch) -> None:
        self._producer = producer
        self._quarantine = quarantine
        self.handlers: dict[str, Callable[[str], Awaitable[None]]] = {
            "died": self._on_death,
            "poison": self._on_quarantined,
            "keys": keys.reload,
        }

    async def _on_death(self, text: str) -> None:
        """Reclaim the leases of a worker that its supervisor saw die, without waiting for them to run out."""
        death = Death.read(text)
        pool = pool_of(death.worker)
        await self._producer.reclaimer.reclaim(pool, death)
        if death.blamed:
            await self._producer.circuit_breaker.count(pool, death.blamed, death.worker)

    async def _on_quarantined(self, digest: str) -> None:
        """Refuse a request that some gateway, perhaps this one, put in quarantine."""
        self._quarantine.learn(digest)
