"""Reads the records of all live workers, in one round trip while none comes.

pools and workers as they were known ─> one pipeline ─> they differ: read again, with those that were found
                                                    └> instances that changed: one more pipeline ─> WorkerRecord, …
Gateways read at each event, on the core that answers calls: a call of redis-py takes a third of a millisecond there.
A worker can have thousands of instances, and little of a record has changed since the last read: RecordCache says which
instances to fetch, and parses only those.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from millstream.services.queue.keys import InstallationKeys, PoolKeys
from millstream.services.wire.records import InstanceRecord, WorkerRecord, readable_instances

log = logging.getLogger("millstream.cluster_state")

#: Reads until no worker is new: pools, their workers, their records; more where workers come meanwhile, up to this.
READS_MAX = 5


class Needed(NamedTuple):
    """The instances to fetch: `whole`: all of them; else those with these content ids."""

    content_ids: tuple[str, ...] = ()
    whole: bool = False


class Fetched(NamedTuple):
    """Instances as they are stored, by content id; None: one that was removed. `whole`: there are no others."""

    fields: Mapping[str, bytes | None]
    whole: bool


_NOTHING = Needed()
_WHOLE = Needed(whole=True)


class _Known(NamedTuple):
    """The record of a worker that was parsed last."""

    data: bytes
    record: WorkerRecord
    instances: dict[str, tuple[object, InstanceRecord]]  # by content id: the JSON, and what it was parsed to


class RecordCache:
    """Parses records; unchanged records and instances are the same objects as before."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def needed(self, worker: str, data: bytes) -> Needed:
        """Return the instances to fetch for `record`. Raises ValueError if `data` is not valid."""
        known = self._known.get(worker)
        if known is not None and known.data == data:
            return _NOTHING
        head = WorkerRecord.model_validate_json(data)
        if not head.instances_version:
            return _NOTHING
        version = known.record.instances_version if known is not None else 0
        if not version or not head.changed_since <= version <= head.instances_version:
            return _WHOLE
        return Needed(tuple(content_id for content_id, at in head.changed.items() if at > version))

    def record(self, worker: str, data: bytes, fetched: Fetched | None = None) -> WorkerRecord:
        """Parse the record of `worker`. Raises ValueError (pydantic's or the JSON parser's) if it is not valid.

        Args:
            worker: id of the worker.
            data: its record as it is stored.
            fetched: the instances that `needed` asked for; None: it asked for none.
        """
        known = self._known.get(worker)
        if known is not None and known.data == data:
            return known.record
        document = orjson.loads(data)
        inline = document.pop("instances", []) if isinstance(document, dict) else []
        head = WorkerRecord.model_validate(document)
        before = known.instances if known is not None else {}
        parsed = _parse_stored(before, fetched) if head.instances_version else _parse_inline(before, inline)
        instances = tuple(instance for _, instance in parsed.values())
        if known is not None and _same(instances, known.record.instances):
            instances = known.record.instances
        record = head.model_copy(update={"instances": instances, "changed": {}})
        self._known[worker] = _Known(data, record, parsed)
        return record

    def keep_only(self, workers: Collection[str]) -> None:
        """Forget all other workers: they no longer exist."""
        for worker in self._known.keys() - set(workers):
            del self._known[worker]


_Parsed = dict[str, tuple[object, InstanceRecord]]


def _parse_inline(before: _Parsed, items: Any) -> _Parsed:
    """Parse the instances of a record that contains them."""
    parsed: _Parsed = {}
    for item in readable_instances(items) if isinstance(items, list) else [items]:
        has_name = isinstance(item, dict) and isinstance(item.get("content_id"), str)
        pair = before.get(item["content_id"]) if has_name else None
        if pair is None or pair[0] != item:
            pair = (item, InstanceRecord.model_validate(item))
        parsed[pair[1].content_id] = pair
    return parsed


def _parse_stored(before: _Parsed, fetched: Fetched | None) -> _Parsed:
    """Parse the instances that were fetched; the others are as before."""
    if fetched is None:
        return before
    parsed = {} if fetched.whole else dict(before)
    for content_id in sorted(fetched.fields):
        data = fetched.fields[content_id]
        pair = before.get(content_id)
        if data is not None and (pair is None or pair[0] != data):
            [*items] = readable_instances([orjson.loads(data)])
            pair = (data, InstanceRecord.model_validate(items[0])) if items else None
        if data is None or pair is None:
            parsed.pop(content_id, None)
        else:
            parsed[content_id] = pair
    return parsed


def _same(left: tuple[InstanceRecord, ...], right: tuple[InstanceRecord, ...]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


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
