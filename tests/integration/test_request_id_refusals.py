"""A request that the connection refuses itself has an id, too: the sent one, as far as the head was received."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.services.process.request_id import REQUEST_ID
from tests.kit.servers import Front, fronting
from tests.kit.wire import Wire, chunked, post, request, serving, until

pytestmark = pytest.mark.anyio
PATH = "/v2/models/m/infer"
MINE = "X-Request-Id: mine"
BODY_BYTES_MAX = 1024
MADE = re.compile(rb"\r\nx-request-id: [0-9a-f]{12}-[0-9a-f]+\r\n")
LIVE = "/v2/health/live"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


async def reply_to(front: Front, sent: bytes) -> tuple[bytes, bytes]:
    """Return status and id of the reply to a request that ends its connection."""
    async with await Wire.connect(front.port) as wire:
        await wire.send(sent)
        reply = await wire.reply()
        assert reply.headers[b"connection"] == b"close"
        return b"%d" % reply.status, reply.headers[b"x-request-id"]


@pytest.fixture(params=[True, False], ids=["fast path", "asgi"])
async def either(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Front]:
    async with fronting(tmp_path, fast=request.param, body_bytes_max=BODY_BYTES_MAX) as front:
        yield front


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with fronting(tmp_path, body_bytes_max=BODY_BYTES_MAX) as front:
        yield front


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: a b\r\nX-Request-Id: two words\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_a_new_id(either: Front, sent: bytes) -> None:
    status, made = await reply_to(either, sent)
    assert status == b"400"
    assert MADE.fullmatch(b"\r\nx-request-id: %b\r\n" % made)


async def test_a_refused_head_has_its_id(either: Front) -> None:
    head = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: a b\r\nX-Request-Id: mine\r\n\r\n"
    assert await reply_to(either, head) == (b"400", b"mine")


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (b"413", post(PATH, b"x" * (BODY_BYTES_MAX + 1), MINE, "Connection: close")),
        (b"413", chunked(PATH, [b"x" * 600] * 2, MINE, "Connection: close")),
        (b"400", chunked(PATH, [b"x"], MINE, end=b"no chunk\r\n")),
        (b"400", request("GET", LIVE, MINE, "X-Big: " + "x" * 200_000)[:-2]),
        (b"405", request("CONNECT", "/v2", MINE)),
    ],
    ids=["length", "chunks", "no chunk", "large head", "connect"],
)
async def test_a_refusal_of_the_fast_path_has_the_id(front: Front, status: bytes, sent: bytes) -> None:
    assert await reply_to(front, sent) == (status, b"mine")


@pytest.mark.parametrize(
    "sent",
    [
        request("POST", PATH, MINE, "X-Other: 1")[:-2],
        post(PATH, b"abc", MINE)[:-1],
        post("/v2/models/m/generate", b"abc", MINE)[:-1],
    ],
    ids=["head", "body", "body for a route"],
)
async def test_a_request_that_came_too_slowly_has_its_id(tmp_path: Path, sent: bytes) -> None:
    async with fronting(tmp_path, client_stall_s_max=2) as front:  # longer than a busy machine takes to read it
        assert await reply_to(front, sent) == (b"408", b"mine")
        await until(lambda: not front.served.server.server_state.tasks)


async def test_an_id_is_not_kept_for_the_next_request(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        ids = []
        for sent in (post("/v2/models/now/infer", b"1", MINE), *[post("/v2/models/now/infer", b"1")] * 4):
            await wire.send(sent)
            ids.append((await wire.reply()).headers[b"x-request-id"])
        assert ids[0] == b"mine"
        assert len(set(ids)) == 5
        await wire.send(b"garbage\r\n\r\n")
        assert (await wire.reply()).headers[b"x-request-id"] not in ids


async def test_pipelined_requests_have_each_their_own(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        sent = [post("/v2/models/now/infer", b"1", f"X-Request-Id: r{i}") for i in range(20)]
        sent[10] = request("GET", LIVE, "X-Request-Id: r10")
        await wire.send(b"".join(sent))
        assert [(await wire.reply()).headers[b"x-request-id"] for _ in sent] == [b"r%d" % i for i in range(20)]


async def test_one_connection_too_many_gets_a_new_id(tmp_path: Path) -> None:
    async with fronting(tmp_path, connections_max=1) as front, await Wire.connect(front.port) as first:
        await first.send(request("GET", LIVE))
        assert (await first.reply()).status == 200
        async with await Wire.connect(front.port) as second:
            refused = await second.rest()
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in refused


class _Broken:
    def submit(
        self, model: str, version: str | None, headers: InferHeaders, body: bytes | memoryview, done: Any, *_: Any
    ) -> Any:
        raise ZeroDivisionError


async def test_the_log_of_a_defect_has_the_id(caplog: pytest.LogCaptureFixture) -> None:
    ids = []

    class Handler(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            ids.append(REQUEST_ID.get())

    protocol = fast_path_protocol(_Broken(), BODY_BYTES_MAX, 9, ReceiveBudget(1 << 26), ReplyBudget(1 << 30))
    log = logging.getLogger("millstream.infer")
    log.addHandler(handler := Handler())
    try:
        async with serving(None, protocol) as served, await Wire.connect(served.port) as wire:
            await wire.send(post(PATH, b"{}", MINE))
            assert (await wire.reply()).status == 500
            await served.settled(1)
    finally:
        log.removeHandler(handler)
    assert ids == ["mine"]
    assert "internal error" in caplog.text
    assert REQUEST_ID.get() == ""
