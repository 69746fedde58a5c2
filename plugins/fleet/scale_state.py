"""What autoscaling keeps in Redis: the loads that gateways count, and the decisions of the leading controller.

gateways ─> loads ─> controller ─> decisions ─> supervisor, gateways (readiness, waits, admin API), other scalers
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from millstream.plugins.fleet.scaling import GatewayLoads, ScaleDecision
from millstream.services.errors import Code, Failure
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress, async_client

LOADS_LIFE_S = 5.0  # a gateway that has not reported for this long has ended: its rows no longer wait
CLOCK_S = 1.0  # by which a report may end later than this: else the clock was set back after it
#: Decisions are kept without a controller, so that the next one begins with them; readers look at their age.
DECISIONS_LIFE_S = 86_400.0
CHANGES_MAX = 100  # of a pool that are kept


class ScaleState:
    """Reads and writes them. Every method raises Failure(UNAVAILABLE) while Redis is not reachable."""

    def __init__(self, address: RedisAddress, keys: InstallationKeys) -> None:
        self._keys = keys
        self._redis: Any = async_client(address)

    async def exchange(self, gateway: str, loads: GatewayLoads) -> tuple[dict[str, ScaleDecision], float]:
        """Publish what a gateway counted; return the decisions, by pool, and the time of the Redis clock."""
        try:
            now = await self._now()
            until = f"{now + LOADS_LIFE_S:.3f}"
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hset(self._keys.loads, gateway, f"{until} {loads.model_dump_json()}")
            pipeline.expire(self._keys.loads, round(LOADS_LIFE_S * 2))
            pipeline.hgetall(self._keys.scale)
            *_, stored = await pipeline.execute()
        except (RedisError, OSError) as error:
            raise _unreachable(error) from error
        return _decisions(stored), now

    async def remove_loads(self, gateway: str) -> None:
        """Remove what a gateway counted that stops."""
        try:
            await self._redis.hdel(self._keys.loads, gateway)
        except (RedisError, OSError) as error:
            raise _unreachable(error) from error

    async def loads(self) -> dict[str, GatewayLoads]:
        """Return what the live gateways counted, by gateway, without what this release cannot read."""
        found: dict[str, GatewayLoads] = {}
        try:
            now, stored = await self._now(), await self._redis.hgetall(self._keys.loads)
            for name, value in stored.items():
                until, _, document = value.partition(b" ")
                with suppress(ValueError):
                    if now < float(until) <= now + LOADS_LIFE_S + CLOCK_S:
                        found[_text(name)] = GatewayLoads.model_validate_json(document)
                    else:
                        await self._redis.hdel(self._keys.loads, name)
        except (RedisError, OSError) as error:
            raise _unreachable(error) from error
        return found

    async def decide(self, decisions: Collection[ScaleDecision], changes: Iterable[ScaleDecision] = ()) -> None:
        """Publish decisions. `changes`: those among them that want another number of workers than before."""
        fields = {decision.pool: decision.model_dump_json() for decision in decisions}
        if not fields:
            return
        try:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hset(self._keys.scale, mapping=fields)
            pipeline.expire(self._keys.scale, round(DECISIONS_LIFE_S))
            for decision in changes:
                key = self._keys.scale_changes(decision.pool)
                pipeline.lpush(key, fields[decision.pool])
                pipeline.ltrim(key, 0, CHANGES_MAX - 1)
                pipeline.expire(key, round(DECISIONS_LIFE_S))
            await pipeline.execute()
        except (RedisError, OSError) as error:
            raise _unreachable(error) from error

    async def forget(self, pools: Iterable[str]) -> None:
        """Remove the decisions about pools that are gone."""
        try:
            for pool in pools:
                await self._redis.hdel(self._keys.scale, pool)
        except (RedisError, OSError) as error:
            raise _unreachable(error) from error

    async def decisions(self) -> tuple[dict[str, ScaleDecision], float]:
        """Return the last decisions, by pool, and the time of the Redis clock."""
        try:
            return _decisions(await self._redis.hgetall(self._keys.scale)), await self._now()
        except (RedisError, OSError) as error:
            raise _unreachable(error) from error

    async def changes(self, pool: str) -> list[ScaleDecision]:
        """Return the last decisions that changed how many workers a pool should have, the newest first."""
        try:
            stored = await self._redis.lrange(self._keys.scale_changes(pool), 0, CHANGES_MAX - 1)
        except (RedisError, OSError) as error:
            raise _unreachable(error) from error
        return [one for document in stored for one in _decisions({pool.encode(): document}).values()]

    async def close(self) -> None:
        await self._redis.aclose()

    async def _now(self) -> float:
        seconds, microseconds = await self._redis.time()
        return int(seconds) + int(microseconds) / 1e6


def _decisions(stored: dict[bytes, bytes]) -> dict[str, ScaleDecision]:
    found: dict[str, ScaleDecision] = {}
    for pool, document in stored.items():
        with suppress(ValueError):  # another release wrote it, or another program
            found[_text(pool)] = ScaleDecision.model_validate_json(document)
    return found


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _unreachable(error: Exception) -> Failure:
    return Failure(Code.UNAVAILABLE, f"Redis is not reachable: {error}", retry_after_s=1)
