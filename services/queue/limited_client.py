"""A redis-py client whose calls have a limit as a whole.

redis-py limits each read and each attempt. Their sum is several times as long, and has no end where a server takes
connections and answers nothing: a connection that is being opened again begins with a read of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from millstream.services.errors import Code, Failure

#: for a process that ends to remove what it wrote, which expires all the same
FAREWELL_S_MAX = 1.0


class LimitedRedis(redis.asyncio.Redis):
    """A client of redis-py. `call_s_max`: the limit of a call, its retries included; a longer one raises RedisTimeout.

    Subscriptions have no limit here: see `limited`.
    """

    call_s_max: float | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command, as redis-py does, within the limit."""
        async with limited(self.call_s_max):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Return a pipeline, as redis-py does, whose execution has the limit."""
        made = _LimitedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.call_s_max = self.call_s_max
        return made


class _LimitedPipeline(Pipeline):
    call_s_max: float | None = None

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        async with limited(self.call_s_max):
            return await super().execute(raise_on_error)


@asynccontextmanager
async def limited(seconds: float | None) -> AsyncIterator[None]:
    """Limit the calls in the block. Raises RedisTimeout."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        if seconds is None:
            raise
        raise RedisTimeout(f"no answer within {seconds:g} s") from error


@asynccontextmanager
async def without_redis_after(seconds: float) -> AsyncIterator[None]:
    """Leave the block, without an error, when Redis cannot be reached or does not answer within some seconds."""
    with suppress(Failure, TimeoutError):
        async with asyncio.timeout(seconds):
            yield


@contextmanager
def reaching_redis() -> Iterator[None]:
    """Raise Failure(UNAVAILABLE) instead of the errors of redis-py."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise Failure(Code.UNAVAILABLE, f"Redis is not reachable: {error}", retry_after_s=1) from error
