"""ModelStreamInfer runs several requests of a stream at once and replies in their order.

read ─> a task for each ─> queue (bounded: reading stops while it is full) ─> write, one after the other

The reply to a failed request holds its error, and the stream continues.
Source: Triton's inference.proto, ModelStreamInferResponse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.access.gate import Gate
from millstream.gateway.connection.budgets import ReplyPermit
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.grpc.codec.encode import FINAL, stream_response
from millstream.gateway.grpc.codec.messages import COMPRESS_BYTES_MAX, Messages, details, parse_infer, set_compression
from millstream.gateway.grpc.guard import ObservedCalls
from millstream.gateway.grpc.methods.infer import InferCalls
from millstream.services.errors import Code, Failure
from millstream.services.process.cancellation import cancel_all

#: requests of one stream in flight; at the limit, reading stops
STREAM_REQUESTS_MAX = 128
#: seconds for which a stream without requests in flight stays open on a draining gateway
IDLE_S = 0.5

_SERVICE = "inference.GRPCInferenceService"
_DRAINING = Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1)

_Answer = tuple[bytes, Failure | None, ReplyPermit]


class InferStream:
    """Handles streams.

    Args:
        infer: answers requests.
        messages: reads requests and sends replies.
        draining: returns whether this gateway is draining.
        gate: checks each request: the key of a stream may be revoked while it is open.
        observed: observes each request; None: requests are not observed.
    """

    def __init__(
        self,
        infer: InferCalls,
        messages: Messages,
        draining: Callable[[], bool],
        gate: Gate,
        observed: ObservedCalls | None = None,
    ) -> None:
        self._infer = infer
        self._messages = messages
        self._draining = draining
        self._gate = gate
        self._observed = observed

    async def model_stream_infer(self, _: Any, context: Any) -> None:
        """Handle a ModelStreamInfer call.

        Not a generator: a generator that is cancelled after a yield ends later, and its tasks would outlive the call.
        """
        messages = self._messages
        messages.call(context)
        strict = ("triton_grpc_error", "true") in [
            (key, str(value).lower()) for key, value in context.invocation_metadata() or ()
        ]
        queue: asyncio.Queue[asyncio.Task[_Answer] | None] = asyncio.Queue(STREAM_REQUESTS_MAX)
        reading = asyncio.create_task(self._read(context, queue))
        answering: asyncio.Task[_Answer] | None = None
        try:
            while (answering := await self._next(queue)) is not None:
                reply, failure, permit = await answering
                if failure is not None and strict:
                    await messages.refuse(context, failure)
                await context.write(reply)
                permit.release()
            if not reading.done():
                await messages.refuse(context, _DRAINING)
            try:
                reading.result()
            except Failure as failure:
                await messages.refuse(context, failure)
            messages.ending(context)
        finally:
            unsent = [queue.get_nowait() for _ in range(queue.qsize())]
            tasks = [task for task in (answering, *unsent) if task is not None]
            await cancel_all([reading, *tasks])
            for task in tasks:
                if not task.cancelled():
                    task.result()[2].release()

    async def _next(self, queue: asyncio.Queue[asyncio.Task[_Answer] | None]) -> asyncio.Task[_Answer] | None:
        """Return the task of the next reply; None at the stream's end, or if a draining gateway gets no requests."""
        while queue.empty():
            try:
                async with asyncio.timeout(IDLE_S):
                    return await queue.get()
            except TimeoutError:
                if self._draining():
                    return None
        return queue.get_nowait()

    async def _read(self, context: Any, queue: asyncio.Queue[asyncio.Task[_Answer] | None]) -> None:
        first = True
        try:
            while (body := await self._messages.next(context)) is not None:
                if first:
                    first = False
                    set_compression(body, context, COMPRESS_BYTES_MAX)  # set once, for all replies
                await queue.put(asyncio.create_task(self._answer(body, context)))
        finally:
            await queue.put(None)

    async def _answer(self, body: bytes, context: Any) -> _Answer:
        permit = self._messages.permit()
        passed = None
        try:
            passed = self._gate.enter_again()
            reply = await self._reply(body, context, permit)
            return stream_response(reply), None, permit
        except Failure as error:
            failure = error
        except Exception as error:
            failure = internal_failure("a request of a stream", error)
        except BaseException:
            permit.release()
            raise
        finally:
            if passed is not None:
                passed.leave()
        permit.release()
        return await self._failed(body, failure), failure, permit

    async def _reply(self, body: bytes, context: Any, permit: ReplyPermit) -> bytes:
        if self._observed is None or not self._observed.active:
            return await self._infer.reply(body, context.time_remaining(), permit, FINAL)
        with self._observed.call(_SERVICE, "ModelStreamInfer", context) as reply_bytes:
            reply = await self._infer.reply(body, context.time_remaining(), permit, FINAL)
            reply_bytes.append(len(reply))
            return reply

    async def _failed(self, body: bytes, failure: Failure) -> bytes:
        """Return the reply with a failure and the request's id."""
        response = pb.ModelStreamInferResponse(error_message=details(failure))
        try:
            response.infer_response.id = (await parse_infer(await self._messages.plain(body))).id
        except Failure:
            response.infer_response.id = ""
        written: bytes = response.SerializeToString()
        return written
