"""receiver: reads the messages of calls, and bounds what half-received ones take and how long they may take.

The library holds a message until all of it is there, and does not tell how much that is. The kernel tells how many bytes
came over a connection: what came since its oldest unfinished read began, less the messages that were delivered since, is
what the connection's unfinished messages hold at most. These bytes count in the receive budget of the gateway.

    read ─> (done within TICK_S: never looked at) ─> tracked by connection ─> held bytes count in the budget
    over the budget, too slow, or too many ─> the oldest reads fail
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from grpc.aio import EOF

from millstream.gateway.connection.receive_budget import SMALL_BYTES_MAX, ReceiveBudget
from millstream.gateway.protocols.grpc.tcp_info import Address, TcpConnections, address_of
from millstream.services.errors import Code, Failure, invalid

#: how often unfinished reads are looked at: what a client can send in between is not bounded
TICK_S = 0.025
SENT_BYTES_MIN = 64 * 1024  # a client that sends so many a second is not slow
#: reads younger than this are not ended to make room for others
CROWDED_S_MIN = 1.0
#: a message of 16 KiB comes in a frame with so many bytes of head, behind its own prefix
_SMALL_BYTES_MAX = 16 * 1024  # a unary message that is not worth being noted when it was delivered at once
_DELIVERED_MAX = 10_000  # connections of which it is known what they delivered
_SEEN_MAX = 4
_FRAME_BYTES, _FRAME_HEAD_BYTES, _PREFIX_BYTES = 16384, 9, 5


class _Read:
    """An unfinished read of one call. `timed`: it may not take for ever; a stream may be silent between messages."""

    __slots__ = ("began", "connection", "context", "failure", "mark", "task", "timed")

    def __init__(self, context: Any, task: Any, began: float, *, timed: bool) -> None:
        self.context = context
        self.task = task
        self.began = began
        self.timed = timed
        self.failure: Failure | None = None
        self.connection: _ReceivingConnection | None = None
        self.mark = 0

    def fail(self, failure: Failure) -> None:
        """End the call with `failure`."""
        if self.failure is None:
            self.failure = failure
            self.task.cancel()


def _tell(read: _Read) -> None:
    """Raise the failure for which the read was cancelled, if it was and its call was not."""
    if read.failure is not None and read.task.uncancel() == 0:
        raise read.failure from None


class _ReceivingConnection:
    """A connection with unfinished reads. `received`: bytes that came, less those that were delivered in messages.

    `moved`: when SENT_BYTES_MIN bytes more had come than the time before, `moved_bytes`.
    """

    __slots__ = ("moved", "moved_bytes", "peer", "reads", "received", "seen", "timed")

    def __init__(self, peer: Address) -> None:
        self.peer = peer
        self.received = 0
        self.seen: deque[tuple[float, int]] = deque(maxlen=_SEEN_MAX)  # `received` at the last looks
        self.moved = 0.0
        self.moved_bytes = 0
        self.reads: dict[_Read, None] = {}  # the oldest first
        self.timed: dict[_Read, None] = {}

    def received_at(self, instant: float) -> int:
        """At the last look before `instant`; 0, so that all that ever came counts, where there was none."""
        return next((received for at, received in reversed(self.seen) if at <= instant), 0)

    @property
    def held_bytes(self) -> int:
        oldest = next(iter(self.reads), None)
        return 0 if oldest is None else max(0, self.received - oldest.mark)


class Receiver:
    """Reads for all calls of a server. All calls in the event loop.

    Args:
        inbound: the gateway's receive budget.
        slow_s_max: how long a call may send less than SENT_BYTES_MIN a second.
        reads_max: unfinished reads; beyond it the oldest are ended.
    """

    def __init__(self, receive_budget: ReceiveBudget, client_stall_s_max: float, reads_max: int) -> None:
        self._receive_budget = receive_budget
        self._slow_s_max = client_stall_s_max
        self._reads_max = reads_max
        self._connections: TcpConnections | None = None
        self._new: dict[_Read, None] = {}  # the oldest first
        self._tracked: dict[_Read, None] = {}
        self._by_peer: dict[Address, _ReceivingConnection] = {}
        self._delivered: dict[Address, int] = {}
        self._held_bytes = 0  # of all, as they count in the budget
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, port: int) -> None:
        """The server's port, once it is known."""
        self._connections = TcpConnections(port)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._charge(0)

    async def message(self, context: Any) -> bytes:
        """The one message of a unary call. Raises Failure: INVALID (there is none), UNAVAILABLE, EXPIRED."""
        body = await self._body(context, timed=True)
        if body is EOF:
            raise invalid("the call ended without a message")
        message: bytes = body
        return message

    async def next(self, context: Any) -> bytes | None:
        """The next message of a stream; None: the client has ended it. Raises Failure(UNAVAILABLE)."""
        body = await self._body(context, timed=False)
        return None if body is EOF else body

    async def _body(self, context: Any, *, timed: bool) -> Any:
        """What the call sends next, counted while it arrives; EOF: nothing more."""
        read = self._begin(context, timed=timed)
        body = EOF
        try:
            body = await context.read()
        except asyncio.CancelledError:
            _tell(read)
            raise
        finally:
            self._end(read, body)
        return body

    def _begin(self, context: Any, *, timed: bool) -> _Read:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        read = _Read(context, task, loop.time(), timed=timed)
        self._new[read] = None
        if self._timer is None:
            self._timer = loop.call_later(TICK_S, self._tick, loop)
        return read

    def _end(self, read: _Read, body: Any) -> None:
        if read.connection is None:
            del self._new[read]
            if self._by_peer or not read.timed or len(body or b"") > _SMALL_BYTES_MAX:
                self._deliver(address_of(read.context.peer()), body)
        else:
            self._deliver(read.connection.peer, body)
            self._untrack(read)

    def _deliver(self, peer: Address, body: Any) -> None:
        connection = self._by_peer.get(peer)
        if body is EOF:
            return
        size = len(body)
        delivered = size + _PREFIX_BYTES + _FRAME_HEAD_BYTES * -(-size // _FRAME_BYTES)
        if connection is not None:
            connection.received -= delivered
        if len(self._delivered) >= _DELIVERED_MAX:
            self._delivered = {known: count for known, count in self._delivered.items() if known in self._by_peer}
        self._delivered[peer] = self._delivered.get(peer, 0) + delivered

    def _untrack(self, read: _Read) -> None:
        connection = read.connection
        assert connection is not None
        del self._tracked[read], connection.reads[read]
        connection.timed.pop(read, None)
        if not connection.reads:
            del self._by_peer[connection.peer]

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        self._track(now)
        for connection in self._by_peer.values():
            self._measure(connection, now)
        self._end_slow(now)
        self._end_oldest(now)
        self._charge(sum(connection.held_bytes for connection in self._by_peer.values()))
        self._make_room()
        if self._new or self._tracked:
            self._timer = loop.call_later(TICK_S, self._tick, loop)

    def _track(self, now: float) -> None:
        """Have a closer look at reads that began TICK_S ago and have not ended."""
        old = []
        for read in self._new:
            if read.began > now - TICK_S:
                break
            old.append(read)
        for read in old:
            peer = address_of(read.context.peer())
            connection = self._by_peer.get(peer)
            if connection is None:
                connection = self._by_peer[peer] = _ReceivingConnection(peer)
                self._measure(connection, now)
            del self._new[read]
            read.connection, read.mark = connection, connection.received_at(read.began)
            self._tracked[read] = connection.reads[read] = None
            if read.timed:
                connection.timed[read] = None

    def _measure(self, connection: _ReceivingConnection, now: float) -> None:
        if self._connections is None:
            return
        traffic = self._connections.bytes_of(connection.peer)
        if traffic is not None:
            received = traffic.received
            if received < self._delivered.get(connection.peer, 0):
                del self._delivered[connection.peer]  # of a connection before this one
            connection.received = received - self._delivered.get(connection.peer, 0)
            connection.seen.append((now, connection.received))
            if received >= connection.moved_bytes + SENT_BYTES_MIN:
                connection.moved, connection.moved_bytes = now, received

    def _end_slow(self, now: float) -> None:
        for connection in self._by_peer.values():
            earned_s = connection.held_bytes / SENT_BYTES_MIN / max(1, len(connection.timed))
            for read in connection.timed:
                patience_s = min(earned_s, max(0.0, connection.moved - read.began))
                if now < read.began + self._slow_s_max + patience_s:
                    break
                slow = f"the request came slower than {SENT_BYTES_MIN} bytes a second for {self._slow_s_max:g} s"
                read.fail(Failure(Code.EXPIRED, slow))

    def _end_oldest(self, now: float) -> None:
        surplus = len(self._tracked) - self._reads_max
        for read in self._tracked:
            if surplus <= 0 or now < read.began + CROWDED_S_MIN:
                break
            surplus -= 1
            busy = f"more than {self._reads_max} calls wait for their requests, this one longest; try again later"
            read.fail(Failure(Code.UNAVAILABLE, busy, retry_after_s=1))

    def _charge(self, held_bytes: int) -> None:
        self._receive_budget.bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes

    def _make_room(self) -> None:
        """While all bodies take more than the budget, end the reads of the connection whose oldest read is oldest.

        The one that holds most would be the wrong choice: a client with many connections would outlast one large message.
        """
        over_bytes = self._receive_budget.bytes - self._receive_budget.bytes_max
        if over_bytes <= 0:
            return
        for connection in sorted(self._by_peer.values(), key=lambda one: next(iter(one.reads)).began):
            if over_bytes <= 0:
                break
            if connection.held_bytes < SMALL_BYTES_MAX:
                continue
            over_bytes -= connection.held_bytes
            failure = self._receive_budget.refusal()
            for read in connection.reads:
                read.fail(failure)
