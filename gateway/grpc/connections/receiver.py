"""receiver: reads the messages of calls, and bounds the memory and the time that half-received messages take.

The gRPC library holds a message until it is complete, and does not report how much it holds. The kernel reports how
many bytes came over a connection: the bytes since its oldest unfinished read began, less the messages delivered since,
are an upper bound on what its unfinished messages hold. These bytes count in the receive budget of the gateway.

    read ─> (ends within TICK_S: not tracked) ─> tracked by connection ─> held bytes count in the budget
    over the budget, too slow, or too many ─> the oldest reads fail
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from grpc.aio import EOF

from millstream.gateway.connection.bounded_protocol import SENT_BYTES_MIN
from millstream.gateway.connection.receive_budget import SMALL_BYTES_MAX, ReceiveBudget
from millstream.gateway.grpc.connections.periodic_check import PeriodicCheck
from millstream.gateway.grpc.connections.tcp_info import Address, address_of
from millstream.services.errors import Code, Failure, invalid

#: period of the checks of unfinished reads; between two checks a client can send any number of bytes
TICK_S = 0.025
#: younger reads are not ended to make room for others
CROWDED_S_MIN = 1.0
_SMALL_BYTES_MAX = 16 * 1024  # smaller unary messages that were delivered at once are not counted as delivered
_DELIVERED_MAX = 10_000  # connections whose delivered bytes are counted; then those without open reads are dropped
_SEEN_MAX = 4  # measurements kept for each connection
#: HTTP/2 and gRPC framing: payload of a frame, its head, and the prefix of a message
_FRAME_BYTES, _FRAME_HEAD_BYTES, _PREFIX_BYTES = 16384, 9, 5


def no_message() -> Failure:
    """Return the failure of a unary call without a message."""
    return invalid("the call ended without a message")


def crowded(reads_max: int) -> Failure:
    """Return the failure of the oldest of too many calls whose requests do not arrive."""
    busy = f"more than {reads_max} calls wait for their requests, this one longest; try again later"
    return Failure(Code.UNAVAILABLE, busy, retry_after_s=1)


class _Read:
    """An unfinished read of one call.

    Args:
        timed: whether its duration is bounded; it is not for a stream, which may be silent between messages.
    """

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


def _raise_failure(read: _Read) -> None:
    """Raise the failure for which the read was cancelled, unless its call was cancelled, too."""
    if read.failure is not None and read.task.uncancel() == 0:
        raise read.failure from None


class _ReceivingConnection:
    """A connection with unfinished reads.

    `received`: bytes received, less those delivered in messages. `moved`: the last instant at which another
    SENT_BYTES_MIN bytes had been received; `moved_bytes`: the bytes received by then.
    """

    __slots__ = ("moved", "moved_bytes", "peer", "reads", "received", "seen", "timed")

    def __init__(self, peer: Address) -> None:
        self.peer = peer
        self.received = 0
        self.seen: deque[tuple[float, int]] = deque(maxlen=_SEEN_MAX)  # `received` at the last measurements
        self.moved = 0.0
        self.moved_bytes = 0
        self.reads: dict[_Read, None] = {}  # the oldest first
        self.timed: dict[_Read, None] = {}

    def received_at(self, instant: float) -> int:
        """Return `received` at the last measurement before `instant`; 0 if there is none, so that every byte counts."""
        return next((received for at, received in reversed(self.seen) if at <= instant), 0)

    @property
    def held_bytes(self) -> int:
        oldest = next(iter(self.reads), None)
        return 0 if oldest is None else max(0, self.received - oldest.mark)


class Receiver(PeriodicCheck):
    """Reads for all calls of a server.

    Args:
        receive_budget: the gateway's receive budget.
        client_stall_s_max: seconds for which a call may send less than SENT_BYTES_MIN a second.
        reads_max: limit on unfinished reads; beyond it the oldest are ended.
    """

    def __init__(self, receive_budget: ReceiveBudget, client_stall_s_max: float, reads_max: int) -> None:
        super().__init__(TICK_S)
        self._receive_budget = receive_budget
        self._slow_s_max = client_stall_s_max
        self._reads_max = reads_max
        self._new: dict[_Read, None] = {}  # the oldest first
        self._tracked: dict[_Read, None] = {}
        self._by_peer: dict[Address, _ReceivingConnection] = {}
        self._delivered: dict[Address, int] = {}
        self._held_bytes = 0  # of all connections, as counted in the budget

    def close(self) -> None:
        super().close()
        self._charge(0)

    async def message(self, context: Any) -> bytes:
        """Return the message of a unary call. Raises Failure: INVALID (no message), UNAVAILABLE, EXPIRED."""
        body = await self._body(context, timed=True)
        if body is EOF:
            raise no_message()
        message: bytes = body
        return message

    async def next(self, context: Any) -> bytes | None:
        """Return the next message of a stream; None: the client has ended it. Raises Failure(UNAVAILABLE)."""
        body = await self._body(context, timed=False)
        return None if body is EOF else body

    async def _body(self, context: Any, *, timed: bool) -> Any:
        """Return the next message of a call, counted while it arrives; EOF: the call sends no more."""
        read = self._begin(context, timed=timed)
        body = EOF
        try:
            body = await context.read()
        except asyncio.CancelledError:
            _raise_failure(read)
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
            self._start_timer(loop)
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

    def _check(self, now: float) -> bool:
        self._track(now)
        for connection in self._by_peer.values():
            self._measure(connection, now)
        self._end_slow(now)
        self._end_oldest(now)
        self._charge(sum(connection.held_bytes for connection in self._by_peer.values()))
        self._make_room()
        return bool(self._new or self._tracked)

    def _track(self, now: float) -> None:
        """Track reads that began TICK_S ago and have not ended."""
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
                del self._delivered[connection.peer]  # these were bytes of an earlier connection with this address
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
            read.fail(crowded(self._reads_max))

    def _charge(self, held_bytes: int) -> None:
        self._receive_budget.bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes

    def _make_room(self) -> None:
        """While the budget is exceeded, end the reads of the connection with the oldest read.

        Ending the connection with most bytes would favour a client with many connections over one large message.
        """
        over_bytes = self._receive_budget.bytes - self._receive_budget.bytes_max
        if over_bytes <= 0:
            return
        for connection in sorted(self._by_peer.values(), key=lambda connection: next(iter(connection.reads)).began):
            if over_bytes <= 0:
                break
            if connection.held_bytes < SMALL_BYTES_MAX:
                continue
            over_bytes -= connection.held_bytes
            failure = self._receive_budget.refusal()
            for read in connection.reads:
                read.fail(failure)
