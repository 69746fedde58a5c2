"""Cluster state: the worker records, uploads, gateways and events that processes share besides the queue.

It uses redis-py, since none of this is on the hot path. Everything here expires or is replaced; the source of truth is
elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from millstream.services.errors import Code, Failure
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.limited_client import limited, reaching_redis
from millstream.services.queue.scripts import script
from millstream.services.queue.url import RedisAddress, async_client
from millstream.services.queue.worker_records import ExtraCommands, WorkerRecords
from millstream.services.wire.orders import Order
from millstream.services.wire.records import State, WorkerRecord

log = logging.getLogger("millstream.cluster_state")

#: How long an upload is listed after its gateway last reported it.
UPLOAD_LIFE_S = 5.0
#: How long the difference to the Redis clock is taken as it was measured.
CLOCK_S = 1.0
#: How long a gateway is listed after its last report.
GATEWAY_LIFE_S = 3.0
#: How long a gateway is listed after it last told which change of the API keys it has read.
KEYS_READ_LIFE_S = 5.0
_CHANGES = ""  # field with the number of changes of the API keys; no gateway has this name
#: How long the use of API keys through a gateway counts after that listed it.
USE_LIFE_S = 2.0


class Leader(NamedTuple):
    """The controller that leads. `token`: its fencing token, which grows with each new leader."""

    name: str
    token: int


class Memory(NamedTuple):
    """The memory of Redis in bytes. `limit`: 0 without one."""

    used: int
    limit: int


class Exchanged(NamedTuple):
    """What a gateway reads at each refresh. `uploads`: in progress, as `ClusterState.uploads` returns them."""

    workers: tuple[WorkerRecord, ...]
    uploads: Mapping[tuple[str, int | None], State]


class ClusterState:
    """Reads and writes the cluster state in Redis. Expiry times are on the Redis clock.

    Every method raises Failure(UNAVAILABLE) while Redis is not reachable.

    Args:
        quiet_s: after this time without an event, `messages` pings Redis, which then has this time to answer.
    """

    def __init__(self, address: RedisAddress, keys: InstallationKeys, quiet_s: float = 5) -> None:
        self._address = address
        self._keys = keys
        self._quiet_s = quiet_s
        self._reply_s_max = address.reply_s_max
        self._redis: Any = async_client(address)
        self._records = WorkerRecords(self._redis, keys, self._now)
        self._clock_ahead_s = 0.0  # the Redis clock minus the monotonic clock
        self._clock_until = 0.0  # monotonic; until then it counts

    @property
    def unreadable(self) -> frozenset[str]:
        """The workers whose records could not be parsed the last time."""
        return self._records.unreadable

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """Return the records of all live workers, ordered by pool and id, without those that cannot be parsed."""
        with reaching_redis():
            return await self._records.read()

    async def exchange(self, gateway: str, token: str | None) -> Exchanged:
        """Return the records of all live workers and the uploads in progress, and list `gateway` as `set_gateway` does.

        One round trip, as long as no worker comes and no instance changes, and once a second another one for the time.
        A Redis that takes no writes does not list the gateway, which is no error. `token` None: it is not listed.
        """
        extra = ExtraCommands(lambda pipeline: self._add_exchange(pipeline, gateway, token, now), [])
        with reaching_redis():
            now = await self._now()
            workers = await self._records.read(extra)
            stored, *_ = extra.replies
            if isinstance(stored, Exception):
                raise stored
            uploads = await self._live_uploads(stored, now)
        return Exchanged(workers, uploads)

    def _add_exchange(self, pipeline: Any, gateway: str, token: str | None, now: float) -> None:
        pipeline.hgetall(self._keys.uploads)
        if token is not None:
            pipeline.hset(self._keys.gateways, gateway, _listed(token, now))

    async def stream_entries(self, pool: str, lanes: list[str]) -> list[int]:
        """Return the number of entries in the stream of each lane, waiting and leased."""
        keys = self._keys.pool(pool)
        with reaching_redis():
            pipeline = self._redis.pipeline(transaction=False)
            for lane in lanes:
                pipeline.xlen(keys.stream(lane))
            return [int(count) for count in await pipeline.execute()]

    async def uploads(self) -> dict[tuple[str, int | None], State]:
        """Return the uploads in progress: (model, version) -> state; version None: numbered when it is published."""
        with reaching_redis():
            stored = await self._redis.hgetall(self._keys.uploads)
            return await self._live_uploads(stored, await self._now())

    async def _live_uploads(self, stored: Mapping[bytes, bytes], now: float) -> dict[tuple[str, int | None], State]:
        """Return the uploads that are stored, and remove those of gateways that died."""
        uploads: dict[tuple[str, int | None], State] = {}
        for field, value in stored.items():
            model, _, version = _text(field).partition("/")
            state, _, until = _text(value).partition(" ")
            with suppress(ValueError):  # written by another release, which removes it itself
                if float(until) > now:
                    uploads[model, int(version) if version else None] = State(state)
                else:  # its gateway died
                    with suppress(Failure):  # Redis takes no writes: then it is removed later
                        await self._remove_upload(_text(field))
        return uploads

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        """List an upload with this state for UPLOAD_LIFE_S; None: remove it, since it has ended."""
        field = f"{model}/{'' if version is None else version}"
        if state is None:
            await self._remove_upload(field)
            return
        with reaching_redis():
            await self._redis.hset(self._keys.uploads, field, f"{state.value} {await self._now() + UPLOAD_LIFE_S:.3f}")

    async def _remove_upload(self, field: str) -> None:
        with reaching_redis():
            await self._redis.hdel(self._keys.uploads, field)

    async def gateways(self) -> dict[str, str]:
        """Return the live gateways and, for each, the token of the repository state that it routes by."""
        with reaching_redis():
            return await self._live(self._keys.gateways, GATEWAY_LIFE_S, await self._redis.hgetall(self._keys.gateways))

    async def set_gateway(self, name: str, token: str | None) -> None:
        """List a gateway for GATEWAY_LIFE_S with the state that it routes by; None: remove it, since it stops."""
        with reaching_redis():
            if token is None:
                await self._redis.hdel(self._keys.gateways, name)
            else:
                await self._redis.hset(self._keys.gateways, name, _listed(token, await self._now()))

    async def exchange_use(self, gateway: str, text: str | None) -> dict[str, str]:
        """List what API keys used through a gateway for USE_LIFE_S, and return what the other live gateways listed.

        `text` None: nothing has changed, and nothing is listed.
        """
        with reaching_redis():
            pipeline = self._redis.pipeline(transaction=False)
            if text is not None:
                pipeline.hset(self._keys.use, gateway, f"{await self._now() + USE_LIFE_S:.3f} {text}")
                pipeline.expire(self._keys.use, math.ceil(USE_LIFE_S))
            pipeline.hgetall(self._keys.use)
            *_, stored = await pipeline.execute()
            others = await self._live(self._keys.use, USE_LIFE_S, stored)
        others.pop(gateway, None)
        return others

    async def keys_changed(self) -> int:
        """Count a change of the API keys, tell all gateways, and return its number."""
        with reaching_redis():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hincrby(self._keys.keys_read, _CHANGES, 1)
            pipeline.publish(self._keys.changes, "keys:")
            change, _ = await pipeline.execute()
        return int(change)

    async def tell_keys_read(self, gateway: str, change: int) -> int:
        """List the last change of the API keys that a gateway has read, for KEYS_READ_LIFE_S; return the last one."""
        with reaching_redis():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hset(self._keys.keys_read, gateway, f"{await self._now() + KEYS_READ_LIFE_S:.3f} {change}")
            pipeline.hget(self._keys.keys_read, _CHANGES)
            _, last = await pipeline.execute()
        return int(last or 0)

    async def keys_read(self) -> dict[str, int]:
        """Return the live gateways and, for each, the number of the last change of the API keys that it has read."""
        with reaching_redis():
            stored = await self._redis.hgetall(self._keys.keys_read)
            stored.pop(_CHANGES.encode(), None)
            return {
                gateway: int(change)
                for gateway, change in (await self._live(self._keys.keys_read, KEYS_READ_LIFE_S, stored)).items()
                if change.isdecimal()
            }

    async def _live(self, key: bytes, life_s: float, stored: Mapping[bytes, bytes]) -> dict[str, str]:
        """Return what live gateways listed in a hash, without what this release cannot read."""
        now = await self._now()
        live: dict[str, str] = {}
        for name, value in stored.items():
            until, _, text = _text(value).partition(" ")
            with suppress(ValueError):
                if await self._is_live(key, name, float(until), life_s, text, now):
                    live[_text(name)] = text
        return live

    async def _is_live(self, key: bytes, gateway: bytes, until: float, life_s: float, text: str, now: float) -> bool:
        """Return whether the gateway that listed `text` in a hash runs; an entry that has outlived it is removed.

        An entry cannot last longer than `life_s`. If it seems to, the clock was set back, and it ends after `life_s`.
        """
        if until > now + life_s:
            self._clock_until = 0.0  # it may be this clock that is old
            now = await self._now()
            if until > now + life_s:
                await self._redis.hset(key, gateway, f"{now + life_s:.3f} {text}")
        if until <= now:
            await self._redis.hdel(key, gateway)
        return until > now

    async def _now(self) -> float:
        """Return seconds since the epoch on the Redis clock: the clocks of machines differ. Asked once a second."""
        now = time.monotonic()
        if now >= self._clock_until:
            seconds, microseconds = await self._redis.time()
            self._clock_ahead_s = int(seconds) + int(microseconds) / 1e6 - now
            self._clock_until = now + CLOCK_S
        return now + self._clock_ahead_s

    async def order(self, pool: str, worker: str, order: Order) -> bool:
        """Give a live worker an order that is not the controller's; returns False if it is gone."""
        keys = self._keys.pool(pool)
        names = (*keys.scheduling, keys.fence)
        arguments = (keys.prefix, order.token, worker, order.model_dump_json())
        with reaching_redis():
            return bool(await self._redis.eval(script("order").text, len(names), *names, *arguments))

    async def now(self) -> float:
        """Ask for the seconds since the epoch on the Redis clock."""
        self._clock_until = 0.0
        with reaching_redis():
            return await self._now()

    async def pools(self) -> set[str]:
        """Return the pools that have workers, or had some a while ago."""
        with reaching_redis():
            return {_text(pool) for pool in await self._redis.smembers(self._keys.pools)}

    async def leader(self) -> Leader | None:
        """Return the controller that leads; None if none does."""
        with reaching_redis():
            stored = await self._redis.get(self._keys.leader)
        token, _, name = _text(stored or b"").partition(" ")
        return Leader(name, int(token)) if token.isdecimal() else None

    async def answers(self, seconds_max: float) -> bool:
        """Return whether Redis answers a PING within `seconds_max`."""
        try:
            async with asyncio.timeout(seconds_max):
                await self._redis.ping()
        except (RedisError, OSError, TimeoutError):
            return False
        return True

    async def memory(self) -> Memory:
        """Return the memory of Redis. Raises Failure also if this user may not ask for it."""
        with reaching_redis():
            info = await self._redis.info("memory")
        try:
            return Memory(int(info["used_memory"]), int(info["maxmemory"]))
        except KeyError as error:
            raise Failure(Code.UNAVAILABLE, f"Redis does not tell its {error}") from error

    async def publish(self, message: str) -> None:
        """Send an event to all processes that read `messages` (millstream.services.queue.keys)."""
        with reaching_redis():
            await self._redis.publish(self._keys.changes, message)

    async def messages(self) -> AsyncIterator[str]:
        """Yield the events that are published from now on."""
        subscription = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            with reaching_redis():
                async with limited(self._reply_s_max):
                    await subscription.subscribe(self._keys.changes)
                pinged = False
                while True:
                    async with limited(self._quiet_s + self._reply_s_max):
                        message = await subscription.get_message(timeout=self._quiet_s)
                    if message is None and pinged:
                        raise Failure(Code.UNAVAILABLE, "Redis does not answer a subscriber", retry_after_s=1)
                    pinged = message is None
                    if message is None:
                        async with limited(self._reply_s_max):
                            await subscription.ping()
                    elif message["type"] == "message":
                        yield _text(message["data"])
        finally:
            await subscription.aclose()

    async def close(self) -> None:
        await self._redis.aclose()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _listed(token: str, now: float) -> str:
    return f"{now + GATEWAY_LIFE_S:.3f} {token}"
