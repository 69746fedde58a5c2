"""stalled_replies: resets the connections of clients that do not take the replies of their calls.

The gRPC library holds a reply until the client's flow-control windows let it pass. A call that has been answered cannot
be cancelled, so its connection is reset.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from millstream.gateway.grpc.connections.periodic_check import PeriodicCheck
from millstream.gateway.grpc.connections.tcp_info import Address, TcpConnections, address_of

log = logging.getLogger("millstream.grpc")

CHECK_S = 0.5
READ_RATE_MIN = 64 * 1024  # bytes a second; a client that reads as much is not slow


class StalledReplies(PeriodicCheck):
    """Tracks the replies that the gRPC library holds.

    Args:
        client_stall_s_max: seconds for which a client may read less than READ_RATE_MIN of one reply, and for
            which its connection may take less than READ_RATE_MIN of all waiting replies.
    """

    def __init__(self, client_stall_s_max: float) -> None:
        super().__init__(CHECK_S)
        self._slow_s_max = client_stall_s_max
        #: context of a call -> (instant at which its reply began to wait, instant by which it must be taken)
        self._waiting: dict[Any, tuple[float, float]] = {}
        self._progress: dict[Address, tuple[int, float]] = {}  # (bytes taken at the last progress, its instant)

    def begin(self, context: Any, size_bytes: int) -> None:
        """Start the check of a reply. Call it before the library gets a reply or a status; call `end` afterwards."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._waiting[context] = now, now + self._slow_s_max + size_bytes / READ_RATE_MIN
        if self._timer is None:
            self._start_timer(loop)

    def end(self, context: Any) -> None:
        """Stop the check of a reply: the transport has it, or the call is over."""
        self._waiting.pop(context, None)

    def _check(self, now: float) -> bool:
        old = [(context, due) for context, (began, due) in self._waiting.items() if began <= now - self._slow_s_max]
        late: dict[Address, bool] = {}
        for context, due in old:
            peer = address_of(context.peer())
            late[peer] = late.get(peer, False) or due <= now
        self._progress = {peer: progress for peer, progress in self._progress.items() if peer in late}
        for peer, over in late.items():
            if self._connections is not None and (over or self._stuck(self._connections, peer, now)):
                self._progress.pop(peer, None)
                if self._connections.reset(peer):
                    log.warning("the connection of %s port %d is reset: its replies are not read", *peer)
        return bool(self._waiting)

    def _stuck(self, connections: TcpConnections, peer: Address, now: float) -> bool:
        """Whether a connection has taken less than READ_RATE_MIN of its replies for too long."""
        traffic = connections.bytes_of(peer)
        taken = 0 if traffic is None else traffic.acknowledged
        before, at = self._progress.setdefault(peer, (taken, now))
        if taken >= before + READ_RATE_MIN:
            self._progress[peer] = taken, now
            return False
        return now >= at + self._slow_s_max
