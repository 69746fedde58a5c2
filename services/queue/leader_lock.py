"""Leader lock: which controller leads, and the orders that only the leader gives.

controller ─ acquire every second ─> leader key (expires), fencing token ─> order ─> orders:<worker>, if no pool has
seen a higher token
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from pydantic import ValidationError

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.limited_client import reaching_redis
from millstream.services.queue.scripts import Script, script
from millstream.services.queue.url import RedisAddress, async_client
from millstream.services.wire.orders import Order

#: orders of one worker that are read when a controller becomes the leader
WAITING_ORDERS_MAX = 256


class Lead(NamedTuple):
    """Who leads. `token`: the caller's fencing token; 0: it does not lead."""

    token: int
    leader: str


class Delivery(IntEnum):
    """What became of an order."""

    GIVEN = 1
    WORKER_GONE = 0
    NEWER_LEADER = -1


class LeaderLock:
    """The lock of one controller. Every method raises Failure(UNAVAILABLE) while Redis is not reachable.

    Args:
        name: the controller's, unique for each start of its process.
        life_s: how long a lead lasts after `acquire`.
    """

    def __init__(self, address: RedisAddress, keys: InstallationKeys, name: str, life_s: float) -> None:
        self.name = name
        self._keys = keys
        self._life_ms = round(life_s * 1000)
        # Not repeated: a reply that comes late must not count as a lead that began late.
        self._redis: Any = async_client(address, retries=0)

    async def acquire(self) -> Lead:
        """Become the leader if there is none, or stay it; returns who leads now."""
        reply = await self._run(script("lead"), (self._keys.leader, self._keys.leader_token), self.name, self._life_ms)
        return Lead(int(reply[0]), _text(reply[1]))

    async def release(self, token: int) -> bool:
        """End the lead with this token; returns False if another controller leads already."""
        return bool(await self._run(script("step_down"), (self._keys.leader,), self.name, token))

    async def fence(self, pools: Iterable[str], token: int) -> bool:
        """Keep leaders with lower tokens from giving orders to these pools; returns False if a newer leader did so."""
        deliveries = [await self._order(pool, token, "", "") for pool in pools]
        return Delivery.NEWER_LEADER not in deliveries

    async def order(self, pool: str, worker: str, order: Order) -> Delivery:
        """Give an order to a worker. The order carries the token."""
        return await self._order(pool, order.token, worker, order.model_dump_json())

    async def waiting_orders(self, pool: str, worker: str) -> list[Order]:
        """Return the orders that a worker has not taken yet, without those that this release cannot read."""
        with reaching_redis():
            stored = await self._redis.lrange(self._keys.pool(pool).orders(worker), 0, WAITING_ORDERS_MAX - 1)
        return [order for data in stored if (order := _readable(data)) is not None]

    async def close(self) -> None:
        await self._redis.aclose()

    async def _order(self, pool: str, token: int, worker: str, order: str) -> Delivery:
        keys = self._keys.pool(pool)
        return Delivery(
            await self._run(script("order"), (*keys.scheduling, keys.fence), keys.prefix, token, worker, order)
        )

    async def _run(self, known: Script, keys: tuple[bytes, ...], *arguments: bytes | str | int) -> Any:
        """Run a script. Its text is sent each time: these are a few calls a second, and Redis may forget scripts."""
        with reaching_redis():
            return await self._redis.eval(known.text, len(keys), *keys, *arguments)


def _readable(data: bytes) -> Order | None:
    try:
        return Order.model_validate_json(data)
    except ValidationError:
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
