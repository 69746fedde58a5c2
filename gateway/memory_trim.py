"""memory_trim: shows what a gateway holds for its clients, and gives freed memory back when a burst of it is over."""

from __future__ import annotations

import asyncio
import logging

from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.connection.reply_budget import ReplyBudget
from millstream.gateway.scheduling.admission import Admission
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.allocator import IdleTrim, resident_bytes, trim

log = logging.getLogger("millstream.memory")

LOOK_S = 0.25
QUIET_BYTES_MAX = 1 << 20  # in flight: a gateway that holds less is at rest


class MemoryTrim:
    """Await `run` in the gateway's event loop."""

    def __init__(
        self, admission: Admission, receive_budget: ReceiveBudget, reply_budget: ReplyBudget, registry: MetricsRegistry
    ) -> None:
        self._admission = admission
        self._receive_budget = receive_budget
        self._reply_budget = reply_budget
        self._receiving = registry.gauge(catalogue.RECEIVING_BYTES)
        self._unread = registry.gauge(catalogue.UNREAD_BYTES)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        policy = IdleTrim(resident_bytes())
        while True:
            await asyncio.sleep(LOOK_S)
            self._receiving.set(self._receive_budget.bytes)
            self._unread.set(self._reply_budget.bytes)
            held_bytes = self._admission.bytes + self._receive_budget.bytes + self._reply_budget.bytes
            quiet = held_bytes < QUIET_BYTES_MAX
            if policy.due(idle=quiet and not self._admission.requests, quiet=quiet):
                before = resident_bytes()
                if policy.grown(before):
                    await asyncio.to_thread(trim)
                    after = resident_bytes()
                    policy.trimmed(after)
                    if after < before:
                        log.info("gave %d MiB of freed memory back", (before - after) >> 20)
