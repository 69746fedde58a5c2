"""Pipelined requests in the fast path: replies in order, one at a time, and nothing that grows with a client's zeal."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.error_reply import JSON_HEADERS
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.infer_handler import HttpReply, InferHeaders
from millstream.gateway.connection.reply_order import ANSWERS_PER_TURN_MAX, PIPELINE_MAX, ReplyOrder
from tests.kit.servers import Front, fronting
from tests.kit.tls_wire import transport_of
from tests.kit.wire import Wire, post, request, serving, until

pytestmark = pytest.mark.anyio
PATH = "/v2/models/m/infer"
NOW = "/v2/models/now/infer"
BODY_BYTES_MAX = 1 << 24
SEGMENT_BYTES = 262_144  # what uvloop reads at once


@pytest.fixture(scope="module", autouse=True, params=["plain", "tls"])
def transport(request: pytest.FixtureRequest) -> Iterator[None]:
    with transport_of(request.param):
        yield


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def started(transport: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    async with fronting(tmp_path_factory.mktemp("home"), body_bytes_max=BODY_BYTES_MAX) as front:
        yield front


@pytest.fixture
async def front(started: Front) -> AsyncIterator[Front]:
    """The one server of this module; a test leaves it without connections, bytes and requests."""
    started.held.taken = 0
    yield started
    await started.served.settled(0)
    assert started.receive_budget.bytes == 0
    assert started.held.empty


async def test_a_flood_of_requests_that_are_answered_at_once_leaves_turns_to_others(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 MB of requests for an unknown model kept all other connections waiting for half a minute."""
    loop, count = asyncio.get_running_loop(), 20 * ANSWERS_PER_TURN_MAX
    turn, answered = 0, Counter[int]()
    answer = ReplyOrder._answer

    def tick() -> None:
        nonlocal turn
        turn += 1
        if answered.total() < count:
            loop.call_soon(tick)

    def counted(order: ReplyOrder, cycle: Any, reply: HttpReply) -> int:
        answered[turn] += 1
        return answer(order, cycle, reply)

    monkeypatch.setattr(ReplyOrder, "_answer", counted)
    tick()
    async with await Wire.connect(front.port) as wire:
        await wire.send(b"".join(post(NOW, b"%d" % at) for at in range(count)))
        for at in range(count):
            assert (await wire.reply()).body == b"%d" % at
    assert max(answered.values()) <= ANSWERS_PER_TURN_MAX


async def test_replies_come_in_order_and_one_request_at_a_time(front: Front) -> None:
    count = 100
    async with await Wire.connect(front.port) as wire:
        both = [post(PATH, b"%d" % i) + request("GET", "/v2/health/live") for i in range(count)]
        await wire.send(b"".join(both))
        for i in range(count):
            held = await front.held.next()
            assert (held.body, front.held.taken) == (b"%d" % i, i + 1)
            held.answer(b'"%d"' % i)
            assert (await wire.reply()).body == b'"%d"' % i
            assert (await wire.reply()).body == b'{"live":true}'


async def test_connections_do_not_wait_for_each_other(front: Front) -> None:
    wires = [await Wire.connect(front.port) for _ in range(8)]
    for i, wire in enumerate(wires):
        await wire.send(post(PATH, b"%d" % i))
    requests = [await front.held.next() for _ in wires]
    for held in reversed(requests):
        held.answer(bytes(held.body))
        wire = wires[int(held.body)]
        assert (await wire.reply()).body == held.body
    for wire in wires:
        wire.close()


async def test_many_that_are_answered_at_once_behind_one_that_is_not(front: Front) -> None:
    count = 3000
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH) + post(NOW, b"1") * count + post(PATH))
        (await front.held.next()).answer(b"0")
        assert (await wire.reply()).body == b"0"
        for _ in range(count):
            assert (await wire.reply()).body == b"1"
        (await front.held.next()).answer(b"2")
        assert (await wire.reply()).body == b"2"


async def test_what_waits_is_bounded_while_replies_go_out(front: Front) -> None:
    """To go on reading after each reply, as plain uvicorn does, would let the pipeline grow as fast as a client
    sends.
    """
    one = post(NOW, b"1")
    count = 5 * SEGMENT_BYTES // len(one)
    waiting: list[int] = []

    class Soon:
        """Answers in the next turn of the event loop."""

        def submit(self, *args: Any) -> Soon:
            waiting.append(len(protocols[0].pipeline))
            asyncio.get_running_loop().call_soon(args[4], HttpReply(200, JSON_HEADERS, b"1"))
            return self

        def cancel(self) -> None:
            return

    async with serving(
        None, fast_path_protocol(Soon(), BODY_BYTES_MAX, 100, ReceiveBudget(1 << 26), ReplyBudget(1 << 30))
    ) as served:
        async with await Wire.connect(served.port) as wire:
            await served.settled(1)
            protocols = list(served.connections)
            async with wire.sending(*[one * 100] * (count // 100)):
                for _ in range(count // 100 * 100):
                    assert (await wire.reply()).body == b"1"
        assert max(waiting) <= PIPELINE_MAX + SEGMENT_BYTES // len(one) + 1
        assert max(waiting) > PIPELINE_MAX, "the test sent too little to show anything"


async def test_who_sends_without_end_is_stopped(front: Front) -> None:
    async with await Wire.connect(front.port) as wire, wire.sending(*[post(PATH, b"x" * 500)] * 100_000):
        held = await front.held.next()
        await until(lambda: front.protocol.flow.read_paused)
        assert len(front.protocol.pipeline) < PIPELINE_MAX + SEGMENT_BYTES // 500
        assert front.receive_budget.bytes < SEGMENT_BYTES + PIPELINE_MAX * 500
    held.answer()
    while front.served.connections:  # what was in the pipeline is answered until the end of the input is read
        if not front.held.empty:
            (await front.held.next()).answer()
        await asyncio.sleep(0)
    while not front.held.empty:
        await front.held.next()


async def test_a_body_behind_a_request_in_flight_waits_outside(front: Front) -> None:
    body = b"x" * (8 << 20)
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH))
        first = await front.held.next()
        async with wire.sending(post(PATH, body)):
            await until(lambda: front.protocol.flow.read_paused)
            assert 65536 < front.receive_budget.bytes <= 65536 + SEGMENT_BYTES
            first.answer()
            second = await front.held.next()
        assert second.body == body
        assert front.receive_budget.bytes == 0
        second.answer()
        assert [(await wire.reply()).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("behind", [post(NOW, b"1"), request("GET", "/v2/health/live")])
async def test_a_reply_that_is_not_read_keeps_the_next_request_waiting(front: Front, behind: bytes) -> None:
    large = b"x" * (8 << 20)
    async with await Wire.connect(front.port, receive_bytes=65536) as wire:
        await wire.send(post(PATH) + post(PATH) + behind)
        (await front.held.next()).answer(large)
        protocol = front.protocol
        assert protocol.flow.write_paused
        assert protocol.flow.read_paused
        assert (front.held.taken, len(protocol.pipeline)) == (1, 2)
        assert len((await wire.reply()).body) == len(large)
        second = await front.held.next()
        assert not protocol.flow.write_paused
        second.answer()
        assert (await wire.reply()).body == b"{}"
        assert (await wire.reply()).status == 200


async def test_who_does_not_read_small_replies_is_stopped_too(front: Front) -> None:
    async with await Wire.connect(front.port, receive_bytes=4096) as wire:
        await front.served.settled(1)
        protocol = front.protocol
        async with wire.sending(*[post(NOW, b"x" * 5000)] * 20_000):
            await until(lambda: protocol.flow.write_paused)
            assert protocol.transport.get_write_buffer_size() < 4 * 65536
            assert len(protocol.pipeline) < PIPELINE_MAX + SEGMENT_BYTES // 5000
            assert front.held.taken < 20_000
        assert (await wire.reply()).status == 200


async def test_continue_is_said_when_it_is_the_requests_turn(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        head = request("POST", PATH, "Content-Length: 3", "Expect: 100-continue")
        await wire.send(head)
        assert (await wire.reply()).head == b"HTTP/1.1 100 Continue"
        await wire.send(b"abc" + head)
        first = await front.held.next()
        await until(lambda: len(front.protocol.pipeline) == 1)
        first.answer(b"1")
        assert (await wire.reply()).body == b"1"
        assert (await wire.reply()).status == 100
        await wire.send(b"def")
        second = await front.held.next()
        assert second.body == b"def"
        second.answer(b"2")
        assert (await wire.reply()).body == b"2"


async def test_an_idle_connection_keeps_nothing_of_its_last_request(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH, b"x" * 100_000))
        held = await front.held.next()
        kept = weakref.ref(held)
        held.answer()
        del held
        assert (await wire.reply()).status == 200
        assert kept() is None
        assert front.protocol.cycle.body == []


async def test_a_handler_that_answers_at_once_and_fails_answers_once() -> None:
    class Both:
        def submit(
            self, model: str, version: str | None, headers: InferHeaders, body: bytes | memoryview, done: Any, *_: Any
        ) -> Any:
            done(HttpReply(200, JSON_HEADERS, b"1"))
            raise ZeroDivisionError

    async with (
        serving(
            None, fast_path_protocol(Both(), BODY_BYTES_MAX, 100, ReceiveBudget(1 << 26), ReplyBudget(1 << 30))
        ) as served,
        await Wire.connect(served.port) as wire,
    ):
        await wire.send(post(PATH), post(PATH))
        assert [(await wire.reply()).body for _ in range(2)] == [b"1", b"1"]
