"""lingering_close: stands in for a connection's protocol that wants no more input. What comes is dropped, the rest is passed on.

A socket that is closed with unread bytes in it is reset, and the reset can overtake the last reply. So whoever refuses
a client that is still sending goes deaf, says so, and waits a moment for the client to go.
"""

from __future__ import annotations

import asyncio


class DiscardProtocol(asyncio.Protocol):
    """For `protocol`, which may go on to write. The end of the input closes the connection."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
