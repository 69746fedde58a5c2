"""The log levels of an installation in Redis: a level for each kind of process that has one.

PUT /admin/v1/log-level ─> StoredLogLevels ─> hash in Redis ─> InstallationLevel of each process, on all machines
The levels expire, so that a forgotten debug level does not fill disks for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.services.process.log_level import KINDS, LEVELS
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.limited_client import reaching_redis
from millstream.services.queue.url import RedisAddress, async_client, client

LEVELS_LIFE_S = 86_400  # from the last change until all levels are the default again


class StoredLogLevels:
    """Reads and changes the levels. Every method raises Failure(UNAVAILABLE) while Redis is not reachable."""

    def __init__(self, address: RedisAddress, keys: InstallationKeys) -> None:
        self._key = keys.log_levels
        self._redis: Any = async_client(address)

    async def read(self) -> dict[str, str]:
        """Return the levels by kind; kinds without one are left out."""
        with reaching_redis():
            return _levels(await self._redis.hmget(self._key, KINDS))

    async def update(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        """Change the levels of some kinds, None: to the default; return all. They last for LEVELS_LIFE_S."""
        levels = {kind: level for kind, level in changes.items() if level is not None}
        defaults = [kind for kind, level in changes.items() if level is None]
        with reaching_redis():
            pipeline = self._redis.pipeline()
            if levels:
                pipeline.hset(self._key, mapping=levels)
            if defaults:
                pipeline.hdel(self._key, *defaults)
            pipeline.expire(self._key, LEVELS_LIFE_S)
            pipeline.hmget(self._key, KINDS)
            *_, stored = await pipeline.execute()
        return _levels(stored)

    async def close(self) -> None:
        await self._redis.aclose()


class InstallationLevel:
    """Reads the level of one kind of process, over a connection of its own. For a thread."""

    def __init__(self, address: RedisAddress, keys: InstallationKeys, kind: str) -> None:
        self._key = keys.log_levels
        self._kind = kind
        self._redis: Any = client(address, retries=0)  # the next look is the retry

    def read(self) -> str | None:
        """Return the level; None: the default. Raises Failure(UNAVAILABLE) while Redis is not reachable."""
        with reaching_redis():
            stored = self._redis.hmget(self._key, (self._kind,))
        (level,) = stored
        return _level(level)


def _levels(stored: list[bytes | None]) -> dict[str, str]:
    found = zip(KINDS, map(_level, stored), strict=True)
    return {kind: level for kind, level in found if level is not None}


def _level(stored: bytes | None) -> str | None:
    """Return a stored level; None for one that this release does not know."""
    text = (stored or b"").decode(errors="replace")
    return text if text in LEVELS else None
