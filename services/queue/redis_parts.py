"""The parts of redis-py and hiredis that the queue uses and that neither documents, checked at import.

pyproject bounds both versions. A process with another version that lacks a part does not start, rather than fail when
it loses its connection.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import hiredis
import redis

from millstream.services.extras import misfit

try:
    from redis.asyncio.connection import AbstractConnection as AsyncAbstractConnection
    from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
    from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
    from redis.connection import AbstractConnection, ConnectionPool, SSLConnection, parse_url
    from redis.sentinel import MasterNotFoundError, SentinelConnectionPool, SentinelConnectionPoolProxy
except ImportError as error:
    raise misfit("redis", redis.__version__, [str(error)]) from error

__all__ = [
    "AsyncConnectionPool",
    "AsyncSentinelConnectionPool",
    "ConnectionPool",
    "MasterNotFoundError",
    "SSLConnection",
    "SentinelConnectionPool",
    "check_parts",
    "parse_url",
]

#: methods that `Finder`, its function for logging in and `cancellable` call
_METHODS: dict[type, tuple[str, ...]] = {
    AbstractConnection: ("on_connect", "send_command", "read_response"),
    AsyncAbstractConnection: ("on_connect", "send_command", "read_response", "send_packed_command", "disconnect"),
}
#: names that a method has to use: what it takes, and what it calls
_USES: dict[tuple[type, str], tuple[str, ...]] = {
    (SentinelConnectionPool, "__init__"): ("service_name", "sentinel_manager"),
    (AsyncSentinelConnectionPool, "__init__"): ("service_name", "sentinel_manager"),
    (SentinelConnectionPoolProxy, "get_master_address"): ("discover_master",),
    (AsyncSentinelConnectionPool, "get_master_address"): ("discover_master",),
    (AbstractConnection, "__init__"): ("redis_connect_func",),
    (AbstractConnection, "connect_check_health"): ("redis_connect_func",),
    (AsyncAbstractConnection, "__init__"): ("redis_connect_func",),
    (AsyncAbstractConnection, "connect_check_health"): ("redis_connect_func",),
    (AsyncAbstractConnection, "send_command"): ("send_packed_command",),
    (AsyncConnectionPool, "make_connection"): ("connection_class",),
}
_PING = b"*2\r\n$4\r\nPING\r\n$1\r\n1\r\n"


def check_parts() -> None:
    """Raise Failure(INTERNAL) that names the parts which the installed versions lack."""
    for package, version, lacking in (
        ("redis", redis.__version__, [*_missing_methods(), *_missing_uses()]),
        ("hiredis", hiredis.__version__, [*_missing_of_hiredis()]),
    ):
        if lacking:
            raise misfit(package, version, lacking)


def _missing_methods() -> Iterator[str]:
    for owner, names in _METHODS.items():
        for name in names:
            method = getattr(owner, name, None)
            if not callable(method) or getattr(method, "__isabstractmethod__", False):
                yield _name(owner, name)


def _missing_uses() -> Iterator[str]:
    for (owner, method), names in _USES.items():
        code = inspect.unwrap(getattr(owner, method, _absent)).__code__
        used = (*code.co_names, *code.co_varnames)
        yield from (f"{name} in {_name(owner, method)}" for name in names if name not in used)


def _missing_of_hiredis() -> Iterator[str]:
    """Yield what does not do what the links of gateways and workers expect."""
    try:
        if hiredis.pack_command(cast("Any", ("PING", 1))) != _PING:
            yield "pack_command"
        reader = hiredis.Reader()
        reader.feed(b"*2\r\n:1\r\n")
        if reader.gets() is not False:
            yield "gets that returns False before a reply is complete"
        reader.feed(b"-ERR x\r\n")
        replies = reader.gets()
        if not isinstance(replies[1], hiredis.ReplyError) or not issubclass(
            hiredis.ProtocolError, hiredis.HiredisError
        ):
            yield "ReplyError, ProtocolError"
    except (AttributeError, TypeError) as error:
        yield str(error)


def _absent() -> None:
    """Stand for a method that does not exist: uses nothing."""


def _name(owner: type, method: str) -> str:
    return f"{owner.__module__}.{owner.__name__}.{method}"


check_parts()


def make_cancellable(pool: AsyncConnectionPool) -> None:
    """Have all connections that a pool makes from now on heed cancellations."""
    made: Any = pool.connection_class
    pool.connection_class = _cancellable(made)


@cache
def _cancellable(connection_class: type[Any]) -> type[Any]:
    return type(connection_class.__name__, (_Cancellable, connection_class), {})


class _Cancellable:
    """Mixed into a connection class of redis-py."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        """Send a command as redis-py does. Raises CancelledError also if that was dropped meanwhile."""
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # its reply is not read
            raise asyncio.CancelledError
