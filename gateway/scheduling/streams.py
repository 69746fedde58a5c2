"""Answers in parts: from the connection of a worker to the adapter that writes them.

Caller.stream ─> StreamRequest ─> lane ─> worker ─> part 0 (open), 1, 2, … ─> Stream ─> adapter, which asks for the next
the adapter has a part ─> taken ─> the worker's run goes on          the adapter closes it ─> cancel, at once
The ordinary reply to the batch ends a stream. A request whose first part has come is never run again: where its worker
is lost, the stream ends with an error that names the last part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast

from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.lane_state import InFlightBatch
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.request import LATE, Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import Outputs, OutputTensor, Reply, own_copies
from millstream.services.errors import Code, Failure, invalid
from millstream.services.queue.reply_listener import ReplyLink
from millstream.services.wire.batch import ReplyHeader
from millstream.services.wire.part_messages import PartHeader, cancel_message, decode_part, taken_message

log = logging.getLogger("millstream.streams")

#: parts of one answer that may be on their way to its caller
WINDOW_BYTES = 64 << 10
#: of the window, after which the worker is told what the caller has
TAKEN_SHARE = 4
#: of a whole stream
STREAM_S_MAX = 3600.0


class StreamRequest(Request):
    """A request whose answer is read in parts. Instants: monotonic."""

    window = WINDOW_BYTES
    link: ReplyLink | None = None  # over which its parts come
    batch: InFlightBatch | None = None  # that had the last part
    ordinal = 0  # of the last part that came

    def __init__(
        self,
        inputs: Sequence[InputTensor],
        rows: int,
        priority: int,
        arrival: float,
        timeout_s: float,
        responder: StreamResponder,
        outputs: Sequence[int] | None,
    ) -> None:
        super().__init__(inputs, rows, priority, arrival, arrival + timeout_s, responder)
        self.stream = Stream(self)
        self._outputs = outputs
        self._timeout_s = timeout_s

    @property
    def wanted(self) -> Sequence[int] | None:
        return self._outputs

    @property
    def late(self) -> str:
        return (
            f"no part came, or was read, within {self._timeout_s:g} s after part {self.ordinal}: the stream is ended"
            if self.begun
            else LATE
        )

    @property
    def lost(self) -> str:
        return f"the worker was lost after part {self.ordinal} of the answer"

    def opened(self, link: ReplyLink, batch: InFlightBatch) -> None:
        """Note over which connection the parts of a batch come."""
        self.link, self.batch = link, batch

    def moved(self) -> None:
        """Put the deadline off: a part came, or was read."""
        batch, now = self.batch, time.monotonic()
        if batch is not None:
            self.deadline = min(now + self._timeout_s, self.arrival + STREAM_S_MAX)
            batch.earliest = batch.latest = self.deadline

    def say_cancel(self) -> None:
        """Tell the worker that no more parts are wanted."""
        if self.link is not None and self.batch is not None:
            self.link.say(cancel_message(self.batch.name))


class Stream:
    """The parts of one answer, as they come: an asynchronous iterator of outputs in the signature's order.

    Raises the Failure that ended it. Close it: the request is dropped unless it has ended.
    """

    def __init__(self, request: StreamRequest) -> None:
        self.request = request
        self._parts: deque[tuple[int, int, list[OutputTensor]]] = deque()  # ordinal, bytes, outputs
        self._changed = asyncio.Event()
        self._ended = False
        self._failure: Failure | None = None
        self._unsaid_bytes = 0  # of parts that the adapter has, and of which the worker was not told
        self._given = 0  # ordinal of the part that the adapter has

    def __aiter__(self) -> AsyncIterator[list[OutputTensor]]:
        return self

    async def __anext__(self) -> list[OutputTensor]:
        self._taken()
        while not self._parts:
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        ordinal, size_bytes, outputs = self._parts.popleft()
        self._given, self._unsaid_bytes = ordinal, self._unsaid_bytes + size_bytes
        return outputs

    def _taken(self) -> None:
        """Note that the adapter has written the part that it got."""
        request = self.request
        if not self._given or request.done:
            return
        request.moved()
        if self._unsaid_bytes >= WINDOW_BYTES // TAKEN_SHARE and request.link is not None and request.batch is not None:
            self._unsaid_bytes = 0
            request.link.say(taken_message(request.batch.name, self._given))

    def add(self, ordinal: int, size_bytes: int, outputs: list[OutputTensor]) -> None:
        """Add a part."""
        self._parts.append((ordinal, size_bytes, outputs))
        self._changed.set()

    def end(self, failure: Failure | None = None) -> None:
        """End it, after the parts that came."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._changed.set()

    def close(self) -> None:
        """Drop the request unless it has its whole answer."""
        request = self.request
        self._parts.clear()
        if not request.done:
            request.lane.cancel(request)
            request.say_cancel()
        self.end()


class StreamResponder:
    """Ends the streams of one protocol."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """End a stream. Outputs: its worker is of an earlier release, and answers at once."""
        replies = outputs.replies([one.rows for one in requests]) if outputs.columns else [[]] * len(requests)
        for request, reply in zip(requests, replies, strict=True):
            self.answer_one(request, reply)

    def answer_one(self, request: Request, reply: Reply) -> None:
        stream = cast("StreamRequest", request).stream
        if reply:
            stream.add(1, 0, own_copies(reply))
        stream.end()

    def fail(self, request: Request, failure: Failure) -> None:
        mine = cast("StreamRequest", request)
        mine.say_cancel()
        mine.stream.end(failure)


class StreamTable:
    """Takes the parts that workers send, for all lanes of a gateway. Call it only in the event loop."""

    def __init__(self, lanes: LaneTable) -> None:
        self._lanes = lanes

    def part(self, link: ReplyLink, data: bytes) -> None:
        """Take a part. Raises ValueError for what is none, or of a worker that cannot have the batch."""
        header, inline = decode_part(data)
        batch = self._lanes.pending.get(header.name)
        if batch is not None and link.pool is not None and batch.lane.link.keys.pool != link.pool:
            raise ValueError("the part of a worker that cannot have the batch")
        request = None if batch is None else batch.requests[0]
        if batch is None or not isinstance(request, StreamRequest) or request.done:
            link.say(cancel_message(header.name))
            return
        if request.batch is not batch or request.link is not link:
            if request.batch is batch and header.attempt <= batch.attempt and request.link is not None:
                link.say(cancel_message(header.name))  # of a worker that was silent, whose batch another one has
                return
            if request.begun:  # another worker begins again what a caller has parts of
                link.say(cancel_message(header.name))
                self._lose(batch, request)
                return
            request.opened(link, batch)
            batch.attempt = max(batch.attempt, header.attempt)
        if header.ordinal:
            self._take(batch, request, header, inline)

    def _take(self, batch: InFlightBatch, request: StreamRequest, header: PartHeader, inline: memoryview) -> None:
        if header.ordinal != request.ordinal + 1:
            self._lose(batch, request)
            return
        reply = ReplyHeader(
            header.name, header.worker, 0.0, 0.0, 0.0, 0.0, 1, [], {}, header.outputs, "", header.attempt
        )
        try:
            [outputs] = batch.lane.packer.unpack(reply, inline, (request,)).replies([request.rows])
        except (ValueError, IndexError) as error:
            log.warning("a part of batch %s cannot be read: %s", header.name, error)
            self._fail(batch, request, Failure(Code.INTERNAL, f"a part of the answer cannot be read: {error}"))
            return
        request.ordinal, request.begun = header.ordinal, True
        request.inputs = ()  # it does not run again
        request.moved()
        request.stream.add(header.ordinal, header.size_bytes, outputs)

    def closed(self, link: ReplyLink) -> None:
        """Fail the streams of a connection that has ended, except those that have no part: their batches run again."""
        for batch in list(self._lanes.pending.values()):
            request = batch.requests[0]
            if not isinstance(request, StreamRequest) or request.link is not link or request.done:
                continue
            if request.begun:
                self._lose(batch, request)
            else:
                request.link = None  # another worker may have the batch next

    def _lose(self, batch: InFlightBatch, request: StreamRequest) -> None:
        self._fail(batch, request, Failure(Code.UNAVAILABLE, request.lost, retry_after_s=1))

    def _fail(self, batch: InFlightBatch, request: StreamRequest, failure: Failure) -> None:
        self._lanes.of(batch.lane).recovery.fail(request, failure)


class StreamLane(Lane):
    """The lane of a version that answers in parts."""

    def add(self, request: Request, size_bytes: int, *, single: bool = False) -> None:
        """Admit a request. Raises Failure as `Lane.add`, and INVALID for one that cannot be answered in parts."""
        if not request.window and request.counted:
            raise invalid(
                f"model '{self.manifest.model}' answers in parts: call generate_stream, or ModelStreamInfer over gRPC"
            )
        super().add(request, size_bytes, single=single)
