"""Large replies of v2 REST are written beside the event loop, within the reply budget, and each is given once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from millstream.gateway.connection.budgets import ReplyBudget, ReplyPermit
from millstream.gateway.connection.infer_handler import HttpReply
from millstream.gateway.tensors.outputs import Column, Outputs
from millstream.gateway.v2.options import Options
from millstream.gateway.v2.responder import RestRequest, RestResponder, V2Encoder
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec

pytestmark = pytest.mark.anyio
COLUMNS = 100_000
SIGNATURE = Signature(inputs=(), outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, -1)),), batching=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Watched(V2Encoder):
    """Notes in which threads it wrote."""

    def __init__(self) -> None:
        super().__init__("m", 1, SIGNATURE)
        self.threads: set[int] = set()

    def encode(self, options: Options, reply: Sequence[Any]) -> tuple[bytes, int | None]:
        self.threads.add(threading.get_ident())
        return super().encode(options, reply)


class Bench:
    """Requests of one row each, and what they were answered."""

    def __init__(self, bytes_max: int = 1 << 30) -> None:
        self.reply_budget = ReplyBudget(bytes_max)
        self.encoder = Watched()
        self.responder = RestResponder(self.encoder, self.reply_budget)
        self.answers: dict[int, list[HttpReply]] = {}

    def request(self, number: int, *, binary: bool = False, accept_encoding: bytes | None = None) -> RestRequest:
        made = RestRequest((), 1, 0, 0.0, 1.0, self.responder)
        made.options = Options(1, id=str(number), binary_default=binary)
        made.accept_encoding = accept_encoding
        made.done_with = self.answers.setdefault(number, []).append
        return made

    def answer(self, *requests: RestRequest) -> np.ndarray[Any, Any]:
        """Outputs come, and their memory is used for something else as soon as they were handed on."""
        array = np.random.default_rng(2).random((len(requests), COLUMNS), np.float32)
        copy = array.copy()
        self.responder.answer(requests, Outputs([Column("FP32", (COLUMNS,), array)], batching=True))
        array[:] = 0
        return copy

    async def answered(self) -> None:
        async with asyncio.timeout(30):
            while self.responder._tasks:
                await asyncio.sleep(0)
        assert self.reply_budget.bytes == 0
        assert all(len(answers) == 1 for answers in self.answers.values())


async def test_text_is_written_in_a_thread_from_a_copy() -> None:
    bench = Bench()
    sent = bench.answer(bench.request(0), bench.request(1))
    assert bench.reply_budget.bytes == sent.nbytes
    assert bench.answers == {0: [], 1: []}
    await bench.answered()
    assert threading.get_ident() not in bench.encoder.threads
    plain = Watched()
    for number in (0, 1):
        outputs = Outputs([Column("FP32", (COLUMNS,), sent[number : number + 1])], batching=True).replies([1])[0]
        assert bench.answers[number][0].body == plain.encode(Options(1, id=str(number)), outputs)[0]


async def test_raw_bytes_are_one_copy_and_written_at_once() -> None:
    bench = Bench()
    sent = bench.answer(bench.request(0, binary=True))
    assert bench.answers[0][0].body.endswith(sent.tobytes())
    await bench.answered()


async def test_what_is_compressed_counts_too() -> None:
    bench = Bench()
    bench.answer(bench.request(0, accept_encoding=b"gzip"))
    await bench.answered()
    assert (b"content-encoding", b"gzip") in bench.answers[0][0].headers.pairs


@pytest.mark.parametrize("binary", [True, False])
async def test_replies_without_room_are_refused(binary: bool) -> None:
    bench = Bench(bytes_max=COLUMNS * 4 + 1000)
    held = ReplyPermit(bench.reply_budget)
    held.take(2000)
    bench.responder.answer_one(bench.request(0, binary=binary), large_reply())
    assert [reply.status for reply in bench.answers[0]] == [503]
    held.release()
    bench.responder.answer_one(bench.request(1, binary=binary), large_reply())
    await bench.answered()
    assert [reply.status for reply in bench.answers[1]] == [200]


def large_reply() -> Sequence[Any]:
    return Outputs([Column("FP32", (COLUMNS,), np.ones((1, COLUMNS), np.float32))], batching=True).replies([1])[0]


def test_one_reply_alone_may_take_more_than_the_budget_and_small_ones_always_go() -> None:
    reply_budget = ReplyBudget(1 << 20)
    first, second, small = ReplyPermit(reply_budget), ReplyPermit(reply_budget), ReplyPermit(reply_budget)
    first.take(1 << 30)
    with pytest.raises(Failure) as caught:
        second.take(1 << 17)
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.retry_after_s
    small.take(1000)
    first.release()
    first.release()
    assert reply_budget.bytes == 1000
    small.resize(10)
    assert reply_budget.bytes == 10
