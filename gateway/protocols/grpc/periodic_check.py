"""PeriodicCheck: a timer that runs while a gRPC server has connections to check, and access to these connections."""

from __future__ import annotations

import asyncio

from millstream.gateway.protocols.grpc.tcp_info import TcpConnections


class PeriodicCheck:
    """Base of what checks connections. Use it in one event loop.

    Calls `_check` every `period_s` from `_start_timer` on, until `_check` returns False.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._connections: TcpConnections | None = None
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, port: int) -> None:
        """Find connections by the server's `port`, now that it is known."""
        self._connections = TcpConnections(port)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call where `_timer` is None and there is something to check."""
        self._timer = loop.call_later(self._period_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._check(loop.time()):
            self._start_timer(loop)

    def _check(self, now: float) -> bool:
        """Check what there is at the instant `now`; return whether anything is left to check."""
        raise NotImplementedError
