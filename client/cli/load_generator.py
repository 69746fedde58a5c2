"""Generates load on a server: each connection sends its next request as soon as the last one is answered.

Uses a protocol class over httptools instead of an HTTP client library, whose cost would distort the measurement.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from millstream.client.address import ServerAddress
from millstream.services.errors import Code, Failure

ANSWER_S_MAX = 60.0


@dataclass(slots=True)
class LoadTotals:
    """Results so far: the latency of each reply in seconds, in order of arrival, and the replies by status."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server under load, and the bytes of one request."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    request: bytes

    @classmethod
    def of(cls, server: ServerAddress, path: str, body: bytes, header_bytes: int | None) -> LoadTarget:
        """Return a target that receives `body` as a POST to `path`; `header_bytes` as in EncodedRequest."""
        parts = urlsplit(server.url)
        secure = parts.scheme == "https"
        head = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        head.append(f"Content-Length: {len(body)}")
        if server.key:
            head.append(f"Authorization: Bearer {server.key}")
        if header_bytes is None:
            head.append("Content-Type: application/json")
        else:
            head += ["Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {header_bytes}"]
        request = "\r\n".join([*head, "", ""]).encode() + body
        port = parts.port or (443 if secure else 80)
        return cls(parts.hostname or "", port, server.trust.context() if secure else None, request)


class Source(Protocol):
    """Supplies the requests that connections send, and receives the replies."""

    def take(self) -> tuple[int, bytes] | None:
        """Return the next request and its number; None if there are no more."""

    def answered(self, number: int, status: int, body: bytes, seconds: float) -> None:
        """Record the reply to request `number`, and its latency."""


class _Repeated:
    """Repeats one request until an instant."""

    def __init__(self, request: bytes, until: float, totals: LoadTotals) -> None:
        self._request = request
        self._until = until
        self._totals = totals

    def take(self) -> tuple[int, bytes] | None:
        return None if time.perf_counter() >= self._until else (0, self._request)

    def answered(self, number: int, status: int, body: bytes, seconds: float) -> None:
        self._totals.seconds.append(seconds)
        self._totals.statuses[status] += 1


class _LoadConnection(asyncio.Protocol):
    def __init__(self, source: Source) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drained = False  # nothing more to send
        self._source = source
        self._number = 0
        self._sent = 0.0
        self._waiting = False  # for an answer
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # raised by the source
            self._give_up(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._give_up(Failure(Code.UNAVAILABLE, f"the server does not speak HTTP: {error}"))

    def _give_up(self, error: BaseException) -> None:
        assert self._transport is not None
        if not self.closed.done():
            self.closed.set_exception(error)
        self._transport.close()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        seconds = time.perf_counter() - self._sent
        self._waiting = False
        body, self._body = b"".join(self._body), []
        self._source.answered(self._number, self._parser.get_status_code(), body, seconds)
        assert self._transport is not None
        if not self._parser.should_keep_alive():
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed.done():
            return
        if self._waiting:
            self.closed.set_exception(Failure(Code.UNAVAILABLE, "the server closed a connection without a reply"))
        else:
            self.closed.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        numbered = self._source.take()
        if numbered is None:
            self.drained = True
            self._transport.close()
            return
        self._number, request = numbered
        self._sent = time.perf_counter()
        self._waiting = True
        self._transport.write(request)


async def drive(target: LoadTarget, source: Source, connections: int, seconds_max: float) -> float:
    """Send all requests of `source` over `connections`; return the seconds until the last reply.

    Raises Failure(UNAVAILABLE) if the server cannot be reached or does not answer within `seconds_max`.
    """
    started = time.perf_counter()

    async def keep_up() -> None:
        drained = False
        while not drained:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _LoadConnection(source), target.host, target.port, ssl=target.tls
            )
            await connection.closed
            drained = connection.drained

    try:
        async with asyncio.timeout(seconds_max):
            await asyncio.gather(*(keep_up() for _ in range(connections)))
    except TimeoutError as error:
        raise Failure(Code.UNAVAILABLE, f"replies are missing after {seconds_max:g} s") from error
    except OSError as error:
        raise Failure(Code.UNAVAILABLE, f"a connection failed under load: {error.strerror or error}") from error
    return time.perf_counter() - started


async def load(target: LoadTarget, connections: int, seconds: float, totals: LoadTotals) -> float:
    """Keep `connections` requests in flight for `seconds`; return the duration and raise as `drive` does."""
    source = _Repeated(target.request, time.perf_counter() + seconds, totals)
    return await drive(target, source, connections, seconds + ANSWER_S_MAX)
