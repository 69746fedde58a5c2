"""Work that must not be left half done when the task that asked for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def uninterrupted(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work` to its end, however often this task is cancelled meanwhile; only then raise CancelledError.

    The result of work that ended under a cancelled task is dropped.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()  # looked at, so that asyncio does not report it
        raise asyncio.CancelledError
    return task.result()
