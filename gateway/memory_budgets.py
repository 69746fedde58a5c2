"""Builds what bounds the memory that a gateway holds for its clients, and returns freed memory."""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.scheduling.request import Admission
from millstream.services.installation import shm_prefix
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.process_memory import IdleTrim, resident_bytes, trim
from millstream.services.process.waits import next_tick
from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import remove_leftovers
from millstream.services.segments.shared_buffers import SHARE, SharedBuffers
from millstream.services.settings import Settings

log = logging.getLogger("millstream.memory")

CHECK_S = 0.5  # period of the checks
QUIET_BYTES_MAX = 1 << 20  # the gateway is quiet below this many bytes in flight, being received or unread


class MemoryBudgets:
    """The bounds of one gateway's memory: requests in flight, requests being received, unread replies, shared memory.

    `segments`: the shared memory; None: it is turned off. `name`: of this gateway, unique for each start.
    """

    def __init__(self, name: str, settings: Settings, registry: MetricsRegistry) -> None:
        self._shm_bytes_max = settings.shm_bytes_max
        self.segments = _segment_pool(settings, name, registry)
        self.admission = Admission(
            settings.inflight_requests_max,
            settings.inflight_bytes_max,
            registry.gauge(catalogue.REQUESTS_IN_FLIGHT),
            registry.counter(catalogue.REQUESTS_REFUSED, "gateway_full"),
        )
        self.receiving = ReceiveBudget(
            settings.inflight_bytes_max, registry.counter(catalogue.REQUESTS_REFUSED, "receiving_full")
        )
        self.replies = ReplyBudget(
            settings.reply_unread_bytes_max, registry.counter(catalogue.REQUESTS_REFUSED, "unread_full")
        )
        self._receiving = registry.gauge(catalogue.REQUESTS_RECEIVING_BYTES)
        self._unread = registry.gauge(catalogue.REPLIES_UNREAD_BYTES)

    @cached_property
    def shared_buffers(self) -> SharedBuffers | None:
        """The shared memory of large requests over both protocols; None where shared memory is turned off."""
        if self.segments is None:
            return None
        return SharedBuffers(self.segments, int(self._shm_bytes_max * SHARE))

    async def trim_when_idle(self) -> None:
        """Show what is in use and return freed memory, every CHECK_S until cancelled."""
        policy = IdleTrim(resident_bytes())
        while True:
            await next_tick(CHECK_S)
            self._receiving.set(self.receiving.bytes)
            self._unread.set(self.replies.bytes)
            quiet = self.admission.bytes + self.receiving.bytes + self.replies.bytes < QUIET_BYTES_MAX
            if policy.due(idle=quiet and not self.admission.requests, quiet=quiet):
                before = resident_bytes()
                if policy.grown(before):
                    if self.segments is not None:
                        self.segments.remove_empty()
                    await asyncio.to_thread(trim)
                    after = resident_bytes()
                    policy.trimmed(after)
                    if after < before:
                        log.info("returned %d MiB of freed memory", (before - after) >> 20)

    def close(self) -> None:
        """Remove the shared memory."""
        if self.segments is not None:
            self.segments.close()


def _segment_pool(settings: Settings, name: str, registry: MetricsRegistry) -> SegmentPool | None:
    """Return the gateway's shared memory, None where it is turned off; remove what a killed gateway left behind."""
    if not settings.shm_bytes_max:
        return None
    remove_leftovers(settings.shm_dir, shm_prefix(settings))
    in_use = registry.gauge(catalogue.SEGMENT_IN_USE_BYTES)
    return SegmentPool(settings.shm_dir, f"{shm_prefix(settings)}.{name}", settings.shm_bytes_max, in_use)
