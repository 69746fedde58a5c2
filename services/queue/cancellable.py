"""cancellable: redis-py's asyncio connections, made to end when they are cancelled.

redis-py bounds each write with asyncio.wait_for, which in Python 3.11 drops a cancellation that comes as the write
ends (CPython's gh-86296). The time limit around a call would never end it, nor would the end of its task.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from millstream.services.queue.redis_parts import AsyncConnectionPool


def make_cancellable(pool: AsyncConnectionPool) -> None:
    """Have all connections that a pool makes from now on heed cancellations."""
    made: Any = pool.connection_class
    pool.connection_class = _cancellable(made)


@cache
def _cancellable(connection_class: type[Any]) -> type[Any]:
    return type(connection_class.__name__, (_Cancellable, connection_class), {})


class _Cancellable:
    """Mixed into a connection class of redis-py."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        """Send a command as redis-py does. Raises CancelledError also if that was dropped meanwhile."""
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # its reply is not read
            raise asyncio.CancelledError
