"""periodic_check: a timer that runs while a gRPC server has connections to check, and access to these connections."""

from __future__ import annotations

import asyncio

from millstream.gateway.grpc.connections.tcp_info import TcpConnections


class PeriodicCheck:
    """Base class for checks of connections. Use it in one event loop.

    Calls `_check` every `period_s` from `_start_timer` on, until `_check` returns False.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._connections: TcpConnections | None = None
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, port: int) -> None:
        """Check the connections of the server on `port`."""
        self._connections = TcpConnections(port)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the timer. Call it when `_timer` is None and there is something to check."""
        self._timer = loop.call_later(self._period_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._check(loop.time()):
            self._start_timer(loop)

    def _check(self, now: float) -> bool:
        """Run the check at the instant `now`. Returns whether there is still something to check."""
        raise NotImplementedError
