"""Finds the current master by asking the sentinels one after the other until one answers.

SENTINEL GET-MASTER-ADDR-BY-NAME -> connect there -> ROLE must say master; again for each new connection
(Redis documentation, "Guidelines for Redis clients with support for Redis Sentinel").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry

from millstream.services.queue.redis_parts import (
    AsyncConnectionPool,
    AsyncSentinelConnectionPool,
    ConnectionPool,
    MasterNotFoundError,
    SentinelConnectionPool,
    make_cancellable,
)

PORT_DEFAULT = 26379
ASK_S_MAX = 1.0  # for connecting, and for the answer; after it the next sentinel is asked
NOT_A_MASTER = "the server that the sentinels name is not a master, or no longer"
_ASK = "SENTINEL GET-MASTER-ADDR-BY-NAME"
_NAME = re.compile(r"[A-Za-z0-9._-]+")  # names that Sentinel accepts for a master


@dataclass(frozen=True, slots=True)
class Sentinels:
    """The sentinels that watch a master."""

    hosts: tuple[tuple[str, int], ...]  # host and port of each
    master: str  # the name by which they know it
    username: str | None = None  # for logging in to the sentinels, not to the master
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, hosts: str, master: str, username: str | None, password: str | None) -> Sentinels:
        """Parse host[:port],… as it is in a URL. Raises ValueError, whose message may contain parts of `hosts`."""
        parts = [urlsplit(f"//{host}") for host in hosts.split(",")]
        if not all(part.hostname and not part.path and part.username is None for part in parts):
            raise ValueError("a sentinel without a host")
        if not _NAME.fullmatch(master):
            raise ValueError("not a valid name of a master")
        pairs = tuple((str(part.hostname), PORT_DEFAULT if part.port is None else part.port) for part in parts)
        return cls(pairs, master, username, password)

    def __str__(self) -> str:
        hosts = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts]
        return f"{','.join(hosts)}/{self.master}"


class _Finder:
    """Base of the two finders, whose `discover_master` is called by redis-py's connection pools.

    Args:
        tls: redis-py's TLS options for connections to the sentinels.
    """

    def __init__(self, sentinels: Sentinels, tls: Mapping[str, Any]) -> None:
        self._sentinels = sentinels
        self._options = {
            **tls,
            "username": sentinels.username,
            "password": sentinels.password,
            "protocol": 2,
            "decode_responses": True,
            "socket_connect_timeout": ASK_S_MAX,
            "socket_timeout": ASK_S_MAX,
        }

    def _not_found(self, answers: list[str]) -> MasterNotFoundError:
        return MasterNotFoundError(f"no sentinel names a master {self._sentinels.master!r}: {'; '.join(answers)}")


class Finder(_Finder):
    """Asks the sentinels from a thread that may block."""

    def pool(self, options: Mapping[str, Any]) -> ConnectionPool:
        """Return a pool whose every new connection goes to the current master, with these options."""
        pool: Callable[..., ConnectionPool] = SentinelConnectionPool
        return pool(self._sentinels.master, self, redis_connect_func=_log_in, **options)

    def discover_master(self, name: str) -> tuple[str, int]:
        """Return host and port of the master. Raises redis.exceptions.ConnectionError if no sentinel names it."""
        answers: list[str] = []
        for host, port in self._sentinels.hosts:
            try:
                sentinel: Any = redis.Redis(host, port, retry=Retry(NoBackoff(), 0), **self._options)
                with sentinel:
                    master: tuple[str, int] | None = sentinel.execute_command(_ASK, name)
            except (RedisError, OSError) as error:
                answers.append(f"{host}:{port}: {error}")
                continue
            if master:
                return master
            answers.append(f"{host}:{port}: it does not know this name")
        raise self._not_found(answers)


class AsyncFinder(_Finder):
    """Asks the sentinels from an event loop."""

    def pool(self, options: Mapping[str, Any]) -> AsyncConnectionPool:
        """Return a pool as `Finder.pool` does."""
        pool: Callable[..., AsyncConnectionPool] = AsyncSentinelConnectionPool
        return pool(self._sentinels.master, self, redis_connect_func=_log_in_async, **options)

    async def discover_master(self, name: str) -> tuple[str, int]:
        """Find the master as `Finder.discover_master` does."""
        answers: list[str] = []
        for host, port in self._sentinels.hosts:
            try:
                retry = AsyncRetry(NoBackoff(), 0)
                sentinel: Any = redis.asyncio.Redis(host=host, port=port, retry=retry, **self._options)
                make_cancellable(sentinel.connection_pool)
                async with sentinel:
                    master: tuple[str, int] | None = await sentinel.execute_command(_ASK, name)
            except (RedisError, OSError) as error:
                answers.append(f"{host}:{port}: {error}")
                continue
            if master:
                return master
            answers.append(f"{host}:{port}: it does not know this name")
        raise self._not_found(answers)


def is_master(role: Any) -> bool:
    """Return whether this reply to ROLE is a master's. A demoted master still answers, and sentinels may name it."""
    return role[0] in (b"master", "master")


def _log_in(connection: Any) -> None:
    """Log in on a new redis-py connection and check that its server is a master. Raises RedisError."""
    connection.on_connect()
    connection.send_command("ROLE")
    _check(connection.read_response())


async def _log_in_async(connection: Any) -> None:
    """Asyncio form of `_log_in`."""
    await connection.on_connect()
    await connection.send_command("ROLE")
    _check(await connection.read_response())


def _check(role: Any) -> None:
    if not is_master(role):
        raise RedisConnectionError(NOT_A_MASTER)
