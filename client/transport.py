"""Sends the calls of procedures with httpx2: one transport blocks, the other awaits. Nothing else differs.

Proxy variables of the environment are ignored, and redirects are not followed: calls and keys go to the endpoint only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from millstream.client.address import SYSTEM_TRUST, ServerAddress, Trust, find_server
from millstream.client.call import NO_REPLY, Body, Call, Pause, Reply, Steps, T, Timeouts
from millstream.client.errors import Timeout
from millstream.client.faults import failure_from
from millstream.client.replies import failure_of
from millstream.client.retry import CONNECT_S_MAX, STALL_S_MAX, Budget, Retries, with_retries
from millstream.services.errors import Code, Failure, invalid
from millstream.services.version import VERSION

log = logging.getLogger("millstream.client")

CONNECTIONS_MAX = 100
KEEP_ALIVE_S = 60.0  # less than the server's MILLSTREAM_HTTP_KEEP_ALIVE_S, which would close a connection in use
REPLY_BYTES_MAX = 2 << 30


def announces() -> bool:
    """Return whether the caller sees INFO lines of the client."""
    return log.isEnabledFor(logging.INFO)


def _log(pause: Pause) -> None:
    if pause.why:
        log.info("%s", pause.why)


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a server. `trust`: which servers to trust over TLS."""

    url: str
    key: str | None = None
    trust: Trust = SYSTEM_TRUST
    attempts_max: int = 1

    def options(self) -> dict[str, Any]:
        """Return the arguments of an httpx2 client. Raises Failure(INVALID) for an unusable certificate."""
        headers = {"User-Agent": f"millstream/{VERSION}", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return {
            "base_url": self.url,
            "headers": headers,
            "verify": self._trusted(),
            "trust_env": False,
            "follow_redirects": False,
            "limits": httpx2.Limits(
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=CONNECTIONS_MAX,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
        }

    def _trusted(self) -> ssl.SSLContext | bool:
        if not self.url.startswith("https://"):
            return False  # no TLS connection is made: the system's certificates need not be read
        return True if self.trust == SYSTEM_TRUST else self.trust.context()

    def repeated(self, steps: Steps[T], budget: Budget) -> Steps[T]:
        return with_retries(steps, Retries(self.attempts_max, random.random), budget)


def connection_to(
    endpoint: str | ServerAddress | None, key: str | None, retries: int, ca_file: str | os.PathLike[str] | None
) -> Connection:
    """Return how to reach an endpoint; warns about an unsafe configuration. Raises Failure(INVALID)."""
    server = endpoint if isinstance(endpoint, ServerAddress) else find_server(endpoint, key)
    for warning in server.warnings:
        warnings.warn(warning, stacklevel=3)
    trust = server.trust if ca_file is None else replace(server.trust, ca_file=Path(ca_file), pinned=None)
    return Connection(server.url, server.key, trust, attempts_max=retries + 1)


class BlockingTransport:
    """Runs procedures in the calling thread. Threads may share one transport."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._http = httpx2.Client(**connection.options())

    def close(self) -> None:
        self._http.close()

    def run(self, steps: Steps[T], budget: Budget) -> T:
        """Run a procedure to its end, and return its result. Raises Failure."""
        steps = self._connection.repeated(steps, budget)
        try:
            step = next(steps)
            while True:
                reply = NO_REPLY
                if isinstance(step, Pause):
                    _log(step)
                    time.sleep(step.seconds)
                else:
                    try:
                        reply = self._send(step)
                    except Failure as failure:
                        step = steps.throw(failure)
                        continue
                step = steps.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    def _send(self, call: Call) -> Reply:
        _check_open(self._http)
        started = time.monotonic()
        content = call.content.chunks() if isinstance(call.content, Body) else call.content
        try:
            request = self._http.build_request(**_request(call), content=content)
            reply = self._http.send(request, stream=True)
            with contextlib.closing(reply):
                received = _Received(reply, call, started)
                for chunk in reply.iter_bytes():
                    received.add(chunk)
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise failure_from(error, self._connection.url, call) from error
        return received.reply()

    def lines(self, call: Call, timeout_s: float | None) -> Iterator[str]:
        """Yield the lines of a reply as they come. Raises Failure. `timeout_s`: longest silence of the server."""
        _check_open(self._http)
        call = _with_silence(call, timeout_s)
        try:
            request = self._http.build_request(**_request(call), content=_bytes(call))
            with contextlib.closing(self._http.send(request, stream=True)) as reply:
                if not reply.is_success:
                    reply.read()
                    raise _refusal(reply, call)
                yield from reply.iter_lines()
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise failure_from(error, self._connection.url, call) from error


class AwaitingTransport:
    """Runs procedures as coroutines of one event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._http = httpx2.AsyncClient(**connection.options())

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, steps: Steps[T], budget: Budget) -> T:
        """Run a procedure to its end, and return its result. Raises Failure."""
        steps = self._connection.repeated(steps, budget)
        try:
            step = next(steps)
            while True:
                reply = NO_REPLY
                if isinstance(step, Pause):
                    _log(step)
                    await asyncio.sleep(step.seconds)
                else:
                    try:
                        reply = await self._send(step)
                    except Failure as failure:
                        step = steps.throw(failure)
                        continue
                step = steps.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _send(self, call: Call) -> Reply:
        _check_open(self._http)
        started = time.monotonic()
        content = _awaiting(call.content.chunks()) if isinstance(call.content, Body) else call.content
        try:
            async with asyncio.timeout(_limits(call).total_s):
                request = self._http.build_request(**_request(call), content=content)
                reply = await self._http.send(request, stream=True)
                async with contextlib.aclosing(reply):
                    received = _Received(reply, call, started)
                    async for chunk in reply.aiter_bytes():
                        received.add(chunk)
        except TimeoutError as error:
            raise _late(self._connection.url, call) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise await asyncio.to_thread(failure_from, error, self._connection.url, call) from error
        return received.reply()

    async def lines(self, call: Call, timeout_s: float | None) -> AsyncIterator[str]:
        """Yield the lines of a reply as they come. Raises Failure. `timeout_s`: longest silence of the server."""
        _check_open(self._http)
        call = _with_silence(call, timeout_s)
        try:
            request = self._http.build_request(**_request(call), content=_bytes(call))
            async with contextlib.aclosing(await self._http.send(request, stream=True)) as reply:
                if not reply.is_success:
                    await reply.aread()
                    raise _refusal(reply, call)
                async for line in reply.aiter_lines():
                    yield line
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise await asyncio.to_thread(failure_from, error, self._connection.url, call) from error


def _bytes(call: Call) -> bytes:
    assert isinstance(call.content, bytes)
    return call.content


def _with_silence(call: Call, timeout_s: float | None) -> Call:
    """Return a call whose reply may take any time, while the server is silent no longer than this."""
    return replace(call, timeouts=Timeouts(None, timeout_s, STALL_S_MAX, CONNECT_S_MAX))


def _refusal(reply: httpx2.Response, call: Call) -> Failure:
    headers = {name.lower(): value for name, value in reply.headers.items()}
    failure = failure_of(Reply(reply.status_code, headers, bytearray(reply.content), str(reply.url)), call)
    assert failure is not None, "its status is one of a failure"
    return failure


class _Received:
    """A reply while it arrives. Raises Timeout or Failure(TOO_LARGE) when a chunk passes a limit."""

    def __init__(self, reply: httpx2.Response, call: Call, started_s: float) -> None:
        self._reply = reply
        self._call = call
        self._deadline = math.inf if (total_s := _limits(call).total_s) is None else started_s + total_s
        self._content = bytearray()

    def add(self, chunk: bytes) -> None:
        self._content += chunk
        if len(self._content) > REPLY_BYTES_MAX:
            raise Failure(Code.TOO_LARGE, f"{self._reply.url}: the reply is larger than {REPLY_BYTES_MAX} bytes")
        if time.monotonic() > self._deadline:
            raise _late(str(self._reply.url), self._call)

    def reply(self) -> Reply:
        headers = {name.lower(): value for name, value in self._reply.headers.items()}
        return Reply(self._reply.status_code, headers, self._content, str(self._reply.url))


def _check_open(http: httpx2.Client | httpx2.AsyncClient) -> None:
    if http.is_closed:
        raise invalid("the client is closed: make another one, or call it within its `with` block")


def _limits(call: Call) -> Timeouts:
    assert call.timeouts is not None, "with_retries sets them"
    return call.timeouts


def _late(url: str, call: Call) -> Timeout:
    return Timeout(
        f"{url}: the reply to {call.method} {call.path} was not complete after {_limits(call).total_s:.3g} s"
    )


def _request(call: Call) -> dict[str, Any]:
    """Return the arguments of `build_request`, without the content."""
    limits = _limits(call)
    headers = dict(call.headers)
    if isinstance(call.content, Body):
        headers["Content-Length"] = str(call.content.size_bytes)
    timeout = httpx2.Timeout(connect=limits.connect_s, read=limits.read_s, write=limits.write_s, pool=limits.total_s)
    return {
        "method": call.method,
        "url": call.path,
        "params": dict(call.query) or None,
        "headers": headers,
        "timeout": timeout,
    }


async def _awaiting(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
