"""Reads the records of all live workers, in one round trip while none comes.

pools and workers as they were known ─> one pipeline ─> they differ: read again, with those that were found
                                                    └> instances that changed: one more pipeline ─> WorkerRecord, …
Gateways read at each event, on the core that answers calls: a call of redis-py takes a third of a millisecond there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from millstream.services.queue.keys import InstallationKeys, PoolKeys
from millstream.services.queue.record_cache import Fetched, Needed, RecordCache
from millstream.services.wire.records import WorkerRecord

log = logging.getLogger("millstream.cluster_state")

#: Reads until no worker is new: pools, their workers, their records; more where workers come meanwhile, up to this.
READS_MAX = 5


class ExtraCommands(NamedTuple):
    """Commands that go with a read. `add`: adds them to a pipeline. `replies`: filled with what Redis replied.

    A command that is refused has its error as reply, and does not fail the read: a Redis that takes no writes, since
    its memory is full or it is a replica, tells all the same which workers live.
    """

    add: Callable[[Any], None]
    replies: list[Any]


class _Stored(NamedTuple):
    """The record of a worker as it is stored. `beat`: its last heartbeat, seconds on the Redis clock."""

    worker: str
    keys: PoolKeys
    beat: float
    data: bytes


class WorkerRecords:
    """The records of the workers of an installation.

    Args:
        redis: a client of redis-py.
        keys: of the installation.
        now: returns seconds since the epoch on the Redis clock.
    """

    def __init__(self, redis: Any, keys: InstallationKeys, now: Callable[[], Awaitable[float]]) -> None:
        self.unreadable: frozenset[str] = frozenset()  # workers whose records could not be parsed last time
        self._redis = redis
        self._keys = keys
        self._now = now
        self._cache = RecordCache()
        self._reading = asyncio.Lock()
        self._known: Mapping[str, Sequence[str]] = {}  # pools and their workers, as they were read last

    async def read(self, extra: ExtraCommands | None = None) -> tuple[WorkerRecord, ...]:
        """Return the records of all live workers, ordered by pool and id, without those that cannot be parsed.

        Raises RedisError and OSError.
        """
        async with self._reading:  # what is cached is what one read found after the other
            return await self._read(extra)

    async def _read(self, extra: ExtraCommands | None) -> tuple[WorkerRecord, ...]:
        stored = await self._stored(extra)
        fetched = await self._changed_instances(stored)
        behind_s = time.time() - await self._now()  # noqa: TID251
        records: list[WorkerRecord] = []
        unreadable: set[str] = set()
        for one in stored:
            try:
                record = self._cache.record(one.worker, one.data, fetched.get(one.worker))
            except ValueError as error:
                if one.worker not in self.unreadable:
                    log.warning("the record of worker %s cannot be read (another release?): %s", one.worker, error)
                unreadable.add(one.worker)
            else:
                records.append(record.model_copy(update={"heartbeat": one.beat + behind_s}))
        self.unreadable = frozenset(unreadable)
        self._cache.keep_only({record.id for record in records})
        return tuple(records)

    async def _stored(self, extra: ExtraCommands | None) -> list[_Stored]:
        """Return the records of all workers, ordered by pool and id."""
        asked = self._known
        for _ in range(READS_MAX):
            replies = await self._ask(asked, extra)
            extra = None
            found: dict[str, Sequence[str]] = dict.fromkeys(sorted(map(_text, next(replies))), ())
            stored: list[_Stored] = []
            for pool, workers in asked.items():
                beats = {_text(worker): ms / 1000 for worker, ms in next(replies)}
                records = next(replies) if workers else ()
                if pool not in found:
                    continue
                found[pool] = sorted(beats)
                stored += [
                    _Stored(worker, self._keys.pool(pool), beats[worker], data)
                    for worker, data in zip(workers, records, strict=True)
                    if data is not None and worker in beats
                ]
            self._known = found
            if all(pool in asked and set(workers) <= set(asked[pool]) for pool, workers in found.items()):
                break
            asked = found
        return stored

    async def _ask(self, asked: Mapping[str, Sequence[str]], extra: ExtraCommands | None) -> Iterator[Any]:
        """Return the pools; then of each pool of `asked` its heartbeats and, if it has workers, their records."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.smembers(self._keys.pools)
        for pool, workers in asked.items():
            keys = self._keys.pool(pool)
            pipeline.zrange(keys.workers, 0, -1, withscores=True)
            if workers:
                pipeline.mget([keys.record(worker) for worker in workers])
        reads = len(pipeline)
        if extra is not None:
            extra.add(pipeline)
        replies = await pipeline.execute(raise_on_error=False)
        for reply in replies[:reads]:
            if isinstance(reply, Exception):
                raise reply
        if extra is not None:
            extra.replies.extend(replies[reads:])
        return iter(replies[:reads])

    async def _changed_instances(self, stored: Sequence[_Stored]) -> dict[str, Fetched]:
        """Return the instances that have changed since the last read, by worker."""
        pipeline = self._redis.pipeline(transaction=False)
        needs: dict[str, Needed] = {}
        for worker, keys, _, data in stored:
            with suppress(ValueError):  # `RecordCache.record` raises the same
                need = self._cache.needed(worker, data)
                if need.whole:
                    pipeline.hgetall(keys.instances(worker))
                elif need.content_ids:
                    pipeline.hmget(keys.instances(worker), need.content_ids)
                else:
                    continue
                needs[worker] = need
        replies = await pipeline.execute() if needs else []
        return {worker: _fetched(need, reply) for (worker, need), reply in zip(needs.items(), replies, strict=True)}


def _fetched(need: Needed, reply: Any) -> Fetched:
    if need.whole:
        return Fetched({_text(name): data for name, data in reply.items()}, whole=True)
    return Fetched(dict(zip(need.content_ids, reply, strict=True)), whole=False)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
