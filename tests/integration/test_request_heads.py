"""Heads that RFC 9112 has a server refuse: 400 and a closed connection, before any route or model hears of them.

Each is sent to the fast path's own path, to a path of the application, and to a server without the fast path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.gateway.connection.request_head import PathCache, read_head
from tests.kit.application import Application
from tests.kit.asgi_protocol import asgi_protocol
from tests.kit.handlers import Echo
from tests.kit.wire import Wire, serving

pytestmark = pytest.mark.anyio
BODY_BYTES_MAX = 65536
INFER = "/v2/models/m/infer"
PATHS = {"infer": f"POST {INFER}", "application": "GET /v2/health/live", "repository": "POST /v2/repository/index"}
BODY = b"{}"
Ports = dict[str, int]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def ports(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ports]:
    application = Application(tmp_path_factory.mktemp("home"), request_bytes_max=BODY_BYTES_MAX, allowed_hosts="*")
    echo = Echo()
    app = build_app(dataclasses.replace(application.app.state.deps, infer=echo))
    context = ConnectionContext(browser_guard=application.browser_guard)
    lane = fast_path_protocol(echo, BODY_BYTES_MAX, 100, ReceiveBudget(1 << 24), ReplyBudget(1 << 30), context=context)
    async with serving(app, lane) as fast, serving(app, asgi_protocol(Drain(), 100)) as plain:
        yield {"fast path": fast.port, "plain": plain.port}


def head(start: str, *lines: bytes, version: str = "HTTP/1.1") -> bytes:
    return b"\r\n".join([f"{start} {version}".rstrip().encode(), *lines, b"", b""])


async def said(port: int, *segments: bytes) -> bytes:
    """All that the server says until it closes; a request that it would answer is sent last."""
    async with await Wire.connect(port) as wire:
        try:
            await wire.send(*segments)
            await wire.send(head("GET /v2/health/live", b"Host: x", b"Connection: close"))
        except OSError:
            pass  # it has closed already
        return await wire.rest()


def statuses(text: bytes) -> list[int]:
    return [int(part[:3]) for part in text.split(b"HTTP/1.1 ")[1:]]


LENGTH = b"Content-Length: 2"
REFUSED: dict[str, tuple[tuple[bytes, ...], str]] = {
    "no host": ((LENGTH,), "HTTP/1.1"),
    "two hosts": ((b"Host: a", b"Host: a", LENGTH), "HTTP/1.1"),
    "two hosts, 1.0": ((b"Host: a", b"host: b", LENGTH), "HTTP/1.0"),
    "a host with a space": ((b"Host: a b", LENGTH), "HTTP/1.1"),
    "a host with a path": ((b"Host: a/b", LENGTH), "HTTP/1.1"),
    "a host with a user": ((b"Host: u@a", LENGTH), "HTTP/1.1"),
    "a host that is no address": ((b"Host: [::1", LENGTH), "HTTP/1.1"),
    "a host that is no text": ((b"Host: \xff\xfe", LENGTH), "HTTP/1.1"),
    "a port that is none": ((b"Host: a:b", LENGTH), "HTTP/1.1"),
    "HTTP/2.0": ((b"Host: a", LENGTH), "HTTP/2.0"),
    "HTTP/3.0": ((b"Host: a", LENGTH), "HTTP/3.0"),
    "HTTP/1.2": ((b"Host: a", LENGTH), "HTTP/1.2"),
    "HTTP/0.9": ((b"Host: a", LENGTH), "HTTP/0.9"),
    "HTTP/11": ((b"Host: a", LENGTH), "HTTP/11"),
    "no version": ((b"Host: a", LENGTH), ""),
    "a length and chunks": ((b"Host: a", LENGTH, b"Transfer-Encoding: chunked"), "HTTP/1.1"),
    "chunks and a length": ((b"Host: a", b"Transfer-Encoding: chunked", LENGTH), "HTTP/1.1"),
    "two lengths": ((b"Host: a", LENGTH, b"Content-Length: 3"), "HTTP/1.1"),
    "the same length twice": ((b"Host: a", LENGTH, LENGTH), "HTTP/1.1"),
    "a list of lengths": ((b"Host: a", b"Content-Length: 2, 2"), "HTTP/1.1"),
    "a length with a sign": ((b"Host: a", b"Content-Length: +2"), "HTTP/1.1"),
    "a negative length": ((b"Host: a", b"Content-Length: -2"), "HTTP/1.1"),
    "a length in hex": ((b"Host: a", b"Content-Length: 0x2"), "HTTP/1.1"),
    "a length beyond 64 bits": ((b"Host: a", b"Content-Length: 18446744073709551616"), "HTTP/1.1"),
    "an empty length": ((b"Host: a", b"Content-Length:"), "HTTP/1.1"),
    "chunked twice over": ((b"Host: a", b"Transfer-Encoding: chunked, gzip"), "HTTP/1.1"),
    "space before a colon": ((b"Host : a", LENGTH), "HTTP/1.1"),
    "a folded header": ((b"Host: a", b"X-A: 1", b" 2", LENGTH), "HTTP/1.1"),
    "a folded length": ((b"Host: a", b"Content-Length:", b" 2"), "HTTP/1.1"),
    "NUL in a header": ((b"Host: a", b"X-A: \0", LENGTH), "HTTP/1.1"),
    "NUL in a name": ((b"Host: a", b"X-\0A: 1", LENGTH), "HTTP/1.1"),
    "a bare CR": ((b"Host: a", b"X-A: 1\rX-B: 2", LENGTH), "HTTP/1.1"),
    "no colon": ((b"Host: a", b"nothing", LENGTH), "HTTP/1.1"),
    "no name": ((b"Host: a", b": nothing", LENGTH), "HTTP/1.1"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("server", ["fast path", "plain"])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_head_that_must_be_refused(ports: Ports, case: str, server: str, path: str) -> None:
    lines, version = REFUSED[case]
    for _ in range(3):  # the fast path remembers heads that it saw twice
        answer = await said(ports[server], head(PATHS[path], *lines, version=version), BODY)
        assert statuses(answer) == [400], answer
        assert b"connection: close" in answer.lower()
        if server == "fast path":
            assert b'{"error":' in answer


@pytest.mark.parametrize("server", ["fast path", "plain"])
@pytest.mark.parametrize("start", PATHS.values())
@pytest.mark.parametrize(
    ("host", "version"),
    [
        (b"Host: a", "HTTP/1.1"),
        (b"Host:", "HTTP/1.1"),
        (b"Host: example.org:8000", "HTTP/1.1"),
        (b"hOST: [::1]:80", "HTTP/1.1"),
        (b"Host: my_service.namespace-1:80", "HTTP/1.1"),
        (b"X-Nothing: 1", "HTTP/1.0"),
        (b"Host: a", "HTTP/1.0"),
    ],
)
async def test_a_head_that_is_right(ports: Ports, server: str, start: str, host: bytes, version: str) -> None:
    async with await Wire.connect(ports[server]) as wire:
        await wire.send(head(start, host, LENGTH, b"Connection: close", version=version) + BODY)
        assert statuses(await wire.rest())[0] in {200, 503}


CHUNKS = {
    "no size": b"\r\n\r\n",
    "not a number": b"xyz\r\n{}\r\n0\r\n\r\n",
    "a negative size": b"-2\r\n{}\r\n0\r\n\r\n",
    "a size with a prefix": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "more than it says": b"1\r\n{}\r\n0\r\n\r\n",
    "NUL in the size": b"2\0\r\n{}\r\n0\r\n\r\n",
    "a bare LF after the size": b"2\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("server", ["fast path", "plain"])
@pytest.mark.parametrize("case", CHUNKS)
async def test_chunks_that_are_none(ports: Ports, server: str, case: str) -> None:
    start = head(PATHS["infer"], b"Host: a", b"Transfer-Encoding: chunked")
    answer = await said(ports[server], start, CHUNKS[case])
    assert statuses(answer) == [400], answer


@pytest.mark.parametrize("server", ["fast path", "plain"])
async def test_a_body_without_end_smuggles_no_request(ports: Ports, server: str) -> None:
    inner = head("GET /v2", b"Host: a")
    smuggled = (
        head(PATHS["infer"], b"Host: a", b"Content-Length: %d" % len(inner), b"Transfer-Encoding: identity") + inner
    )
    assert statuses(await said(ports[server], smuggled))[0] == 400


def test_no_head_that_is_refused_is_remembered() -> None:
    for lines, version in REFUSED.values():
        assert (
            read_head(head(PATHS["infer"], *lines, version=version), PathCache(), BODY_BYTES_MAX, BrowserGuard())
            is None
        )
