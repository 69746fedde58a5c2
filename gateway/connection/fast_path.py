"""Infer posts answered in uvicorn's own HTTP protocol class, without ASGI scope, task or coroutine.

request_reader (parser callbacks) ─> InferHandler.submit ……… reply ─> reply_order ─> transport
Every other request goes on to the ASGI app.

The fast path keeps what uvicorn guarantees: replies in order on a pipelined connection, keep-alive and its timeout,
`Expect: 100-continue`, flow control both ways, graceful shutdown. Measured against the same handler behind ASGI it
serves twice the requests for a CPU second.

A connection reads and replies at the same time, because clients may pipeline. So it has a reading state and a
replying state at any time.

Reading: what the next bytes from the client belong to.

| state   | fields                                | left when                                 | for      |
|---------|---------------------------------------|-------------------------------------------|----------|
| idle    | not `_receiving`                      | a segment is one whole known infer post   | idle     |
|         |                                       | any other byte comes                      | head     |
|         |                                       | the keep-alive timer fires, or the server | closed   |
|         |                                       | drains, and no reply is owed              |          |
| head    | `_receiving`, not `_head_complete`    | the empty line comes                      | body     |
|         |                                       | an offer of another protocol comes        | upgrade  |
|         |                                       | it is malformed, too large or too slow    | refused  |
| body    | `_receiving`, `_head_complete`        | the last byte comes, also of trailers     | idle     |
|         |                                       | it is malformed, too slow or too large    | refused  |
|         |                                       | … and its request has its reply already   | closed   |
|         | (a large binary body: the transport   |                                           |          |
|         | gives its bytes to `_receiver`)       |                                           |          |
| upgrade | `cycle` is CLOSED and                 | the offer is dropped, the head read again | body     |
|         | `_cycle_before_upgrade` is not        | the offer is WebSocket's                  | (uvicorn)|
| refused | `cycle` is a refusal, input is        | the refusal's turn comes and it is sent   | closed   |
|         | discarded (DiscardProtocol)           |                                           |          |
| closed  | `cycle` is CLOSED                     | never: input is ignored or discarded      |          |

Replying: what happens to `_active`, the request whose turn it is. `pipeline` has the requests after it.

| state   | fields                                | left when                                 | for      |
|---------|---------------------------------------|-------------------------------------------|----------|
| idle    | `_active` is None, or its             | a request comes                           | waiting  |
|         | `response_complete`                   | `pipeline` has a request                  | waiting  |
| waiting | `_active` is not whole                | its last byte comes: it is submitted      | running  |
|         |                                       | it is over a limit: it gets the refusal   | replied  |
| running | `_active` is whole, not `answered`    | the handler or the ASGI app replies       | replied  |
| replied | `_active.answered`                    | the transport has room                    | idle     |
|         |                                       | the transport has none: `_blocked` is set | blocked  |
|         |                                       | the reply says `Connection: close`        | closing  |
| blocked | `_blocked` is `_active`               | the transport has room again              | idle,    |
|         |                                       |                                           | closing  |
|         |                                       | the client reads too little for too long  | (reset)  |
| closing | `cycle` is CLOSED                     | at once if the last request was whole and | (closed) |
|         |                                       | the gateway does not drain, else when the |          |
|         |                                       | client closes, or LINGER_S after the end  |          |
|         |                                       | of output was sent                        |          |

A connection that is lost in any state cancels what runs, drops the bodies that wait and stops all timers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, fields

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate
from millstream.gateway.connection.bounded_protocol import too_many_connections, too_slow
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.cors import Cors
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.foreign_protocol import ForeignLog
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.infer_handler import InferHandler
from millstream.gateway.connection.reply_order import CLOSED, RequestCycle, is_complete
from millstream.gateway.connection.request_head import HeadCache, PathCache
from millstream.gateway.connection.request_reader import RequestReader
from millstream.gateway.connection.uvicorn_hooks import check_parts
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.segments.shared_buffers import SharedBuffers


class FastPathProtocol(RequestReader):
    """One connection, from its first byte to its end.

    uvicorn creates protocols from a class alone, so `fast_path_protocol(...)` makes the class for a server.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        open_now = len(self.connections)
        if open_now > 2 * self.connections_max:
            transport.abort()  # refused connections stay open while they linger, and even these are too many
        elif open_now > self.connections_max:
            self._refuse(too_many_connections())
        else:
            self._arm_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        active = self._active
        for cycle in (active, self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if type(cycle) is RequestCycle and not cycle.disconnected:
                cycle.disconnected = True
                cycle.leave()
                cycle.drop_body(self.receive_budget)
                if cycle.ticket is not None and not cycle.answered:
                    cycle.ticket.cancel()
                cycle.ticket = None  # the ticket refers to the cycle
        if active is not None and not active.response_complete:
            active.disconnected = True  # uvicorn sets it only for the request read last
            active.message_event.set()
        self._count_unread(0)
        super().connection_lost(exc)
        self.cycle, self._active = CLOSED, None  # a cycle refers to its connection

    def _timed_out(self) -> None:
        active = self._active
        reply_owed = active is not None and not active.response_complete and is_complete(active)
        if reply_owed or self.flow.read_paused:
            self._read_deadline = self.loop.time() + self.client_stall_s_max
            self._arm_timer()  # the client is not late: it waits for a reply, or reading is paused
        elif self._receiving and not self._is_sending():
            self._refuse(too_slow())
        else:
            self.timeout_keep_alive_handler()

    def _is_sending(self) -> bool:
        """Whether the ASGI app has sent a part of its reply: until the reply ends, nothing else may be written."""
        cycle = self.cycle
        if cycle is None or type(cycle) is RequestCycle:
            return False
        return bool(cycle.response_started and not cycle.response_complete)

    def shutdown(self) -> None:
        """Close the connection if no request is in flight on it, else after its reply. Called by the server.

        While the server drains, a request that has partly arrived is still read and answered.
        """
        if not (self.drain.draining and self._receiving and self.cycle is not CLOSED):
            super().shutdown()


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """What the connections of a server share, beside its limits. The defaults are those of a server without them."""

    drain: Drain = field(default_factory=Drain)  # tells whether the server is draining
    http_counts: HttpCounts = field(default_factory=lambda: HttpCounts(MetricsRegistry(None, "uncounted")))
    gate: Gate = field(default_factory=Gate)  # checks the keys of requests
    browser_guard: BrowserGuard = field(default_factory=BrowserGuard)  # refuses calls of web pages of other origins
    cors: Cors | None = None  # lets web pages of other origins read replies; None: no page
    shared_buffers: SharedBuffers | None = None  # takes large binary bodies; None: there is no shared memory
    paths: PathCache = field(default_factory=PathCache)  # tells infer posts by their URLs


def fast_path_protocol(
    infer: InferHandler,
    body_bytes_max: int,
    connections_max: int,
    receive_budget: ReceiveBudget,
    reply_budget: ReplyBudget,
    client_stall_s_max: float = 60.0,
    context: ConnectionContext | None = None,
) -> type[FastPathProtocol]:
    """Return the protocol class of a server whose infer posts `infer` answers.

    Args:
        infer: Answers each infer post.
        body_bytes_max: Limit on one body; a larger one is refused.
        connections_max: Open connections; more are refused, and beyond twice as many, reset.
        receive_budget: Counts the bytes of bodies that have partly arrived.
        reply_budget: Counts the bytes of replies that clients have not read.
        client_stall_s_max: Seconds that a client may be late when it sends a request or reads a reply.
        context: What the connections share; None: its defaults.

    Raises:
        Failure: this version of uvicorn is not a tested one.
    """
    check_parts()
    context = context or ConnectionContext()
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
            "foreign_log": ForeignLog(time.monotonic),
            "heads": HeadCache(),
            "ok_prefix": [None, b""],
            **{one.name: getattr(context, one.name) for one in fields(context)},
        },
    )
