"""Redis addresses: a URL as the user wrote it -> RedisAddress -> clients.

redis://[[user]:password@]host[:port][/db]   rediss://… (TLS)   unix://[[user]:password@]/path[?db=N]
redis+sentinel://[[user]:password@]host[:port][,host[:port]…]/master[/db]   rediss+sentinel://… (TLS)
The rules are those of redis-py; the TLS options of a `rediss` URL are its `ssl_…` query arguments. A sentinel URL names
the sentinels and the master. Its user, password and database are for the master; the query arguments
`sentinel_username` and `sentinel_password` are for the sentinels.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import AbstractBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from millstream.services.errors import Code, Failure, invalid
from millstream.services.process.waits import backoff_s
from millstream.services.queue.limited_client import LimitedRedis
from millstream.services.queue.redis_parts import SSLConnection, make_cancellable, parse_url
from millstream.services.queue.sentinel import AsyncFinder, Finder, Sentinels

PORT_DEFAULT = 6379
CONNECT_S_MAX = 5.0
REPLY_S_MAX = 10.0
WATCHED_REPLY_S_MAX = 3.0  # of a master that sentinels watch: after this time there may be another master
RETRIES_MAX = 3
RETRY_S_MIN = 0.1
RETRY_S_MAX = 0.5

_FORMS = (
    "redis://[[user]:password@]host[:port][/db], rediss://… for TLS, unix://[[user]:password@]/path[?db=N], or "
    "redis+sentinel://[[user]:password@]host[:port][,host[:port]…]/master[/db]"
)
_WATCHED = "+sentinel"
_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
#: Query argument of a `rediss` URL -> field of `Tls`.
_TLS_OPTIONS = {
    "ssl_cert_reqs": "verify",
    "ssl_check_hostname": "check_hostname",
    "ssl_ca_certs": "ca_file",
    "ssl_ca_path": "ca_folder",
    "ssl_certfile": "certificate_file",
    "ssl_keyfile": "key_file",
    "ssl_password": "key_password",
}
_OF_SENTINELS = ("sentinel_username", "sentinel_password")
_OPTIONS = {"connection_class", "path", "host", "port", "db", "username", "password"}


@dataclass(frozen=True, slots=True)
class Tls:
    """How the certificate of a TLS server is verified."""

    verify: str = "required"  # or "optional" or "none", as in `ssl_cert_reqs`
    check_hostname: bool = True
    ca_file: str | None = None
    ca_folder: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    key_password: str | None = field(default=None, repr=False)

    def context(self) -> ssl.SSLContext:
        """Return a client context. Raises Failure(INVALID) if a certificate file cannot be used."""
        context = ssl.create_default_context()
        context.check_hostname = self.check_hostname and self.verify != "none"
        context.verify_mode = _VERIFY[self.verify]
        try:
            if self.ca_file or self.ca_folder:
                context.load_verify_locations(cafile=self.ca_file, capath=self.ca_folder)
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file, self.key_password)
        except OSError as error:
            raise invalid(f"the certificate files of the Redis URL cannot be used: {error}") from error
        return context


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A unix socket (`path`), a TCP server (`host`, `port`) or the master that `sentinels` name, with the login for it.

    `url` is the URL as the user wrote it, password included; it is used for connecting and for child processes.
    Messages and logs show `str(address)`, which contains no password; nor does the repr.
    """

    url: str = field(repr=False, compare=False)
    path: str | None = None
    host: str = "localhost"
    port: int = PORT_DEFAULT
    tls: Tls | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    sentinels: Sentinels | None = None

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse a URL. Raises Failure(INVALID); the message has no part of the URL, which may contain a password."""
        scheme, _, rest = url.strip().partition("://")
        if scheme.endswith(_WATCHED):
            return cls._parse_watched(url.strip(), scheme.removesuffix(_WATCHED), rest)
        parse: Callable[[str], dict[str, Any]] = parse_url
        try:
            options = parse(url.strip())
        except ValueError as error:
            raise _unreadable() from error
        if scheme == "unix" and "path" not in options:
            raise invalid(f"the Redis URL has no socket path: write {_FORMS}")
        has_path = bool(rest.partition("?")[0].partition("/")[2].strip("/"))
        if (scheme != "unix" and has_path and "db" not in options) or options.get("db", 0) < 0:
            raise invalid("the database in the Redis URL is not a number: write redis://host:port/0")
        tls = _tls(options) if options.get("connection_class") is SSLConnection else None
        unknown = sorted(options.keys() - _OPTIONS - (set(_TLS_OPTIONS) if tls else set()))
        if unknown:
            raise _unsupported(unknown[0], ["db", "username", "password", *(_TLS_OPTIONS if tls else ())])
        fields = {name: options[name] for name in _OPTIONS - {"connection_class"} if name in options}
        return cls(url=url.strip(), tls=tls, **fields)

    @classmethod
    def _parse_watched(cls, url: str, scheme: str, rest: str) -> RedisAddress:
        """Parse a sentinel URL; the parts for the master are parsed as the URL of a server."""
        location, _, query = rest.partition("?")
        authority, _, path = location.partition("/")
        login, at, hosts = authority.rpartition("@")
        master, _, db = path.partition("/")
        if scheme not in {"redis", "rediss"} or "#" in location or "@" in login:
            raise _unreadable()
        options = dict(parse_qsl(query, keep_blank_values=True))
        username, password = (options.pop(name, None) for name in _OF_SENTINELS)
        unknown = sorted(name for name in options if name.startswith("sentinel_"))
        if unknown:
            raise _unsupported(unknown[0], _OF_SENTINELS)
        try:
            sentinels = Sentinels.parse(hosts, unquote(master), username, password)
        except ValueError:
            raise _unreadable() from None  # its message may contain a password
        server = cls.parse(f"{scheme}://{login}{at}localhost/{db}?{urlencode(options, quote_via=quote)}")
        return replace(server, url=url, sentinels=sentinels)

    @classmethod
    def unix(cls, path: str) -> RedisAddress:
        """Return the address of a server on a unix socket, without login, database 0."""
        return cls(url=f"unix://{quote(path)}", path=path)

    @property
    def reply_s_max(self) -> float:
        """Seconds that a reply, or opening a connection, may take before the connection counts as lost."""
        return REPLY_S_MAX if self.sentinels is None else WATCHED_REPLY_S_MAX

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return a new TLS client context, or None if the URL does not ask for TLS."""
        return self.tls.context() if self.tls else None

    def __str__(self) -> str:
        secret = "***" if self.password else None
        login = f"{self.username or ''}:{secret}@" if secret else f"{self.username}@" if self.username else ""
        if self.path is not None:
            return f"unix://{login}{self.path}" + (f"?db={self.db}" if self.db else "")
        if self.sentinels is not None:
            return f"{'rediss' if self.tls else 'redis'}{_WATCHED}://{login}{self.sentinels}/{self.db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{login}{host}:{self.port}/{self.db}"


def _unreadable() -> Failure:
    return invalid(f"the Redis URL cannot be read: write {_FORMS}, special characters percent-encoded")


def _unsupported(option: str, known: Sequence[str]) -> Failure:
    return invalid(f"the Redis URL has an option {option!r} that is not supported; supported: {', '.join(known)}")


def _tls(options: dict[str, Any]) -> Tls:
    tls = Tls(**{field_: options[name] for name, field_ in _TLS_OPTIONS.items() if name in options})
    if tls.verify not in _VERIFY:
        raise invalid(f"ssl_cert_reqs in the Redis URL is {tls.verify!r}: use {', '.join(_VERIFY)}")
    return tls


def locate(address: RedisAddress) -> RedisAddress:
    """Return the address to connect to now: the master that the sentinels name, or `address` itself.

    Raises Failure(UNAVAILABLE) if no sentinel names a master.
    """
    if address.sentinels is None:
        return address
    try:
        host, port = Finder(address.sentinels, _tls_options(address)).discover_master(address.sentinels.master)
    except RedisError as error:
        raise Failure(Code.UNAVAILABLE, str(error), retry_after_s=1) from error
    return replace(address, host=host, port=port)


async def locate_async(address: RedisAddress) -> RedisAddress:
    """Asyncio form of `locate`."""
    if address.sentinels is None:
        return address
    finder = AsyncFinder(address.sentinels, _tls_options(address))
    try:
        host, port = await finder.discover_master(address.sentinels.master)
    except RedisError as error:
        raise Failure(Code.UNAVAILABLE, str(error), retry_after_s=1) from error
    return replace(address, host=host, port=port)


def _options(address: RedisAddress) -> dict[str, Any]:
    """Return the arguments that both clients take.

    RESP2 is pinned because the form of replies depends on the protocol version. A blocking command must block for less
    than `reply_s_max` seconds, or its wait counts as a dead connection.
    """
    options: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "protocol": 2,
        "socket_connect_timeout": min(CONNECT_S_MAX, address.reply_s_max),
        "socket_timeout": address.reply_s_max,
        "socket_keepalive": address.path is None,
        "client_name": "millstream",
        **_tls_options(address),
    }
    if address.path is not None:
        return options | {"unix_socket_path": address.path}
    return options if address.sentinels is not None else options | {"host": address.host, "port": address.port}


def _tls_options(address: RedisAddress) -> dict[str, Any]:
    if address.tls is None:
        return {}
    return {"ssl": True} | {name: getattr(address.tls, field_) for name, field_ in _TLS_OPTIONS.items()}


def client(address: RedisAddress, *, retries: int = RETRIES_MAX) -> redis.Redis:
    """Return a redis-py client that connects on first use; bytes in, bytes out.

    A lost connection is retried `retries` times, separately for connecting and for the command. With sentinels, each
    new connection goes to the current master.
    """
    options = _options(address) | {"retry": Retry(_Backoff(), retries)}
    if address.sentinels is None:
        return redis.Redis(**options)
    return redis.Redis.from_pool(Finder(address.sentinels, _tls_options(address)).pool(options))


def async_client(address: RedisAddress, *, retries: int = RETRIES_MAX) -> redis.asyncio.Redis:
    """Asyncio form of `client`. A call takes the address's `reply_s_max` at most, with its retries."""
    options = _options(address) | {"retry": AsyncRetry(_Backoff(), retries)}
    if address.sentinels is None:
        made = LimitedRedis(**options)
    else:
        pool = AsyncFinder(address.sentinels, _tls_options(address)).pool(options)
        made = cast("LimitedRedis", LimitedRedis.from_pool(pool))
    made.call_s_max = address.reply_s_max
    make_cancellable(made.connection_pool)
    return made


class _Backoff(AbstractBackoff):
    """redis-py's interface to our back-off."""

    def compute(self, failures: int) -> float:
        return backoff_s(failures, RETRY_S_MIN, RETRY_S_MAX)
