"""The fast path: infer posts answered in uvicorn's own HTTP protocol class, without ASGI scope, task or coroutine.

parser callbacks ─> body complete ─> Infer.submit ……… reply ─> transport. Every other request goes on to the ASGI app.

What uvicorn guarantees is kept: replies in order on a pipelined connection, keep-alive and its timeout,
`Expect: 100-continue`, flow control both ways, graceful shutdown. Measured against the same handler behind ASGI it
carries twice the requests for a CPU second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, ClassVar

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from millstream.gateway.connection.drain import Drain, DrainingProtocol
from millstream.gateway.connection.error_reply import error_reply, too_large, unexpected
from millstream.gateway.connection.head_cache import KNOWN_BYTES_MAX, CachedHead, learn_head
from millstream.gateway.connection.idle_timer import LazyTimer
from millstream.gateway.connection.infer_handler import HttpReply, InferHandler
from millstream.gateway.connection.lingering_close import DiscardProtocol
from millstream.gateway.connection.path_cache import InferPath, learn
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.connection.reply_budget import SMALL_BYTES_MAX, ReplyBudget
from millstream.gateway.connection.reply_head import head, ok_prefix
from millstream.gateway.connection.request_cycle import CLOSED, RequestCycle, is_whole, refused
from millstream.gateway.connection.request_head import HEAD_BYTES_MAX, NOWHERE, head_fault, strip_upgrade
from millstream.gateway.connection.slow_reader import WriteStallGuard
from millstream.services.errors import Code, Failure

__all__ = ["FastPathProtocol", "fast_path_protocol"]

PIPELINE_MAX = 16  # requests that wait for their turn on one connection before no more is read from it
SENT_BYTES_MIN = 64 * 1024  # a client that sends so many a second is not slow
LINGER_S = 5.0  # how long a refused client may take to notice
_NO_BODY: list[bytes] = []  # of cycles whose body went on at once


class FastPathProtocol(DrainingProtocol):
    """Use `fast_path_protocol(...)` to make the class for a server: uvicorn creates its protocols from a class alone."""

    infer: ClassVar[InferHandler]
    body_bytes_max: ClassVar[int]
    connections_max: ClassVar[int]
    receive_budget: ClassVar[ReceiveBudget]
    reply_budget: ClassVar[ReplyBudget]
    client_stall_s_max: ClassVar[float]
    paths: ClassVar[dict[bytes, InferPath | None]]
    heads: ClassVar[dict[bytes, CachedHead | None]]
    ok_prefix: ClassVar[list[Any]]  # [default headers it was made of, bytes]: the head of a 200 up to its length

    cycle: Any  # the last request that was read: a Cycle, or uvicorn's own
    pipeline: deque[tuple[Any, Any]]  # (cycle, ASGI app) of those that wait for their turn, the next one at the right
    _active: Any = None  # the request whose turn it is
    _blocked: Any = None  # answered, but the client does not read: the next one waits
    _last_head = b""
    _known: CachedHead | None = None  # the one that this connection used last
    _timer: LazyTimer
    _upgrade = False
    _set_aside: Any = CLOSED  # `cycle`, while a request that asked for another protocol is read for the first time
    _head_bytes = -1  # of the head (or the trailers) that is being read, but for its first piece; -1: none is
    _receiving = False  # a request has begun and is not whole
    _due = 0.0  # when the client has been too slow with it
    _watch: WriteStallGuard
    _advancing = False
    _unread_bytes = 0  # of replies, as they count in `reply_budget`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = LazyTimer(self.loop, self._stalled)
        self._watch = WriteStallGuard(self.loop, transport, self.client_stall_s_max)
        open_now = len(self.connections)
        if open_now > 2 * self.connections_max:
            transport.abort()  # so many that the refused ones, which are given a moment, would be too many
        elif open_now > self.connections_max:
            self._refuse(Failure(Code.UNAVAILABLE, "too many connections are open; try again later", retry_after_s=1))
        else:
            self._await_rest()

    def data_received(self, data: bytes) -> None:
        self._timer.unset()
        if not self._receiving:
            known = self._known
            if known is None or len(data) != known.total_bytes or not data.startswith(known.head):
                known = self._recall(data)
            before = self.cycle
            if known is not None and (before is None or (before.response_complete and before is not CLOSED)):
                cycle = self.cycle = self._active = RequestCycle(known.path, _NO_BODY, self._answer)
                cycle.headers = known.headers
                cycle.complete = cycle.started = True
                self._submit(cycle, data[len(known.head) :])
                return
        if self._head_bytes >= 0:
            self._head_bytes += len(data)  # unless the head ends in it: then a callback says so
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._after_upgrade(data, upgrade.args[0])
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._receiving and self.cycle is not CLOSED:
            if self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response(f"the request's head is larger than {HEAD_BYTES_MAX} bytes")
            else:
                self._await_rest()

    def _recall(self, data: bytes) -> CachedHead | None:
        """What is known of the head of `data`, if that is one whole infer post.

        A head is learnt when a connection sends it twice in a row: heads that are new each time cost a look-up alone.
        """
        end = data.find(b"\r\n\r\n") + 4
        if not 4 < end <= KNOWN_BYTES_MAX:
            return None
        head = data[:end]
        try:
            known = self.heads[head]
        except KeyError:
            if head != self._last_head:
                self._last_head = head
                return None
            known = learn_head(self.heads, head, self.body_bytes_max)
        if known is None or len(data) != known.total_bytes:
            return None
        self._known = known
        return known

    def _after_upgrade(self, data: bytes, end: int) -> None:
        """A request asked for another protocol, as Java's HTTP client does with each one: it offers h2c.

        The parser takes what follows for that protocol, the body too. Unless it is WebSocket, the request is read once
        more as if it had not asked.
        """
        rest = memoryview(data)[end:]
        try:
            while not self._should_upgrade():
                if self.cycle is CLOSED:
                    self.cycle, self._set_aside = self._set_aside, CLOSED
                    if self.cycle is CLOSED:
                        return  # nothing more is read on this connection
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

    def _await_rest(self) -> None:
        """Read timeout: a partial request holds a connection, bytes of `receive_budget`, or a place for an upload.

        Each byte of a body earns time, but no client may fall behind SENT_BYTES_MIN a second by more than `client_stall_s_max`.
        """
        seconds: float = self.timeout_keep_alive
        if self._receiving:
            now = self.loop.time()
            self._due = min(self._due, now + self.client_stall_s_max)
            seconds = min(seconds, max(0.0, self._due - now))
        self._timer.set(seconds)

    def _unset_keepalive_if_required(self) -> None:
        self._timer.unset()

    def _stalled(self) -> None:
        active = self._active
        owing = active is not None and not active.response_complete and is_whole(active)
        if owing or self.flow.read_paused:
            self._due = self.loop.time() + self.client_stall_s_max
            self._await_rest()  # it is the client who waits
        elif self._receiving and not _replying(self.cycle):
            self._refuse(_too_slow())
        else:
            self.timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch.begin()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch.end()
        self._count_unread(0)
        blocked, self._blocked = self._blocked, None
        if blocked is None or self.transport.is_closing():
            return
        if type(blocked) is RequestCycle:
            self._finish(blocked)
        else:
            self._take_turn()

    def _count_unread(self, size_bytes: int) -> None:
        self.reply_budget.bytes += size_bytes - self._unread_bytes
        self._unread_bytes = size_bytes

    def connection_lost(self, exc: Exception | None) -> None:
        active = self._active
        for cycle in (active, self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if type(cycle) is RequestCycle and not cycle.disconnected:
                cycle.disconnected = True
                cycle.drop_body(self.receive_budget)
                if cycle.ticket is not None and not cycle.answered:
                    cycle.ticket.cancel()
                cycle.ticket = None  # which holds the cycle
        if active is not None and not active.response_complete:
            active.disconnected = True  # uvicorn tells the last request that was read, which may be another one
            active.message_event.set()
        self._timer.close()
        self._watch.end()
        self._count_unread(0)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)
        self.cycle, self._active = CLOSED, None  # a cycle holds its connection

    def on_message_begin(self) -> None:
        # uvicorn builds an ASGI scope here; an infer post needs none, any other request gets it in `_to_asgi`.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._upgrade = False
        self._head_bytes = 0
        self._receiving = True
        self._due = self.loop.time() + self.client_stall_s_max

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"upgrade":
            self._upgrade = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
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
            if method == b"CONNECT":  # after which nothing on the connection would be HTTP any more
                self._refuse(Failure(Code.METHOD, "Method Not Allowed"))
            else:
                self._to_asgi()
            return
        try:
            path = self.paths[url]
        except KeyError:
            path = learn(self.paths, url)
        if path is None:
            self._to_asgi()
            return
        cycle = self.cycle = RequestCycle(path, [], self._answer)
        cycle.read(self.headers, self.body_bytes_max)
        cycle.expect_continue = self.expect_100_continue
        cycle.keep_alive = self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0"
        if existing is None or existing.response_complete:
            self._start(cycle)
        else:
            self.pipeline.appendleft((cycle, None))
            if len(self.pipeline) >= PIPELINE_MAX:
                self.flow.pause_reading()

    def _to_asgi(self) -> None:
        parser = self.parser
        if self._upgrade and parser.should_upgrade() and not self._should_upgrade():
            self._set_aside, self.cycle = self.cycle, CLOSED  # until `_after_upgrade`
            return
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers.extend(headers)
        super().on_headers_complete()
        if self._blocked is None and len(self.pipeline) < PIPELINE_MAX:
            self.flow.resume_reading()  # uvicorn stops at the first that waits, and no longer sees the client go

    def on_chunk_header(self) -> None:
        # The last chunk has no data, and trailers may follow it: like a head, they have a limit.
        self._head_bytes = 0
        self.headers = NOWHERE

    def on_body(self, body: bytes) -> None:
        self._head_bytes = -1
        self._due += len(body) / SENT_BYTES_MIN
        cycle = self.cycle
        if type(cycle) is not RequestCycle:
            super().on_body(body)
            return
        if cycle.refusal is not None:
            return
        size, receive_budget = len(body), self.receive_budget
        cycle.size_bytes += size
        receive_budget.bytes += size
        cycle.body.append(body)
        if cycle.size_bytes > self.body_bytes_max:
            cycle.refusal = too_large(self.body_bytes_max)
        elif receive_budget.bytes > receive_budget.bytes_max:
            cycle.refusal = receive_budget.full()
        if cycle.refusal is not None:
            cycle.drop_body(receive_budget)
            if cycle.started:
                self._answer(cycle, error_reply(cycle.refusal))
        elif not cycle.started and cycle.size_bytes > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._receiving = False
        self._head_bytes = -1
        cycle = self.cycle
        if type(cycle) is not RequestCycle:
            super().on_message_complete()
            return
        cycle.complete = True
        if cycle.started and cycle.refusal is None:
            self._submit_read(cycle)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Called by uvicorn when a request's turn has come."""
        if type(cycle) is RequestCycle:
            self._start(cycle)
        else:
            self._unset_keepalive_if_required()
            self._active = cycle
            super()._start_asgi_task(cycle, app)

    def _start(self, cycle: RequestCycle) -> None:
        self._timer.unset()  # set when the one before it, in the same segment, was answered
        cycle.started = True
        self._active = cycle
        if cycle.refusal is not None:
            self._answer(cycle, error_reply(cycle.refusal))
            return
        if cycle.expect_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if cycle.complete:
            self._submit_read(cycle)

    def _submit_read(self, cycle: RequestCycle) -> None:
        parts = cycle.body
        cycle.drop_body(self.receive_budget)
        self._submit(cycle, parts[0] if len(parts) == 1 else b"".join(parts))

    def _submit(self, cycle: RequestCycle, body: bytes) -> None:
        model, version = cycle.path
        try:
            ticket = self.infer.submit(model, version, cycle.headers, body, cycle.done)
        except Exception as error:
            failure = unexpected("an infer post", error)
            if not cycle.answered:
                self._answer(cycle, error_reply(failure))
        else:
            if not cycle.answered:
                cycle.ticket = ticket

    def _answer(self, cycle: RequestCycle, reply: HttpReply) -> None:
        transport = self.transport
        if cycle.disconnected or transport.is_closing():
            return
        cycle.answered = True
        cycle.ticket = None  # an idle connection keeps nothing of its last request
        if self.drain.begun and not self.pipeline and not (self._receiving and cycle.complete):
            cycle.keep_alive = False  # nothing is behind it
        if len(reply.body) > SMALL_BYTES_MAX and not self.reply_budget.room(len(reply.body)):
            reply = error_reply(self.reply_budget.full())
        status, headers, body = reply
        if status == 200 and cycle.keep_alive:
            defaults, prefix = self.ok_prefix
            if defaults is not self.server_state.default_headers:  # uvicorn makes them anew for each second's date
                prefix = ok_prefix(self.server_state.default_headers)
                self.ok_prefix[:] = (self.server_state.default_headers, prefix)
            transport.write(b"%b%d\r\n%b\r\n%b" % (prefix, len(body), headers.lines, body))
        else:
            transport.write(head(reply, self.server_state.default_headers, cycle.keep_alive) + body)
        if self.flow.write_paused:
            self._blocked = cycle
            self.flow.pause_reading()
        else:
            self._finish(cycle)

    def _finish(self, cycle: RequestCycle) -> None:
        cycle.response_complete = True
        if cycle.keep_alive:
            self.on_response_complete()
        else:
            self._hang_up(cycle)

    def on_response_complete(self) -> None:
        """Called by both kinds of cycles: the next request's turn, or the wait for one."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self._take_turn()

    def _take_turn(self) -> None:
        if self.flow.write_paused:
            self._blocked = self._active
            self.flow.pause_reading()
        elif self.pipeline:
            self._advance()
        else:
            if self.flow.read_paused:
                self.flow.resume_reading()
            self._timer.set(self.timeout_keep_alive)

    def _advance(self) -> None:
        """Start what waits, in a loop: a handler that answers at once would come back here for each request."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.pipeline and self._active.response_complete and not self.transport.is_closing():
                cycle, app = self.pipeline.pop()
                if len(self.pipeline) < PIPELINE_MAX:
                    self.flow.resume_reading()
                self._start_asgi_task(cycle, app)
        finally:
            self._advancing = False
        if self._receiving:
            self._await_rest()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is answered like every other mistake: in JSON, and in its turn."""
        self._refuse(Failure(Code.INVALID, msg))

    def _refuse(self, failure: Failure) -> None:
        """Take no more from this client. It gets the replies that it waits for, then this refusal."""
        if self.cycle is CLOSED:
            return
        refusal = refused(failure, self._answer)
        broken, self.cycle = self.cycle, refusal
        self._receiving = False
        self._deafen()
        if broken is not None and not broken.response_complete:
            if is_whole(broken):
                self.pipeline.appendleft((refusal, None))
                return
            if type(broken) is RequestCycle:
                broken.drop_body(self.receive_budget)
            if self.pipeline:
                self.pipeline[0] = (refusal, None)
                return
            broken.disconnected = True
            broken.message_event.set()
        self._start(refusal)

    def shutdown(self) -> None:
        """Called by the server: close if nobody waits for anything here. A request of which a part came is whole soon."""
        if not (self.drain.begun and self._receiving and self.cycle is not CLOSED):
            super().shutdown()

    def _deafen(self) -> None:
        self.transport.set_protocol(DiscardProtocol(self))
        self.flow.resume_reading()

    def _hang_up(self, cycle: RequestCycle) -> None:
        """After the last reply. If the client may still be sending, give it a moment to read it."""
        self.server_state.total_requests += 1
        while self.pipeline:
            waiting, _ = self.pipeline.pop()
            if type(waiting) is RequestCycle:
                waiting.drop_body(self.receive_budget)
        self.cycle = CLOSED
        if cycle.complete:
            self.transport.close()
            return
        self._receiving = False
        self._deafen()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer.unset()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, self.transport.abort)


def _replying(cycle: Any) -> bool:
    """Whether a reply has begun to go out; nothing else may be written into it."""
    return (
        cycle is not None and type(cycle) is not RequestCycle and cycle.response_started and not cycle.response_complete
    )


def _too_slow() -> Failure:
    return Failure(
        Code.SLOW,
        f"the request came too slowly: send {SENT_BYTES_MIN >> 10} KiB a second or more (MILLSTREAM_CLIENT_STALL_S_MAX bounds how "
        "long it may be less)",
    )


def fast_path_protocol(
    infer: InferHandler,
    body_bytes_max: int,
    connections_max: int,
    receive_budget: ReceiveBudget,
    reply_budget: ReplyBudget,
    client_stall_s_max: float = 60.0,
    drain: Drain | None = None,
) -> type[FastPathProtocol]:
    """The protocol class of a server whose infer posts `infer` answers.

    `client_stall_s_max`: how long a client may be slow with a request, or with reading a reply. `drain`: None: it never is.
    """
    return type(
        "FastPathProtocol",
        (FastPathProtocol,),
        {
            "infer": infer,
            "body_bytes_max": body_bytes_max,
            "connections_max": connections_max,
            "receive_budget": receive_budget,
            "reply_budget": reply_budget,
            "client_stall_s_max": client_stall_s_max,
            "drain": drain or Drain(),
            "paths": {},
            "heads": {},
            "ok_prefix": [None, b""],
        },
    )
