"""Instants at which the loops of a process look for work, so that they wake it together and not one by one."""

from __future__ import annotations

import asyncio
import time


async def next_tick(every_s: float) -> None:
    """Return at the next multiple of `every_s` on the monotonic clock. An idle process is woken once for all loops."""
    await asyncio.sleep(every_s - time.monotonic() % every_s)
