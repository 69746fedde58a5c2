"""What a Redis server says about itself, for checks: version, role, round trip, clock, memory."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError, RedisError

from millstream.services.errors import Code, Failure
from millstream.services.queue.url import RedisAddress, client

TRIPS = 7


class RedisFacts(NamedTuple):
    """What a Redis says about itself.

    Args:
        version: as the server reports it; that of Redis which it is compatible with.
        role: "master" or "slave".
        latency_s: median time of a round trip.
        clock_ahead_s: this machine's clock minus that of Redis.
        memory_used_bytes: memory that its data takes.
        memory_limit_bytes: `maxmemory`; 0: no limit.
        policy: `maxmemory-policy`, what it does at the limit.
        cluster: whether it is a node of a cluster.
    """

    version: str
    role: str
    latency_s: float
    clock_ahead_s: float
    memory_used_bytes: int
    memory_limit_bytes: int
    policy: str
    cluster: bool


def ask(address: RedisAddress) -> RedisFacts:
    """Ask a Redis for its facts. Raises Failure(UNAVAILABLE) if it does not answer, or not this user.

    Where this user may not run INFO, text is empty and numbers are 0.
    """
    try:
        with client(address, retries=0) as redis:
            redis.ping()  # the connection is open now
            trips, ahead = zip(*(_trip(redis) for _ in range(TRIPS)), strict=True)
            info = _info(redis)
    except (RedisError, OSError) as error:
        raise Failure(Code.UNAVAILABLE, str(error) or type(error).__name__) from error
    return RedisFacts(
        version=str(info.get("redis_version", "")),
        role=str(info.get("role", "")),
        latency_s=median(trips),
        clock_ahead_s=ahead[trips.index(min(trips))],
        memory_used_bytes=int(info.get("used_memory", 0)),
        memory_limit_bytes=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "")),
        cluster=bool(info.get("cluster_enabled", 0)),
    )


def _info(redis: Any) -> dict[str, Any]:
    """Return INFO, or nothing if this user may not ask for it."""
    try:
        found: dict[str, Any] = redis.info()
    except NoPermissionError:
        return {}
    return found


def _trip(redis: Any) -> tuple[float, float]:
    """Return the seconds that one reading of the Redis clock took, and by how much this machine's clock is ahead."""
    began = time.perf_counter()
    seconds, microseconds = redis.time()
    took = time.perf_counter() - began
    # Redis read its clock about half the way back.
    return took, time.time() - took / 2 - (int(seconds) + int(microseconds) / 1e6)  # noqa: TID251 - it is checked
