"""Which server is the master now: sentinels are asked, one after the other, until one says it.

SENTINEL GET-MASTER-ADDR-BY-NAME -> connect there -> ROLE must say master; again at each new connection
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
from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, SentinelConnectionPool

PORT_DEFAULT = 26379
ASK_S_MAX = 1.0  # for connecting, and for the answer: then the next sentinel is asked
_ASK = "SENTINEL GET-MASTER-ADDR-BY-NAME"
_NAME = re.compile(r"[A-Za-z0-9._-]+")  # what Sentinel takes as a master's name


@dataclass(frozen=True, slots=True)
class Sentinels:
    """`hosts`: host and port of each. `master`: what they call it. User and password: of the sentinels themselves."""

    hosts: tuple[tuple[str, int], ...]
    master: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, hosts: str, master: str, username: str | None, password: str | None) -> Sentinels:
        """`hosts`: host[:port],… as in the URL. Raises ValueError; its message may hold parts of `hosts`."""
        found = [urlsplit(f"//{host}") for host in hosts.split(",")]
        if not all(one.hostname and not one.path and one.username is None for one in found):
            raise ValueError("a sentinel without a host")
        if not _NAME.fullmatch(master):
            raise ValueError("not a name of a master")
        ports = [PORT_DEFAULT if one.port is None else one.port for one in found]
        return cls(
            tuple((str(one.hostname), port) for one, port in zip(found, ports, strict=True)), master, username, password
        )

    def __str__(self) -> str:
        hosts = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts]
        return f"{','.join(hosts)}/{self.master}"


class _Finder:
    """`discover_master` of its heirs is what redis-py's connection pools call. `tls`: options of its clients."""

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

    def _nobody(self, said: list[str]) -> MasterNotFoundError:
        return MasterNotFoundError(f"no sentinel names a master {self._sentinels.master!r}: {'; '.join(said)}")


class Finder(_Finder):
    """Asks from a thread that may block."""

    def pool(self, options: Mapping[str, Any]) -> ConnectionPool:
        """Connections, with these options, to who is the master when each is made."""
        pool: Callable[..., ConnectionPool] = SentinelConnectionPool
        return pool(self._sentinels.master, self, redis_connect_func=_greet, **options)

    def discover_master(self, name: str) -> tuple[str, int]:
        """Host and port of the master. Raises redis.exceptions.ConnectionError when no sentinel says it."""
        said: list[str] = []
        for host, port in self._sentinels.hosts:
            try:
                sentinel: Any = redis.Redis(host, port, retry=Retry(NoBackoff(), 0), **self._options)
                with sentinel:
                    found: tuple[str, int] | None = sentinel.execute_command(_ASK, name)
            except (RedisError, OSError) as error:
                said.append(f"{host}:{port}: {error}")
                continue
            if found:
                return found
            said.append(f"{host}:{port}: it is unknown there")
        raise self._nobody(said)


class AsyncFinder(_Finder):
    """Asks from an event loop."""

    def pool(self, options: Mapping[str, Any]) -> AsyncConnectionPool:
        """As `Finder.pool`."""
        pool: Callable[..., AsyncConnectionPool] = AsyncSentinelConnectionPool
        return pool(self._sentinels.master, self, redis_connect_func=_greet_async, **options)

    async def discover_master(self, name: str) -> tuple[str, int]:
        """As `Finder.discover_master`."""
        said: list[str] = []
        for host, port in self._sentinels.hosts:
            try:
                retry = AsyncRetry(NoBackoff(), 0)
                sentinel: Any = redis.asyncio.Redis(host=host, port=port, retry=retry, **self._options)
                async with sentinel:
                    found: tuple[str, int] | None = await sentinel.execute_command(_ASK, name)
            except (RedisError, OSError) as error:
                said.append(f"{host}:{port}: {error}")
                continue
            if found:
                return found
            said.append(f"{host}:{port}: it is unknown there")
        raise self._nobody(said)


def is_master(role: Any) -> bool:
    """Whether this reply to ROLE is a master's. One that was demoted is still there; sentinels may learn it late."""
    return role[0] in (b"master", "master")


def _greet(connection: Any) -> None:
    """A redis-py connection is open: log in, and make sure that it leads to a master. Raises RedisError."""
    connection.on_connect()
    connection.send_command("ROLE")
    _check(connection.read_response())


async def _greet_async(connection: Any) -> None:
    """The asyncio form of `_greet`."""
    await connection.on_connect()
    await connection.send_command("ROLE")
    _check(await connection.read_response())


def _check(role: Any) -> None:
    if not is_master(role):
        raise RedisConnectionError("the server that the sentinels name is not a master (any more)")
