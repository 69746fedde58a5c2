"""memory_trim: loop that shows the memory held for clients, and returns freed memory to the system after a burst."""

from __future__ import annotations

import asyncio
import logging

from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.connection.reply_budget import ReplyBudget
from millstream.gateway.scheduling.admission import Admission
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.allocator import IdleTrim, resident_bytes, trim
from millstream.services.segments.pool import SegmentPool

log = logging.getLogger("millstream.memory")

CHECK_S = 0.25  # period of the checks
QUIET_BYTES_MAX = 1 << 20  # the gateway is quiet below this many bytes in flight, being received or unread


class MemoryTrim:
    """Trims the memory of one gateway. Await `run` in the gateway's event loop."""

    def __init__(
        self,
        admission: Admission,
        receive_budget: ReceiveBudget,
        reply_budget: ReplyBudget,
        segments: SegmentPool | None,
        registry: MetricsRegistry,
    ) -> None:
        self._segments = segments
        self._admission = admission
        self._receive_budget = receive_budget
        self._reply_budget = reply_budget
        self._receiving = registry.gauge(catalogue.REQUESTS_RECEIVING_BYTES)
        self._unread = registry.gauge(catalogue.REPLIES_UNREAD_BYTES)

    async def run(self) -> None:
        """Check every CHECK_S until cancelled."""
        policy = IdleTrim(resident_bytes())
        while True:
            await asyncio.sleep(CHECK_S)
            self._receiving.set(self._receive_budget.bytes)
            self._unread.set(self._reply_budget.bytes)
            client_bytes = self._admission.bytes + self._receive_budget.bytes + self._reply_budget.bytes
            quiet = client_bytes < QUIET_BYTES_MAX
            if policy.due(idle=quiet and not self._admission.requests, quiet=quiet):
                before = resident_bytes()
                if policy.grown(before):
                    if self._segments is not None:
                        self._segments.remove_empty()
                    await asyncio.to_thread(trim)
                    after = resident_bytes()
                    policy.trimmed(after)
                    if after < before:
                        log.info("returned %d MiB of freed memory", (before - after) >> 20)
