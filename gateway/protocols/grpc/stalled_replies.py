"""stalled_replies: ends the connections of clients that do not take the replies of their calls.

The library holds a reply until the client's windows let it go. A call that has been answered cannot be taken back, so what
ends is its connection.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from millstream.gateway.protocols.grpc.tcp_info import Address, TcpConnections, address_of

log = logging.getLogger("millstream.grpc")

LOOK_S = 0.5
READ_BYTES_MIN = 64 * 1024  # a client that reads so many a second is not slow


class StalledReplies:
    """All calls in the event loop.

    Args:
        slow_s_max: how long a client may read less than READ_BYTES_MIN a second of one reply, and how long its connection may
            take less than READ_BYTES_MIN of all replies that wait.
    """

    def __init__(self, client_stall_s_max: float) -> None:
        self._slow_s_max = client_stall_s_max
        self._connections: TcpConnections | None = None
        self._waiting: dict[
            Any, tuple[float, float]
        ] = {}  # by context of the call: since when, and when it must be over
        self._progress: dict[Address, tuple[int, float]] = {}  # bytes that a connection had taken, and when
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, port: int) -> None:
        """The server's port, once it is known."""
        self._connections = TcpConnections(port)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, context: Any, size_bytes: int) -> None:
        """A reply of a call, or its status, is given to the library. `end` must be called when the call is over."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._waiting[context] = now, now + self._slow_s_max + size_bytes / READ_BYTES_MIN
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look, loop)

    def end(self, context: Any) -> None:
        """The transport has it, or the call is over."""
        self._waiting.pop(context, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        old = [(context, due) for context, (began, due) in self._waiting.items() if began <= now - self._slow_s_max]
        late: dict[Address, bool] = {}
        for context, due in old:
            peer = address_of(context.peer())
            late[peer] = late.get(peer, False) or due <= now
        self._progress = {peer: seen for peer, seen in self._progress.items() if peer in late}
        for peer, over in late.items():
            if self._connections is not None and (over or self._stuck(self._connections, peer, now)):
                self._progress.pop(peer, None)
                if self._connections.reset(peer):
                    log.warning("the connection of %s port %d ends: its replies are not read", *peer)
        if self._waiting:
            self._timer = loop.call_later(LOOK_S, self._look, loop)

    def _stuck(self, connections: TcpConnections, peer: Address, now: float) -> bool:
        """Whether a connection with replies that have waited for long takes nothing of them."""
        traffic = connections.bytes_of(peer)
        taken = 0 if traffic is None else traffic.acknowledged
        before, at = self._progress.setdefault(peer, (taken, now))
        if taken >= before + READ_BYTES_MIN:
            self._progress[peer] = taken, now
            return False
        return now >= at + self._slow_s_max
