"""ModelStreamInfer runs several requests of a stream at once and replies in their order.

read ─> a task for each ─> queue (bounded: reading stops while it is full) ─> write, one after the other
        an answer in parts ─> a task of its own ─> its parts are written as they come, between those of others

The reply to a failed request holds its error, and the stream continues.
Source: Triton's inference.proto, ModelStreamInferResponse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.access.gate import Gate, Pass
from millstream.gateway.connection.budgets import ReplyPermit
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.grpc.codec.encode import stream_response
from millstream.gateway.grpc.codec.messages import COMPRESS_BYTES_MAX, Messages, details, parse_infer, set_compression
from millstream.gateway.grpc.guard import ObservedCalls
from millstream.gateway.grpc.methods.infer import AnswerParts, InferCalls
from millstream.services.errors import Code, Failure
from millstream.services.process.cancellation import cancel_all

#: requests of one stream in flight; at the limit, reading stops
STREAM_REQUESTS_MAX = 128
#: seconds for which a stream without requests in flight stays open on a draining gateway
IDLE_S = 0.5

_SERVICE = "inference.GRPCInferenceService"
_DRAINING = Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1)


class _Answer(NamedTuple):
    reply: bytes
    failure: Failure | None
    permit: ReplyPermit
    parts: AnswerParts | None = None  # in place of a reply
    passed: Pass | None = None  # of the limits of its key, until the parts have ended

    def drop(self) -> None:
        """Free what is held for an answer that is not written."""
        self.permit.release()
        if self.parts is not None:
            self.parts.stream.close()
        if self.passed is not None:
            self.passed.leave()


class _Writer:
    """Writes the parts of answers to one stream, each answer in a task."""

    def __init__(self, context: Any, messages: Messages, *, strict: bool) -> None:
        self._context = context
        self._messages = messages
        self._strict = strict
        self._writing = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()

    async def write(self, response: bytes) -> None:
        async with self._writing:
            await self._context.write(response)

    def begin(self, answer: _Answer, parts: AnswerParts) -> None:
        """Begin to write the parts of an answer."""
        self.tasks.add(asyncio.create_task(self._write_parts(answer, parts)))

    async def _write_parts(self, answer: _Answer, parts: AnswerParts) -> None:
        try:
            async for outputs in parts.stream:
                await self.write(stream_response(parts.write(outputs)))
            if parts.last:
                await self.write(stream_response(parts.last))
        except Failure as failure:
            await self._fail(failure, parts.request_id)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await self._fail(internal_failure("a part of an answer", error), parts.request_id)
        finally:
            answer.drop()

    async def _fail(self, failure: Failure, request_id: str) -> None:
        if self._strict:
            raise failure
        await self.write(failed_response(failure, request_id))

    def check(self) -> None:
        """Raise what ended an answer that has ended."""
        for task in [one for one in self.tasks if one.done()]:
            self.tasks.discard(task)
            task.result()

    async def settle(self) -> None:
        """Wait until all parts are written. Raises Failure."""
        while self.tasks:
            await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
            self.check()


def failed_response(failure: Failure, request_id: str) -> bytes:
    """Return the reply with a failure and the id of its request."""
    response = pb.ModelStreamInferResponse(error_message=details(failure))
    response.infer_response.id = request_id
    written: bytes = response.SerializeToString()
    return written


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
        writer = _Writer(context, messages, strict=strict)
        answering: asyncio.Task[_Answer] | None = None
        try:
            while (answering := await self._next(queue, writer)) is not None:
                answer = await answering
                if answer.failure is not None and strict:
                    raise answer.failure
                if answer.parts is not None:
                    writer.begin(answer, answer.parts)
                    answering = None
                    continue
                await writer.write(answer.reply)
                answer.permit.release()
            await writer.settle()
            if not reading.done():
                raise _DRAINING
            reading.result()
            messages.ending(context)
        except Failure as failure:
            await messages.refuse(context, failure)
        finally:
            unsent = [queue.get_nowait() for _ in range(queue.qsize())]
            tasks = [task for task in (answering, *unsent) if task is not None]
            await cancel_all([reading, *tasks, *writer.tasks])
            for task in tasks:
                if not task.cancelled():
                    task.result().drop()

    async def _next(
        self, queue: asyncio.Queue[asyncio.Task[_Answer] | None], writer: _Writer
    ) -> asyncio.Task[_Answer] | None:
        """Return the task of the next reply; None at the stream's end, or if a draining gateway gets no requests."""
        while queue.empty() or len(writer.tasks) >= STREAM_REQUESTS_MAX:
            writer.check()
            try:
                async with asyncio.timeout(IDLE_S):
                    if len(writer.tasks) >= STREAM_REQUESTS_MAX:
                        await asyncio.wait(writer.tasks, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        return await queue.get()
            except TimeoutError:
                if self._draining() and not writer.tasks:
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
            if isinstance(reply, AnswerParts):
                parts_pass, passed = passed, None
                return _Answer(b"", None, permit, reply, parts_pass)
            return _Answer(stream_response(reply), None, permit)
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
        return _Answer(await self._failed(body, failure), failure, permit)

    async def _reply(self, body: bytes, context: Any, permit: ReplyPermit) -> bytes | AnswerParts:
        if self._observed is None or not self._observed.active:
            return await self._infer.reply_in_stream(body, context.time_remaining(), permit)
        with self._observed.call(_SERVICE, "ModelStreamInfer", context) as reply_bytes:
            reply = await self._infer.reply_in_stream(body, context.time_remaining(), permit)
            if isinstance(reply, bytes):
                reply_bytes.append(len(reply))
            return reply

    async def _failed(self, body: bytes, failure: Failure) -> bytes:
        """Return the reply with a failure and the request's id."""
        try:
            request_id = (await parse_infer(await self._messages.plain(body))).id
        except Failure:
            request_id = ""
        return failed_response(failure, request_id)
