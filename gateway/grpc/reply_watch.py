"""reply_watch: ends the connections of clients that do not take the replies of their calls.

The library holds a reply until the client's windows let it go. A call that has been answered cannot be taken back, so what
ends is its connection.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from gateway.grpc.connections import Connections, address_of

log = logging.getLogger("millrace.grpc")

LOOK_S = 0.5
READ_BYTES_MIN = 64 * 1024  # a client that reads so many a second is not slow


class ReplyWatch:
    """All calls in the event loop. `slow_s_max`: how long a client may read less than READ_BYTES_MIN a second."""

    def __init__(self, slow_s_max: float) -> None:
        self._slow_s_max = slow_s_max
        self._connections: Connections | None = None
        self._due: dict[Any, float] = {}  # by context of the call: when its reply must have gone
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, port: int) -> None:
        """The server's port, once it is known."""
        self._connections = Connections(port)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def call(self, context: Any) -> None:
        """A call begins: from now on its end is noticed."""
        context.add_done_callback(self.end)

    def begin(self, context: Any, size_bytes: int) -> None:
        """A reply of a call, or its status, is given to the library."""
        loop = asyncio.get_running_loop()
        self._due[context] = loop.time() + self._slow_s_max + size_bytes / READ_BYTES_MIN
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look, loop)

    def end(self, context: Any) -> None:
        """The transport has it, or the call is over."""
        self._due.pop(context, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        late = [context for context, due in self._due.items() if due <= now]
        for peer in {address_of(context.peer()) for context in late}:
            if self._connections is not None and self._connections.reset(peer):
                log.warning("the connection of %s port %d ends: its replies are not read", *peer)
        for context in late:
            self._due[context] = now + self._slow_s_max  # its end is noticed in a moment
        if self._due:
            self._timer = loop.call_later(LOOK_S, self._look, loop)
