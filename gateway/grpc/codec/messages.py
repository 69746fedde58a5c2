"""Turns the bytes of a call into its protobuf message, and sends replies; a Failure becomes a status.

Decompression runs in a thread and stops at the limit.
Replies to a client that compresses are compressed, too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc.aio import EOF
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget, ReplyPermit
from millstream.gateway.connection.error_reply import too_large, unicode_text
from millstream.gateway.grpc.codec import parse_cost
from millstream.gateway.http.compression import choose_encoding, decompress
from millstream.gateway.scheduling.request import FORM, FORM_HEADER
from millstream.services.access.limits import LimitReached
from millstream.services.errors import GRPC_STATUS, Code, Failure, invalid
from millstream.services.process.request_id import REQUEST_ID, TRACE, new_request_id, usable_request_id
from millstream.services.process.threads import run_in_thread_if_large
from millstream.services.traceparent import usable_traceparent

REQUEST_ID_KEY = "x-request-id"  # in the metadata of a call, and in the metadata that ends it
#: Details are sent in a header; clients take about 8 KiB of headers.
DETAILS_CHARACTERS_MAX = 2048

_STATUS = {code: grpc.StatusCode[name] for code, name in GRPC_STATUS.items()}


def details(failure: Failure) -> str:
    """Return the message of a status."""
    return unicode_text(failure.message)[:DETAILS_CHARACTERS_MAX]


def refusal(failure: Failure, request_id: str) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the status, message and metadata with which a call ends.

    The metadata says when to try again: as in HTTP, and in the form that gRPC clients with a retry policy follow
    (gRPC proposal A6).
    """
    metadata: tuple[tuple[str, str], ...] = ((REQUEST_ID_KEY, request_id),)
    seconds = failure.retry_after
    if seconds is not None:
        pushback_s = seconds if failure.retry_after_s is None else failure.retry_after_s
        metadata += (("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(math.ceil(pushback_s * 1000))))
    if isinstance(failure, LimitReached):
        metadata += failure.headers
    return _STATUS[failure.code], details(failure), metadata


#: first byte of a gzip stream and of a zlib stream. No message begins with them: they would be a wire type that does
#: not exist, and a field 15, which no message of these services has
GZIP, ZLIB = 0x1F, 0x78
PACKED = (GZIP, ZLIB)

#: Smaller replies hardly shrink. Replies are compressed in the event loop, which a larger one would block.
COMPRESS_BYTES_MIN, COMPRESS_BYTES_MAX = 1024, 1 << 20

#: awaited with the failure before the call of the current task is refused; None: nothing is
BEFORE_REFUSAL: ContextVar[Callable[[Failure], Awaitable[None]] | None] = ContextVar("before_refusal", default=None)

M = TypeVar("M", bound=Message)


async def unpack(body: bytes, bytes_max: int) -> bytes:
    """Return a decompressed message; its first byte tells the encoding. Raises Failure: INVALID, TOO_LARGE."""
    encoding = b"gzip" if body[0] == GZIP else b"deflate"
    try:
        return await asyncio.to_thread(decompress, body, encoding, bytes_max)
    except Failure as failure:
        raise too_large(bytes_max) if failure.code is Code.TOO_LARGE else failure from None


class Messages:
    """Reads the messages of calls and sends replies, within the budgets for both.

    Args:
        receive_budget: the gateway's receive budget.
        reply_budget: the gateway's reply budget.
        bytes_max: limit on a decompressed message.
    """

    def __init__(self, receive_budget: ReceiveBudget, reply_budget: ReplyBudget, bytes_max: int) -> None:
        self._reply_budget = reply_budget
        self._receive_budget = receive_budget
        self._bytes_max = bytes_max

    def call(self, context: Any) -> ReplyPermit:
        """Return the permit that counts a call's reply until the transport has it. Call it when a call begins.

        Also sets the request id of the call: for its task, and in the metadata that ends the call.
        """
        request_id, traceparent = _ids(context)
        REQUEST_ID.set(request_id)
        if traceparent is not None:
            TRACE.set(traceparent)
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        permit = self.permit()
        context.add_done_callback(lambda _: permit.release())
        return permit

    def permit(self) -> ReplyPermit:
        """Return a permit for one reply of a stream. The caller releases it."""
        return ReplyPermit(self._reply_budget)

    async def read(self, context: Any) -> bytes:
        """Return the message of a unary call. Raises Failure: INVALID (no message), UNAVAILABLE, EXPIRED, TOO_LARGE."""
        body = await self.next(context)
        if body is None:
            raise invalid("the call ended without a message")
        return body

    async def next(self, context: Any) -> bytes | None:
        """Return the next message of a stream; None: the client has ended it. Raises Failure."""
        body = await context.read()
        return None if body is EOF else body

    async def plain(self, body: bytes) -> bytes:
        """Return a message without compression. Raises Failure: INVALID, TOO_LARGE, UNAVAILABLE."""
        if not body or body[0] not in PACKED:
            return body
        with self._receive_budget.reserve() as reservation:
            reservation.grow(len(body))  # decompressed messages are bounded by the number of threads
            return await unpack(body, self._bytes_max)

    def ending(self, context: Any) -> None:
        """Complete the metadata that ends the call. Call it before a handler returns."""
        if form := FORM.get():
            context.set_trailing_metadata(((REQUEST_ID_KEY, REQUEST_ID.get()), (FORM_HEADER.decode(), form)))

    async def refuse(self, context: Any, failure: Failure) -> NoReturn:
        """End the call with the status of `failure`, after BEFORE_REFUSAL. Raises grpc.aio.AbortError."""
        before = BEFORE_REFUSAL.get()
        if before is not None:
            await before(failure)
        await context.abort(*refusal(failure, REQUEST_ID.get()))
        raise AssertionError("abort always raises")


def _ids(context: Any) -> tuple[str, bytes | None]:
    """Return the request id in the call's metadata if it is usable, else a new one; and its traceparent, if usable."""
    sent = traceparent = None
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY:
            sent = usable_request_id(value.encode())
        elif key == "traceparent":
            traceparent = usable_traceparent(value.encode())
    return (sent or new_request_id()).decode("ascii"), traceparent


async def parse_infer(body: bytes) -> Any:
    """Return a parsed ModelInferRequest. Raises Failure: INVALID; TOO_LARGE for millions of small fields."""
    return await parse_counted(pb.ModelInferRequest, body, parse_cost.INFER)


async def parse_counted(kind: type[M], body: bytes, fields: parse_cost.Fields) -> M:
    """Return a parsed message of class `kind`. Raises Failure: INVALID; TOO_LARGE for millions of small fields.

    `fields`: as in parse_cost.within.
    """
    # The parser holds the interpreter's lock, so its input is bounded. Counting fields releases the lock at times.
    if (
        len(body) > parse_cost.UNCOUNTED_BYTES_MAX
        and not parse_cost.within(body, parse_cost.COUNTED_INLINE_MAX, fields)
        and not await run_in_thread_if_large(len(body), parse_cost.within, body, parse_cost.UNITS_MAX, fields)
    ):
        raise _too_many_fields()
    return _parsed(kind, body)


def parse(kind: type[M], body: bytes) -> M:
    """Return a parsed message of class `kind`. Raises Failure(INVALID)."""
    if len(body) > parse_cost.UNCOUNTED_BYTES_MAX and not parse_cost.within(
        body, parse_cost.COUNTED_INLINE_MAX, parse_cost.ANY
    ):
        raise _too_many_fields()
    return _parsed(kind, body)


def _too_many_fields() -> Failure:
    return Failure(
        Code.TOO_LARGE,
        "the message has too many fields: send tensors as bytes, in raw_input_contents or tensor_content",
    )


def _parsed(kind: type[M], body: bytes) -> M:
    try:
        message: M = kind.FromString(body)
    except DecodeError:
        raise invalid(f"the message is not an {kind.DESCRIPTOR.full_name}") from None
    return message


def compression(body: bytes, context: Any, reply_bytes: int) -> grpc.Compression | None:
    """Return the compression of a reply: as the request, or as its metadata `accept-encoding`; None: uncompressed."""
    if not COMPRESS_BYTES_MIN <= reply_bytes <= COMPRESS_BYTES_MAX:
        return None
    if body and body[0] in PACKED:
        return grpc.Compression.Gzip if body[0] == GZIP else grpc.Compression.Deflate
    for key, value in context.invocation_metadata() or ():
        if key == "accept-encoding":
            encoding = choose_encoding(value.encode())
            return (
                None if encoding is None else grpc.Compression.Gzip if encoding == b"gzip" else grpc.Compression.Deflate
            )
    return None


def set_compression(body: bytes, context: Any, reply_bytes: int) -> None:
    """Set the compression of the reply to the request `body`, as `compression` decides."""
    how = compression(body, context, reply_bytes)
    if how is not None:
        context.set_compression(how)
