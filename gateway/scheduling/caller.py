"""caller: requests of protocols whose adapters are coroutines. One await from tensors to what an adapter makes of the reply.

find ─> Route ─> (the adapter builds its inputs with route.plans) ─> call ─> lane ……… read(reply) ─> what it returned
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

from millstream.gateway.connection.error_reply import unexpected
from millstream.gateway.connection.reply_budget import PERMIT, ReplyPermit
from millstream.gateway.scheduling.request import Request
from millstream.gateway.scheduling.router import ModelRoute
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import Outputs, Reply, size_of
from millstream.services.errors import Failure

T = TypeVar("T")


class RequestOptions(NamedTuple):
    """What a caller asks for besides an answer. `timeout_s` None: the version's own. `priority`: as in Request."""

    timeout_s: float | None = None
    priority: int = 0


DEFAULT_OPTIONS = RequestOptions()


class _Call(Request, Generic[T]):
    read: Callable[[Reply], T]
    permit: ReplyPermit | None
    answered: asyncio.Future[T]

    def settle(self, reply: Reply) -> None:
        """Tensors of a reply are views that live only now: what is needed of them is read at once."""
        if self.answered.done():
            return
        try:
            if self.permit is not None:
                self.permit.take(size_of(reply))
            self.answered.set_result(self.read(reply))
        except Failure as failure:
            self.answered.set_exception(failure)
        except Exception as error:
            self.answered.set_exception(unexpected("a reply could not be written", error))


class _Responder:
    """For all calls: each knows its own future."""

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        for request, reply in zip(requests, outputs.replies([request.rows for request in requests]), strict=True):
            cast("_Call[Any]", request).settle(reply)

    def answer_one(self, request: Request, reply: Reply) -> None:
        cast("_Call[Any]", request).settle(reply)

    def fail(self, request: Request, failure: Failure) -> None:
        answered = cast("_Call[Any]", request).answered
        if not answered.done():
            answered.set_exception(failure)


class Caller:
    """`find`: the version that takes a request, by model and version as they stand in a path (None: it names none).

    It raises Failure(NOT_FOUND). `timeout_s_max`: the longest that a caller may ask for.
    """

    def __init__(self, find: Callable[[str, str | None], ModelRoute], timeout_s_max: float) -> None:
        self.find = find
        self._timeout_s_max = timeout_s_max
        self._responder = _Responder()

    async def call(
        self,
        route: ModelRoute,
        inputs: Sequence[InputTensor],
        rows: int,
        size_bytes: int,
        read: Callable[[Reply], T],
        terms: RequestOptions = DEFAULT_OPTIONS,
        permit: ReplyPermit | None = None,
    ) -> T:
        """Have `inputs` (of the signature, in its order; `rows` of them) run, and return `read` of the reply.

        `read` is called in the event loop and keeps no view of the tensors it is given. `size_bytes`: of the request, for
        admission. `permit`: holds the reply in the reply budget; None: that of the HTTP request which this task answers. Raises
        Failure. Cancelling drops the request unless it has left the lane.
        """
        lane = route.lane
        now = time.monotonic()
        timeout_s = route.timeout_s if terms.timeout_s is None else min(terms.timeout_s, self._timeout_s_max)
        request: _Call[T] = _Call(inputs, rows, terms.priority, now, now + timeout_s, self._responder)
        request.read = read
        request.permit = permit or PERMIT.get()
        request.answered = asyncio.get_running_loop().create_future()
        try:
            lane.add(request, size_bytes, single=True)
        except Failure as failure:
            lane.record_rejection(failure.code)
            raise
        try:
            return await request.answered
        except asyncio.CancelledError:
            lane.cancel(request)
            raise
