"""tls_handshakes: a bound on connections that have yet to complete their TLS handshake.

Beyond it the oldest goes: a client that means it completes its handshake in two round trips, and one that opens
connections and sends nothing has the oldest ones.
"""

from __future__ import annotations

from typing import Protocol

#: connections of one gateway whose handshake is not complete; each has a file descriptor and, once its client has sent
#: something, some 60 KiB. Beyond, the oldest is reset.
HANDSHAKES_MAX = 1024
#: seconds for a handshake, from the connection's beginning; then it is reset
HANDSHAKE_S_MAX = 10.0


class Handshaking(Protocol):
    """A connection whose handshake is not complete."""

    def abort(self) -> None:
        """Reset the connection."""


class Handshakes:
    """The handshakes of one gateway. Use it in the event loop's thread.

    Args:
        count_max: Limit on handshakes at one time.
    """

    def __init__(self, count_max: int = HANDSHAKES_MAX) -> None:
        self._count_max = count_max
        self._open: dict[Handshaking, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Handshaking) -> None:
        """Count a new connection, and reset the oldest one if there are too many."""
        if len(self._open) >= self._count_max:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.abort()
        self._open[connection] = None

    def leave(self, connection: Handshaking) -> None:
        """Stop counting a connection: its handshake is complete, or it is lost. Idempotent."""
        self._open.pop(connection, None)

    def abort(self) -> None:
        """Reset all connections that are counted: the gateway shuts down."""
        for connection in list(self._open):
            self.leave(connection)
            connection.abort()
