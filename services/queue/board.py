"""The board: what processes tell each other beside the queue. Workers' records, uploads in progress, a channel of news.

Through redis-py: none of this is on the hot path. Everything on it expires or is replaced; nothing on it is truth.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError
from redis.exceptions import RedisError

from services.errors import Code, Failure
from services.queue.keys import CHANGES, POOLS, UPLOADS, PoolKeys
from services.queue.url import RedisAddress, async_client
from services.records import State, WorkerRecord

UPLOADS_LIFE_S = 3600


class Board:
    """Every method raises Failure(UNAVAILABLE) while Redis is away."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._redis: Any = async_client(address)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """Records of all workers that live, ordered by pool and id."""
        records: list[WorkerRecord] = []
        try:
            for pool in sorted(await self._redis.smembers(POOLS)):
                keys = PoolKeys(_text(pool))
                ids = sorted(_text(worker) for worker in await self._redis.zrange(keys.workers, 0, -1))
                if not ids:
                    continue
                found = await self._redis.mget([keys.record(worker) for worker in ids])
                records += [WorkerRecord.model_validate_json(data) for data in found if data is not None]
        except (RedisError, OSError) as error:
            raise _away(error) from error
        except ValidationError as error:
            raise Failure(Code.INTERNAL, f"a worker's record cannot be read (another release?): {error}") from error
        return tuple(records)

    async def stream_entries(self, pool: str, lanes: list[str]) -> list[int]:
        """Entries in the stream of each lane: waiting and leased."""
        keys = PoolKeys(pool)
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for lane in lanes:
                pipeline.xlen(keys.stream(lane))
            return [int(count) for count in await pipeline.execute()]
        except (RedisError, OSError) as error:
            raise _away(error) from error

    async def uploads(self) -> dict[tuple[str, int | None], State]:
        """Uploads in progress: (model, version) -> state; version None: its number is given when it is published."""
        try:
            stored = await self._redis.hgetall(UPLOADS)
        except (RedisError, OSError) as error:
            raise _away(error) from error
        uploads: dict[tuple[str, int | None], State] = {}
        for field, state in stored.items():
            model, _, version = _text(field).partition("/")
            uploads[model, int(version) if version else None] = State(_text(state))
        return uploads

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        """Show an upload's state; None: it has ended."""
        field = f"{model}/{'' if version is None else version}"
        try:
            if state is None:
                await self._redis.hdel(UPLOADS, field)
            else:
                await self._redis.hset(UPLOADS, field, state.value)
                # A gateway that dies in an upload cannot take its line back: the whole board forgets it in the end.
                await self._redis.expire(UPLOADS, UPLOADS_LIFE_S)
        except (RedisError, OSError) as error:
            raise _away(error) from error

    async def publish(self, message: str) -> None:
        try:
            await self._redis.publish(CHANGES, message)
        except (RedisError, OSError) as error:
            raise _away(error) from error

    async def messages(self) -> AsyncIterator[str]:
        """What is published, from now on."""
        subscription = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            await subscription.subscribe(CHANGES)
            while True:
                message = await subscription.get_message(timeout=5)
                if message is not None:
                    yield _text(message["data"])
        except (RedisError, OSError) as error:
            raise _away(error) from error
        finally:
            await subscription.aclose()

    async def close(self) -> None:
        await self._redis.aclose()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _away(error: Exception) -> Failure:
    return Failure(Code.UNAVAILABLE, f"Redis is not reachable: {error}", retry_after_s=1)
