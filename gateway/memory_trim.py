"""memory_trim: shows what a gateway holds for its clients, and gives freed memory back when a burst of it is over."""

from __future__ import annotations

import asyncio
import logging

from gateway.connection.receive_budget import Inbound
from gateway.connection.reply_budget import Outbound
from gateway.scheduling.admission import Admission
from services.metrics import catalogue
from services.metrics.registry import Tally
from services.process.allocator import IdleTrim, resident_bytes, trim

log = logging.getLogger("millstream.memory")

LOOK_S = 0.25
QUIET_BYTES_MAX = 1 << 20  # in flight: a gateway that holds less is at rest


class HeldMemory:
    """Await `run` in the gateway's event loop."""

    def __init__(self, admission: Admission, inbound: Inbound, outbound: Outbound, tally: Tally) -> None:
        self._admission = admission
        self._inbound = inbound
        self._outbound = outbound
        self._receiving = tally.gauge(catalogue.RECEIVING_BYTES)
        self._unread = tally.gauge(catalogue.UNREAD_BYTES)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        policy = IdleTrim(resident_bytes())
        while True:
            await asyncio.sleep(LOOK_S)
            self._receiving.set(self._inbound.bytes)
            self._unread.set(self._outbound.bytes)
            held_bytes = self._admission.bytes + self._inbound.bytes + self._outbound.bytes
            quiet = held_bytes < QUIET_BYTES_MAX
            if policy.due(idle=quiet and not self._admission.requests, quiet=quiet):
                before = resident_bytes()
                if policy.grown(before):
                    await asyncio.to_thread(trim)
                    after = resident_bytes()
                    policy.trimmed(after)
                    if after < before:
                        log.info("gave %d MiB of freed memory back", (before - after) >> 20)
