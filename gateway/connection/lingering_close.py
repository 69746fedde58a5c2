"""lingering_close: after a refusal, discard what the client still sends, so that it can read the reply.

A socket that is closed with unread input is reset, and the reset can overtake the last reply. So a connection that
refuses a client which is still sending discards its input, sends the refusal and waits briefly for the client to close.
"""

from __future__ import annotations

import asyncio


class DiscardProtocol(asyncio.Protocol):
    """Takes the place of `protocol`: discards input, passes other events on. End of input closes the connection."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
