"""Large binary bodies on the fast path: read into shared memory, unchanged, and kept no longer than their request."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.gateway.connection.request_reader import RECEIVED_BYTES_MIN, BodyReceiver
from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import ALIGN_BYTES
from millstream.services.segments.shared_buffers import SharedBuffer, SharedBuffers, place_of
from tests.kit.handlers import Echo
from tests.kit.servers import Front, fronting
from tests.kit.wire import Wire, chunked, post, request, serving, until

pytestmark = pytest.mark.anyio
PATH = "/v2/models/m/infer"
BODY = random.Random(7).randbytes(600_000)
JSON_BYTES = 77
HEADER = f"Inference-Header-Content-Length: {JSON_BYTES}"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def segments() -> Iterator[SegmentPool]:
    folder = Path(f"/dev/shm/millstream-bodies-{os.getpid()}")
    folder.mkdir()
    pool = SegmentPool(folder, "a", 64 << 20)
    yield pool
    pool.close()
    shutil.rmtree(folder)


@asynccontextmanager
async def receiving(
    home: Path, segments: SegmentPool, bytes_max: int = 32 << 20, **limits: Any
) -> AsyncIterator[Front]:
    """Yield a server that receives large bodies into `segments`; at the end, assert that all of it is free."""
    async with fronting(home, shared_buffers=SharedBuffers(segments, bytes_max), **limits) as front:
        yield front
    await until(lambda: segments.in_use_bytes == 0)


def is_shared(body: object) -> bool:
    obj: object = body.obj if isinstance(body, memoryview) else None
    return isinstance(obj, SharedBuffer)


async def test_a_large_body_is_where_a_worker_can_read_it(tmp_path: Path, segments: SegmentPool) -> None:
    async with receiving(tmp_path, segments) as front, await Wire.connect(front.port) as wire:
        for _ in range(3):
            await wire.send(post(PATH, BODY, HEADER))
            held = await front.held.next()
            assert is_shared(held.body)
            assert held.body == BODY
            place = place_of(held.body[JSON_BYTES:])
            assert place is not None
            assert place.shm.offset % ALIGN_BYTES == 0
            assert bytes(segments.view(place.shm)) == BODY[JSON_BYTES:]
            held.answer()
            assert (await wire.reply()).status == 200
            del held, place
            await until(lambda: segments.in_use_bytes == 0)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (BODY, []),  # JSON is parsed, so it is not for workers
        (BODY[: RECEIVED_BYTES_MIN // 2], [HEADER]),
        (BODY, [HEADER, "Content-Encoding: gzip"]),
        (BODY, ["Inference-Header-Content-Length: -1"]),
        (BODY, ["Inference-Header-Content-Length: x"]),
    ],
)
async def test_other_bodies_are_not_received_there(
    tmp_path: Path, segments: SegmentPool, body: bytes, headers: list[str]
) -> None:
    async with receiving(tmp_path, segments) as front, await Wire.connect(front.port) as wire:
        await wire.send(post(PATH, BODY, HEADER))
        (await front.held.next()).answer()
        await wire.reply()
        await wire.send(post(PATH, body, *headers))
        held = await front.held.next()
        assert type(held.body) is bytes
        assert held.body == body
        held.answer()
        await wire.reply()


async def test_without_room_a_body_is_received_elsewhere(tmp_path: Path, segments: SegmentPool) -> None:
    async with (
        receiving(tmp_path, segments, bytes_max=len(BODY) + ALIGN_BYTES) as front,
        await Wire.connect(front.port) as first,
        await Wire.connect(front.port) as second,
    ):
        await first.send(post(PATH, BODY, HEADER))
        held = await front.held.next()
        assert is_shared(held.body)
        await second.send(post(PATH, BODY, HEADER))
        other = await front.held.next()
        assert other.body == BODY
        assert not is_shared(other.body)
        held.answer()
        other.answer()
        await first.reply()
        await second.reply()
        del held


@pytest.mark.parametrize("seed", range(12))
async def test_requests_in_any_pieces_are_read_as_they_were_sent(segments: SegmentPool, seed: int) -> None:
    """Large and small, binary, JSON and chunked, of routes, pipelined, in random pieces over one connection."""
    draw = random.Random(seed)
    context = ConnectionContext(shared_buffers=SharedBuffers(segments, 32 << 20))
    protocol = fast_path_protocol(Echo(), 1 << 24, 100, ReceiveBudget(1 << 26), ReplyBudget(1 << 30), context=context)

    async def no_route(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    sent: list[bytes] = []
    wanted: list[str | None] = []
    for _ in range(30):
        body = BODY[: draw.choice([0, 100, 5_000, RECEIVED_BYTES_MIN, 40_000, 300_000])]
        kind = draw.randrange(5)
        if kind == 0:
            sent.append(request("GET", "/nothing"))
            wanted.append(None)
            continue
        headers = [HEADER] if kind < 4 else []
        sent.append(chunked(PATH, [body or b"-"], *headers) if kind == 3 else post(PATH, body, *headers))
        wanted.append(hashlib.sha256((body or b"-") if kind == 3 else body).hexdigest())
    stream = b"".join(sent)
    pieces, at = [], 0
    while at < len(stream):
        length = draw.choice([1, 50, 4096, 4097, 70_000, 1 << 20])
        pieces.append(stream[at : at + length])
        at += length
    async with (
        serving(no_route, protocol) as served,
        await Wire.connect(served.port) as wire,
        wire.sending(*pieces),
    ):
        for digest in wanted:
            reply = await wire.reply()
            assert reply.status == (204 if digest is None else 200)
            assert digest is None or orjson.loads(reply.body)[4] == digest
    await until(lambda: segments.in_use_bytes == 0)


@pytest.mark.parametrize("end", ["close", "half-close"])
async def test_a_client_that_leaves_frees_its_body(tmp_path: Path, segments: SegmentPool, end: str) -> None:
    gc.collect()
    gc.disable()  # nothing waits for it
    try:
        async with receiving(tmp_path, segments) as front:
            wire = await Wire.connect(front.port)
            await wire.send(post(PATH, BODY, HEADER)[:400_000])
            await until(lambda: segments.in_use_bytes > 0)
            if end == "close":
                wire.close()
            else:
                wire.half_close()
                await wire.rest()
            await front.served.settled(0)
            await until(lambda: segments.in_use_bytes == 0)
            wire.close()
    finally:
        gc.enable()


async def test_a_client_that_leaves_while_its_request_waits_frees_its_body(
    tmp_path: Path, segments: SegmentPool
) -> None:
    async with receiving(tmp_path, segments) as front:
        async with await Wire.connect(front.port) as wire:
            await wire.send(post(PATH, BODY, HEADER))
            held = await front.held.next()
        await asyncio.wait_for(held.cancelled.wait(), 120)
        assert is_shared(held.body)
        del held


async def test_a_body_that_is_refused_half_way_is_dropped_and_the_next_request_is_answered(
    tmp_path: Path, segments: SegmentPool
) -> None:
    async with (
        receiving(tmp_path, segments, inbound_bytes_max=500_000) as front,
        await Wire.connect(front.port) as wire,
    ):
        message = post(PATH, BODY, HEADER)
        await wire.send(message[:300_000])
        await until(lambda: segments.in_use_bytes > 0)
        await wire.send(message[300_000:-1000])
        assert (await wire.reply()).status == 503
        await until(lambda: segments.in_use_bytes == 0)
        await wire.send(message[-1000:], post(PATH, BODY[:400_000], HEADER))
        held = await front.held.next()
        assert held.body == BODY[:400_000]
        held.answer()
        del held
        assert (await wire.reply()).status == 200


async def test_a_body_that_comes_too_slowly_is_refused(tmp_path: Path, segments: SegmentPool) -> None:
    async with (
        receiving(tmp_path, segments, client_stall_s_max=0.2) as front,
        await Wire.connect(front.port) as wire,
    ):
        await wire.send(post(PATH, BODY, HEADER)[:50_000])
        assert (await wire.reply()).status == 408
        await until(lambda: segments.in_use_bytes == 0)
        assert await wire.rest() == b""
    assert front.held.empty


async def test_small_requests_give_the_transport_back(tmp_path: Path, segments: SegmentPool) -> None:
    async with receiving(tmp_path, segments) as front, await Wire.connect(front.port) as wire:
        for body, headers, reader in ((BODY, [HEADER], BodyReceiver), (b"{}", [], type(None))):
            await wire.send(post(PATH, body, *headers))
            (await front.held.next()).answer()
            await wire.reply()
            protocol = front.protocol
            receives = isinstance(protocol.transport.get_protocol(), BodyReceiver)
            assert receives is (reader is BodyReceiver)
