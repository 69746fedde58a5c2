"""Work that must not stop half-way when its task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def uninterrupted(work: Coroutine[Any, Any, _Result]) -> _Result:
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
