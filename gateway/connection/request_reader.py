"""Bytes of a connection -> infer requests, or requests of the ASGI app.

segment ─> is its head cached, and its body complete? ─yes─> submitted, without the parser
                                                      ─no──> httptools ─> callbacks ─> RequestCycle or ASGI
                               rest of a large binary body <──────────────────┘ read into shared memory: BodyReceiver
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

from httptools import HttpParserError, HttpParserUpgrade

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.connection.budgets import SMALL_BYTES_MAX
from millstream.gateway.connection.error_reply import error_reply, too_large
from millstream.gateway.connection.foreign_protocol import ForeignLog, recognise
from millstream.gateway.connection.reply_order import CLOSED, PIPELINE_MAX, ReplyOrder, RequestCycle
from millstream.gateway.connection.request_head import (
    CACHED_BYTES_MAX,
    DISCARDED,
    CachedHead,
    HeadCache,
    PathCache,
    head_fault,
    strip_upgrade,
)
from millstream.gateway.connection.uvicorn_hooks import HIGH_WATER_LIMIT, new_parser
from millstream.services.errors import Code, Failure
from millstream.services.segments.shared_buffers import SharedBuffers

#: a smaller body, or rest of one, is copied: that takes less time than the change of the receiver
RECEIVED_BYTES_MIN = 32 * 1024
#: A head is read with so many bytes of its body, which are copied. A head that is larger comes in several pieces.
_HEAD_PIECE_BYTES = 4096
#: Heads, and input that no request keeps. All connections use it: what a read puts there is used before the next read.
_SCRATCH = memoryview(bytearray(64 * 1024))
_NO_BODY: list[bytes | memoryview] = []  # for cycles whose body is submitted at once


class RequestReader(ReplyOrder):
    """The reading half of a connection (states: fast_path)."""

    browser_guard: ClassVar[BrowserGuard]
    foreign_log: ClassVar[ForeignLog]
    paths: ClassVar[PathCache]
    heads: ClassVar[HeadCache]
    shared_buffers: ClassVar[SharedBuffers | None]

    _cached_head: CachedHead | None = None  # the entry of `heads` that the connection used last
    _receiver: BodyReceiver | None = None  # reads in place of the connection; None: it had no large body
    _upgrade = False  # the current head has an Upgrade header
    _cycle_before_upgrade: Any = CLOSED  # `cycle`, while a head that offers another protocol is being read

    def data_received(self, data: bytes) -> None:
        if self._receiving:
            self._timer.unset()
            self._framing_bytes += len(data)  # callbacks take off what is of a body
        else:
            cached = self._cached_head
            if cached is None or len(data) != cached.total_bytes or not data.startswith(cached.head):
                cached = self._find_cached_head(data)
            before = self.cycle
            if (
                cached is not None
                and (cached.host_known or self.gate.enforced)
                and (before is None or (before.response_complete and before is not CLOSED))
                and not self._resting
            ):
                self._timer.unset()
                cycle = self.cycle = self._active = RequestCycle(cached.path, _NO_BODY, self._answer)
                cycle.headers = cached.headers
                cycle.complete = cycle.started = True
                self._submit(cycle, data[len(cached.head) :])
                return
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._after_upgrade(data, upgrade.args[0])
        except HttpParserError:
            self._refuse_foreign(data)
        if self._receiving and self.cycle is not CLOSED:
            fault = self._framing_fault()
            if fault is None:
                self._arm_timer()
                if self._head_complete:
                    self._receive_rest()
            else:
                self.send_400_response(fault)

    def _receive_rest(self) -> None:
        """Have the rest of a large binary body read into shared memory, if there is room."""
        cycle = self.cycle
        if (
            type(cycle) is not RequestCycle
            or cycle.length_bytes - cycle.size_bytes < RECEIVED_BYTES_MIN
            or not cycle.started
            or cycle.refusal is not None
            or self.shared_buffers is None
            or self.scheme != "http"
        ):
            return
        length_bytes, cycle.length_bytes = cycle.length_bytes, 0  # asked once
        json_bytes = cycle.headers.binary_at
        if json_bytes is None:
            return
        buffer = self.shared_buffers.allocate(length_bytes, aligned_at=json_bytes)
        if buffer is None:
            return
        body = buffer.bytes_view()
        body[: cycle.size_bytes] = b"".join(cycle.body)
        cycle.body = [body]
        if self._receiver is None:
            self._receiver = BodyReceiver(self)
        self._receiver.receive(cycle, cycle.size_bytes)

    def body_received(self, size_bytes: int, *, complete: bool) -> None:
        """Account for bytes of a body that were read into its buffer. Called by the receiver."""
        self._timer.unset()
        self._count_body(size_bytes)
        cycle = self.cycle
        if cycle.refusal is None:
            self._reserve(cycle, size_bytes)
        if complete:
            self.parser = new_parser(self)  # this one waits for the bytes that it was not given
            self.on_message_complete()
        elif self.cycle is not CLOSED:
            self._arm_timer()

    def _refuse_foreign(self, data: bytes) -> None:
        """Refuse `data`, which is not HTTP/1, and say what to do if the connection began with a known protocol."""
        foreign = recognise(data) if self.cycle is None else None
        if foreign is None:
            self.send_400_response("Invalid HTTP request received.")
        else:
            self.foreign_log.count(foreign, self.client[0] if self.client else "a unix socket")
            self.send_400_response(foreign.message)

    def _find_cached_head(self, data: bytes) -> CachedHead | None:
        """Return the cached head of `data`; None unless `data` is one complete infer post with a cached head.

        Clients that call many models in turn repeat each of their heads after the others, hence one cache for all.
        """
        end = data.find(b"\r\n\r\n") + 4
        if not 4 < end <= CACHED_BYTES_MAX:
            return None
        cached = self.heads.find(data[:end], self.paths, self.body_bytes_max, self.browser_guard)
        if cached is None or len(data) != cached.total_bytes:
            return None
        self._cached_head = cached
        return cached

    def _after_upgrade(self, data: bytes, end: int) -> None:
        """Continue after a head that offers another protocol. Java's HTTP client offers h2c in each request.

        The parser expects the other protocol after the head, and does not read the body. Unless that protocol is
        WebSocket, the head is read again without the offer, then the rest of `data`, which begins at `end`.
        """
        rest = memoryview(data)[end:]
        try:
            while not self._should_upgrade():
                if self.cycle is CLOSED:
                    self.cycle, self._cycle_before_upgrade = self._cycle_before_upgrade, CLOSED
                    if self.cycle is CLOSED:
                        return  # the connection is closed: nothing more is read
                    self.parser.feed_data(strip_upgrade(self.parser, self.url, self.headers))
                try:
                    self.parser.feed_data(rest)
                except HttpParserUpgrade as upgrade:
                    if not upgrade.args[0]:
                        return  # after a CONNECT the parser reads nothing more
                    rest = rest[upgrade.args[0] :]
                else:
                    return
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            self.handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        # uvicorn builds an ASGI scope here; an infer post needs none, and `_to_asgi` makes it for other requests.
        self._timer.unset()  # not for empty lines before a request: a client that sends no more than these idles
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._upgrade = False
        self._begin_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"upgrade":
            self._upgrade = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._end_head()
        existing = self.cycle
        if existing is CLOSED:
            return
        fault = head_fault(self.parser.get_http_version(), self.headers)
        if fault is not None:
            self.send_400_response(fault)
            return
        url = self.url
        method = self.parser.get_method()
        if method != b"POST" or self._upgrade:
            if method == b"CONNECT":  # it would turn the connection into a tunnel of bytes that are not HTTP
                self._refuse(Failure(Code.METHOD, "Method Not Allowed"))
            else:
                self._to_asgi()
            return
        path = self.paths[url]
        if path is None:
            self._to_asgi()
            return
        cycle = self.cycle = RequestCycle(path, [], self._answer)
        cycle.read(self.headers, self.body_bytes_max)
        cycle.refusal = self._refusal_of(cycle.headers.credential) or cycle.refusal
        cycle.expect_continue = self.expect_100_continue
        cycle.keep_alive = self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0"
        if (existing is None or existing.response_complete) and not self._resting:
            self._start(cycle)
        else:
            self.pipeline.appendleft((cycle, None))
            if len(self.pipeline) >= PIPELINE_MAX:
                self.flow.pause_reading()

    def _refusal_of(self, credential: bytes | None) -> Failure | None:
        """Return why an infer post with these headers is not let in: before its body is received."""
        refusal = self.browser_guard.refusal("POST", dict(self.headers), self.gate, credential)
        if refusal is None and self.gate.enforced and not self.gate.warns:
            refusal = self.gate.refusal_of(credential)
        return refusal

    def _to_asgi(self) -> None:
        parser = self.parser
        if self._upgrade and parser.should_upgrade() and not self._should_upgrade():
            self._cycle_before_upgrade, self.cycle = self.cycle, CLOSED  # until `_after_upgrade`
            return
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers.extend(headers)
        super().on_headers_complete()
        if self._blocked is None and len(self.pipeline) < PIPELINE_MAX:
            # uvicorn pauses reading as soon as one request waits, and would not see the client disconnect
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._count_chunk()
        self.headers = DISCARDED  # the last chunk has no data, and trailers may follow it

    def on_body(self, body: bytes) -> None:
        self._count_body(len(body))
        cycle = self.cycle
        if type(cycle) is not RequestCycle:
            super().on_body(body)
            return
        if cycle.refusal is not None:
            return
        cycle.body.append(body)
        self._reserve(cycle, len(body))
        if cycle.refusal is None and not cycle.started and cycle.size_bytes > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _reserve(self, cycle: RequestCycle, size_bytes: int) -> None:
        """Take bytes of a body from the receive budget; refuse the request if it becomes too large."""
        receive_budget = self.receive_budget
        if cycle.size_bytes + size_bytes > SMALL_BYTES_MAX >= cycle.size_bytes:
            cycle.caller = self._caller_of(cycle)
        receive_budget.charge(cycle.caller, cycle.size_bytes, cycle.size_bytes + size_bytes)
        cycle.size_bytes += size_bytes
        if cycle.size_bytes > self.body_bytes_max:
            cycle.refusal = too_large(self.body_bytes_max)
        elif receive_budget.bytes > receive_budget.bytes_max or receive_budget.exceeds_share(
            cycle.caller, cycle.size_bytes
        ):
            cycle.refusal = receive_budget.refusal()
        if cycle.refusal is not None:
            cycle.drop_body(receive_budget)
            if cycle.started:
                self._answer(cycle, error_reply(cycle.refusal))

    def _caller_of(self, cycle: RequestCycle) -> str:
        """Return the name of the key that a request brings if it is known to be right, else the client's address."""
        principal = self.gate.recognise(cycle.headers.credential) if self.gate.enforced else None
        if principal is not None:
            return principal.counters.name
        return self.client[0] if self.client else ""

    def on_message_complete(self) -> None:
        self._receiving = False
        cycle = self.cycle
        if type(cycle) is not RequestCycle:
            super().on_message_complete()
            cycle.more_body = False  # uvicorn does not note it for a request that was answered early
            return
        cycle.complete = True
        if cycle.started and cycle.refusal is None:
            self._submit_received(cycle)


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of a connection at its transport: reads large bodies straight into shared memory.

    A transport that gives out segments copies each; the parser copies it again, the whole body is joined, and its
    tensors are copied into shared memory. Here the kernel's copy is the only one.

    head read in small pieces ─> its body is large ─> read into its SharedBuffer ─> complete ─> the next head …
                              ─> it is not ─> the transport gives segments to the connection again
    States: body, as long as `_cycle` is set, else head.
    """

    def __init__(self, connection: RequestReader) -> None:
        self._connection = connection
        self._cycle: RequestCycle | None = None
        self._left_bytes = 0  # of its body, that have not come

    def receive(self, cycle: RequestCycle, received_bytes: int) -> None:
        """Read the rest of a request's body. `cycle.body` is its whole buffer, with the first bytes in it."""
        self._cycle = cycle
        self._left_bytes = len(cycle.body[0]) - received_bytes
        transport = self._connection.transport
        if transport.get_protocol() is not self:
            transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        cycle = self._cycle
        if cycle is None:
            return _SCRATCH[:_HEAD_PIECE_BYTES]
        if not cycle.body:  # it was refused
            return _SCRATCH[: self._left_bytes]
        return cast("memoryview", cycle.body[0])[-self._left_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        cycle = self._cycle
        if cycle is None:
            self._head_received(bytes(_SCRATCH[:nbytes]))
            return
        self._left_bytes -= nbytes
        if not self._left_bytes:
            self._cycle = None
        self._connection.body_received(nbytes, complete=self._cycle is None)

    def _head_received(self, data: bytes) -> None:
        connection = self._connection
        connection.data_received(data)
        if self._cycle is None and connection.transport.get_protocol() is self:
            connection.transport.set_protocol(connection)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cycle = None
        self._connection.connection_lost(exc)
