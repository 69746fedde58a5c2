"""Cancels tasks, repeatedly if they swallow the first cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.1


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and return when all have ended, in whatever way.

    Repeats the cancellation every AGAIN_S: a library may mistake it for a failed connection (redis-py does), and its
    caller continues.
    """
    cancelled = set(tasks)
    pending = {task for task in cancelled if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    for task in cancelled:
        if not task.cancelled():
            task.exception()  # retrieved: asyncio reports exceptions that are never retrieved
