"""Cancelling tasks that may not hear it the first time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.1


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and return when they have ended, whatever came of them.

    Again and again: a library may take a cancellation for a connection that failed (redis-py does), and its caller goes on.
    """
    asked = set(tasks)
    pending = {task for task in asked if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    for task in asked:
        if not task.cancelled():
            task.exception()  # was looked at: asyncio complains about those that nobody did
