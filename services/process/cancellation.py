"""Tasks that are cancelled until they end, and work that no cancellation stops half-way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

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


_Result = TypeVar("_Result")


async def uninterrupted(work: Awaitable[_Result]) -> _Result:
    """Run `work` to its end, even if this task is cancelled meanwhile, repeatedly; raise CancelledError only then.

    After a cancellation the result of the work is dropped.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()  # retrieved, so that asyncio does not log it
        raise asyncio.CancelledError
    return task.result()
