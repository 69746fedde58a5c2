"""Load on an endpoint: connections that send their next request as soon as the last one is answered.

A protocol over httptools, not an HTTP client library: what is measured should be the server.
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

from millstream.services.errors import Code, Failure

ANSWER_S_MAX = 60.0


@dataclass(slots=True)
class LoadTotals:
    """What happened so far: seconds of each answered request, in order of their answers, and answers by status."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where a load goes, and the bytes of one request (`of` with another body makes another)."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    request: bytes

    @classmethod
    def of(cls, url: str, path: str, body: bytes, header_bytes: int | None) -> LoadTarget:
        """A POST of `body` to `path` below `url`. `header_bytes`: as in `Call`."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        head = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        head.append(f"Content-Length: {len(body)}")
        if header_bytes is None:
            head.append("Content-Type: application/json")
        else:
            head += ["Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {header_bytes}"]
        request = "\r\n".join([*head, "", ""]).encode() + body
        port = parts.port or (443 if secure else 80)
        return cls(parts.hostname or "", port, ssl.create_default_context() if secure else None, request)


class Source(Protocol):
    """What connections send, and who is told what came of it."""

    def take(self) -> tuple[int, bytes] | None:
        """The next request and its number; None: there is no more."""

    def answered(self, number: int, status: int, body: bytes, seconds: float) -> None: ...


class _Repeated:
    """One request again and again, for a while."""

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
        except httptools.HttpParserCallbackError as error:  # what the source raised
            self._give_up(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._give_up(Failure(Code.UNAVAILABLE, f"the endpoint does not speak HTTP: {error}"))

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
            self.closed.set_exception(Failure(Code.UNAVAILABLE, "the endpoint closed a connection without an answer"))
        else:
            self.closed.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        taken = self._source.take()
        if taken is None:
            self.drained = True
            self._transport.close()
            return
        self._number, request = taken
        self._sent = time.perf_counter()
        self._waiting = True
        self._transport.write(request)


async def drive(target: LoadTarget, source: Source, connections: int, seconds_max: float) -> float:
    """Send what `source` has over `connections`; returns the seconds it took, last answers included.

    Raises Failure(UNAVAILABLE) if the endpoint cannot be reached or does not answer within `seconds_max`.
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
        raise Failure(Code.UNAVAILABLE, f"answers are missing after {seconds_max:g} s") from error
    except OSError as error:
        raise Failure(Code.UNAVAILABLE, f"a connection failed under load: {error.strerror or error}") from error
    return time.perf_counter() - started


async def load(target: LoadTarget, connections: int, seconds: float, totals: LoadTotals) -> float:
    """Keep `connections` requests on their way for `seconds`; as `drive`."""
    source = _Repeated(target.request, time.perf_counter() + seconds, totals)
    return await drive(target, source, connections, seconds + ANSWER_S_MAX)
