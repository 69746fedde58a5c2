"""One call on a connection of our own: what its handler reads and writes, as of grpc.aio's ServicerContext.

data of the stream ─> MessageReader ─> read ─> handler ─> write, finish ─> the stream
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc.aio import EOF, AbortError

from millstream.gateway.connection.bounded_protocol import SENT_BYTES_MIN
from millstream.gateway.grpc.connections import message_framing
from millstream.gateway.grpc.connections.call_head import CallHead, Metadata
from millstream.gateway.grpc.connections.message_framing import Allocate, MessageReader, prefix
from millstream.gateway.http.compression import compress
from millstream.services.errors import Code, Failure

if TYPE_CHECKING:
    from millstream.gateway.grpc.connections.fast_connection import FastConnection

log = logging.getLogger("millstream.grpc")

_ENCODINGS = {grpc.Compression.Gzip: b"gzip", grpc.Compression.Deflate: b"deflate"}
_OK = grpc.StatusCode.OK


class FastCall:
    """One call. Handlers use the methods that have the names of grpc.aio's; the connection uses the others.

    Args:
        connection: the connection of the call.
        number: its stream.
        head: its header fields.
        now: the instant at which it began.
        unary: whether its request is one message, whose arrival is bounded in time.
    """

    def __init__(self, connection: FastConnection, number: int, head: CallHead, now: float, *, unary: bool) -> None:
        self.head = head
        self.over = False  # the client has the reply, or is gone
        self.answered = False  # the reply, or the last part of it, is on its way
        self.task: asyncio.Task[None] | None = None
        self.pending: Any = None  # the handler of a call that starts when its message is there
        self.began = self._moved = now
        self.receiving = unary  # the message of a unary call is not complete
        self._connection = connection
        self._number = number
        self._deadline = None if head.timeout_s is None else now + head.timeout_s
        self._reader = MessageReader(connection.parts.message_bytes_max)
        self._messages: deque[bytes | memoryview] = deque()
        self._queued_bytes = 0  # of `_messages`
        self._reserved_bytes = 0  # of the messages, complete or not, in the receive budget
        self._unconsumed_bytes = 0  # that the client may not send again yet
        self._ended = False  # the client sends no more
        self._failure: Failure | None = None  # for which the request cannot be read
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._started = False  # the head of the reply was sent
        self._encoding: bytes | None = None  # of the replies
        self._trailing: Metadata = ()
        self._code: grpc.StatusCode | None = None  # of a call that has ended without an answer
        self._callbacks: list[Callable[[Any], object]] = []

    # --- what handlers use

    def peer(self) -> str:
        """Return the client's address as the library writes it."""
        return self._connection.peer

    @property
    def address(self) -> str:
        """The client's address, without its port."""
        return self._connection.address

    @property
    def age_s(self) -> float:
        """The seconds since the call began."""
        return self._connection.loop.time() - self.began

    def invocation_metadata(self) -> Metadata:
        return self.head.metadata

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._connection.loop.time())

    def code(self) -> grpc.StatusCode | None:
        """Return the status with which the call ended; None: it goes on, or was answered."""
        return self._code

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def set_compression(self, how: grpc.Compression) -> None:
        """Compress the replies, if the client reads the encoding."""
        encoding = _ENCODINGS.get(how)
        if encoding in self.head.accepts:
            self._encoding = encoding

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with this call when it is over."""
        self._callbacks.append(callback)

    async def read(self) -> Any:
        """Return the next message; EOF: the client sends no more. Raises Failure: it cannot be received."""
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return EOF
            self._reading = self._connection.loop.create_future()
            await self._reading
        return bytes(self.take_message())

    async def write(self, reply: bytes) -> None:
        """Send a message. Returns when it has left for the transport."""
        if self.over or self.answered:
            raise asyncio.CancelledError
        head, body = self._message(reply)
        if not self._started:
            self._started = True
            self._connection.h2.headers(self._number, self._head_block())
        self._writing = self._connection.loop.create_future()
        self._connection.h2.queue(self._number, head, body)
        self._connection.touch()
        await self._writing

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status. Raises AbortError."""
        self.end(code, details, trailing_metadata or self._trailing)
        raise AbortError

    # --- what answers it

    def await_message(self, handler: Any, allocate: Allocate) -> None:
        """Wait for the message before the call is submitted, or `handler`, one of grpc's, starts.

        `allocate` gives memory for a large message.
        """
        self.pending = handler
        self._reader.allocate = allocate

    def first_message(self) -> bytes | memoryview:
        """Return the message that `take_message` would take."""
        return self._messages[0]

    def take_message(self) -> bytes | memoryview:
        """Return the next message, which must be there, and let the client send more."""
        body = self._messages.popleft()
        self._queued_bytes -= len(body)
        self._reserve()
        if not self._messages:
            self._consume()
        return body

    def finish(self, reply: bytes) -> None:
        """Answer a unary call."""
        self.answer(reply, message_framing.trailers(0, "", self._trailing))

    def answer(self, reply: bytes, trailers: bytes) -> None:
        """Answer a unary call, and end it with the block `trailers`."""
        if self.over or self.answered:
            return
        self.answered = True
        head, body = self._message(reply)
        if self._connection.h2.respond(self._number, self._head_block(), head, body, trailers):
            self._end()
        self._connection.touch()

    def end(self, code: grpc.StatusCode, details: str = "", metadata: Metadata | None = None) -> None:
        """End the call with a status, unless it has ended."""
        if self.over or self.answered:
            return
        self.answered = True
        self._code = code
        number = code.value[0]
        metadata = self._trailing if metadata is None else metadata
        if self._started:
            self._connection.h2.queue(self._number, trailers=message_framing.trailers(number, details, metadata))
        else:
            block = message_framing.trailers_only(number, details, metadata)
            self._connection.h2.headers(self._number, block, end=True)
            self._end()
        self._connection.touch()

    def _message(self, reply: bytes) -> tuple[bytes, bytes]:
        """Return a reply as prefix and body."""
        if self._encoding is None:
            return prefix(len(reply)), reply
        body = compress(reply, self._encoding)
        return prefix(len(body), compressed=True), body

    def _head_block(self) -> bytes:
        return message_framing.HEAD if self._encoding is None else message_framing.head_of(self._encoding)

    # --- what the connection tells it

    def start(self, handler: Any) -> None:
        """Run the handler, one of grpc's, in a task."""
        self.pending = None
        self.task = self._connection.loop.create_task(self._run(handler))

    async def _run(self, handler: Any) -> None:
        try:
            if handler.stream_unary is not None:
                self.finish(await handler.stream_unary(None, self))
            else:
                await handler.stream_stream(None, self)
                self.end(_OK)
        except AbortError:
            pass
        except asyncio.CancelledError:
            self.end(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            log.exception("a call of %s failed", self.head.method)
            self.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")

    def received(self, data: bytes, now: float, *, ended: bool) -> None:
        """Take data of the stream."""
        if ended:
            self._ended = True
        self._moved = now
        self._unconsumed_bytes += len(data)
        if data and self._failure is None:
            try:
                self._read(data)
                self._reserve()
            except Failure as failure:
                self.fail(failure)
        if self._messages or ended:
            self.receiving = False
        if not self._messages:
            self._consume()  # else a message that is larger than the window could not arrive
        self._wake()

    def _read(self, data: bytes) -> None:
        for compressed, body in self._reader.read(data):
            if compressed and self.head.encoding == b"identity":
                raise Failure(Code.INTERNAL, "a message is compressed, and grpc-encoding does not say how")
            self._messages.append(body)
            self._queued_bytes += len(body)

    @property
    def has_message(self) -> bool:
        """Whether a message is complete."""
        return bool(self._messages)

    @property
    def waits_since(self) -> float | None:
        """The instant since which the call waits for its next message; None: it does not."""
        if self.receiving:
            return self.began
        reads = self._reading is not None and not self._reading.done()
        return self._moved if reads else None

    def _consume(self) -> None:
        if self._unconsumed_bytes:
            self._connection.h2.consume(self._number, self._unconsumed_bytes)
            self._unconsumed_bytes = 0

    def _reserve(self) -> None:
        """Count the bytes that the call holds in the receive budget. Raises Failure(UNAVAILABLE)."""
        held_bytes = 0 if self.over or self._failure else self._reader.held_bytes + self._queued_bytes
        change = held_bytes - self._reserved_bytes
        if change:
            self._reserved_bytes = held_bytes
            if change > 0:
                self._connection.reservation.grow(change)
            else:
                self._connection.reservation.resize(self._connection.reservation.size + change)

    def fail(self, failure: Failure) -> None:
        """Let the handler's read fail: the request cannot be received."""
        if self._failure is None:
            self._failure = failure
            self.receiving = False
            self._reader = MessageReader(0)
            self._reserve()
        self._wake()
        if self.pending is not None:
            self.start(self.pending)

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def sent(self, *, ended: bool) -> None:
        """Note that all that was written has left for the transport."""
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)
        if ended:
            self._end()

    def check(self, now: float, stall_s_max: float) -> None:
        """End a call whose deadline has passed, or whose request arrives too slowly."""
        if self._deadline is not None and now >= self._deadline:
            self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._cancel()
        elif self.receiving:
            patience_s = min(self._reader.held_bytes / SENT_BYTES_MIN, self._moved - self.began)
            if now >= self.began + stall_s_max + patience_s:
                slow = f"the request came slower than {SENT_BYTES_MIN} bytes a second for {stall_s_max:g} s"
                self.fail(Failure(Code.EXPIRED, slow))

    def lost(self) -> None:
        """End a call whose client is gone: nothing can be sent."""
        if not self.over:
            self.answered = True
            self._code = grpc.StatusCode.CANCELLED
            self._end()
            self._cancel()

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _end(self) -> None:
        self.over = True
        self._reserve()
        if self._reader.held_bytes:
            self._reader = MessageReader(0)  # gives its memory back
        if self.pending is not None:
            self._connection.parts.gave_up(self)
        self._connection.forget(self._number)
        for callback in self._callbacks:
            callback(self)
        self._callbacks = []
