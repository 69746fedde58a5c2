"""Load on an endpoint: connections that send the same request again as soon as it is answered.

A protocol over httptools, not an HTTP client library: what is measured should be the server.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from services.errors import Code, Failure

ANSWER_S_MAX = 60.0


@dataclass(slots=True)
class Tally:
    """What happened so far: seconds of each answered request, in order of their answers, and answers by status."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a load goes, and the bytes of one request."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    request: bytes

    @classmethod
    def of(cls, url: str, path: str, body: bytes, header_bytes: int | None) -> Target:
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


class _Connection(asyncio.Protocol):
    def __init__(self, target: Target, tally: Tally, until: float) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._target = target
        self._tally = tally
        self._until = until
        self._sent = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self._tally.seconds.append(now - self._sent)
        self._tally.statuses[self._parser.get_status_code()] += 1
        assert self._transport is not None
        if now >= self._until or not self._parser.should_keep_alive():
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        self._sent = time.perf_counter()
        self._transport.write(self._target.request)


async def load(target: Target, connections: int, seconds: float, tally: Tally) -> float:
    """Keep `connections` requests on their way for `seconds`; returns the seconds it took, last answers included.

    Raises Failure(UNAVAILABLE) if the endpoint cannot be reached or stops answering.
    """
    started = time.perf_counter()
    until = started + seconds

    async def keep_up() -> None:
        while time.perf_counter() < until:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(target, tally, until), target.host, target.port, ssl=target.tls
            )
            await connection.closed

    try:
        async with asyncio.timeout(seconds + ANSWER_S_MAX):
            await asyncio.gather(*(keep_up() for _ in range(connections)))
    except TimeoutError as error:
        raise Failure(Code.UNAVAILABLE, f"answers are missing {ANSWER_S_MAX:g} s after the end of the load") from error
    except OSError as error:
        raise Failure(Code.UNAVAILABLE, f"a connection failed under load: {error.strerror or error}") from error
    return time.perf_counter() - started
