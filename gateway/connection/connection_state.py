"""connection_state: the fields of one HTTP connection of the fast path, and the states that they encode.

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

from collections import deque
from typing import Any, ClassVar

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate
from millstream.gateway.connection.body_receiver import BodyReceiver
from millstream.gateway.connection.bounded_protocol import BoundedProtocol
from millstream.gateway.connection.foreign_protocol import ForeignLog
from millstream.gateway.connection.head_cache import CachedHead, HeadCache
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.infer_handler import InferHandler
from millstream.gateway.connection.path_cache import PathCache
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.connection.reply_budget import ReplyBudget
from millstream.gateway.connection.request_cycle import CLOSED, RequestCycle
from millstream.services.segments.shared_buffers import SharedBuffers


class ConnectionState(BoundedProtocol):
    """The fields of a connection. `fast_path_protocol` sets the class variables, which a server's connections share."""

    infer: ClassVar[InferHandler]
    body_bytes_max: ClassVar[int]
    receive_budget: ClassVar[ReceiveBudget]
    reply_budget: ClassVar[ReplyBudget]
    http_counts: ClassVar[HttpCounts]
    gate: ClassVar[Gate]
    browser_guard: ClassVar[BrowserGuard]
    foreign_log: ClassVar[ForeignLog]
    paths: ClassVar[PathCache]
    heads: ClassVar[HeadCache]
    shared_buffers: ClassVar[SharedBuffers | None]
    ok_prefix: ClassVar[list[Any]]  # [default headers, head of a 200 with them up to the length]

    cycle: Any  # the request read last: a RequestCycle, or uvicorn's own
    pipeline: deque[tuple[Any, Any]]  # (cycle, ASGI app) of the requests after `_active`, the next one at the right

    _active: Any = None  # the request whose turn it is
    _blocked: Any = None  # an answered request whose client has yet to read the reply
    _advancing = False  # `_advance` runs
    _answers = 0  # infer requests answered since the last rest
    _resting = False  # no further request starts in this turn of the event loop
    _unread_bytes = 0  # bytes of unread replies that `reply_budget` counts

    _cached_head: CachedHead | None = None  # the entry of `heads` that the connection used last
    _receiver: BodyReceiver | None = None  # reads in place of the connection; None: it had no large body
    _upgrade = False  # the current head has an Upgrade header
    _cycle_before_upgrade: Any = CLOSED  # `cycle`, while a head that offers another protocol is being read

    def _unset_keepalive_if_required(self) -> None:
        self._timer.unset()


def is_replying(cycle: Any) -> bool:
    """Whether the ASGI app has sent a part of its reply: until the reply ends, nothing else may be written."""
    return (
        cycle is not None and type(cycle) is not RequestCycle and cycle.response_started and not cycle.response_complete
    )
