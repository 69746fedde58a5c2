"""Reads large bodies from the transport straight into shared memory, where workers read them.

head read in small pieces ─> its body is large ─> read into its SharedBuffer ─> complete ─> the next head …
                          ─> it is not ─> the transport gives segments to the connection again
A transport that gives out segments copies each; the parser copies it again, the whole body is joined, and its tensors
are copied into shared memory. Here the kernel's copy is the only one.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from millstream.gateway.connection.reply_order import RequestCycle

#: a smaller body, or rest of one, is copied: that takes less time than the change of the receiver
RECEIVED_BYTES_MIN = 32 * 1024
#: A head is read with so many bytes of its body, which are copied. A head that is larger comes in several pieces.
_HEAD_PIECE_BYTES = 4096
#: Heads, and input that no request keeps. All connections use it: what a read puts there is used before the next read.
_SCRATCH = memoryview(bytearray(64 * 1024))


class Connection(Protocol):
    """The parts of a connection that its receiver needs."""

    transport: asyncio.Transport

    def data_received(self, data: bytes) -> None: ...
    def body_received(self, size_bytes: int, *, complete: bool) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of a connection at its transport. States: body, as long as `_cycle` is set, else head."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cycle: RequestCycle | None = None
        self._left_bytes = 0  # of its body, that have not come

    def receive(self, cycle: RequestCycle, received_bytes: int) -> None:
        """Read the rest of a request's body. `cycle.body` is its whole buffer, with the first bytes in it."""
        self._cycle = cycle
        self._left_bytes = len(cycle.body[0]) - received_bytes
        transport = self._connection.transport
        if transport.get_protocol() is not self:
            transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        cycle = self._cycle
        if cycle is None:
            return _SCRATCH[:_HEAD_PIECE_BYTES]
        if not cycle.body:  # it was refused
            return _SCRATCH[: self._left_bytes]
        return cast("memoryview", cycle.body[0])[-self._left_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        cycle = self._cycle
        if cycle is None:
            self._head_received(bytes(_SCRATCH[:nbytes]))
            return
        self._left_bytes -= nbytes
        if not self._left_bytes:
            self._cycle = None
        self._connection.body_received(nbytes, complete=self._cycle is None)

    def _head_received(self, data: bytes) -> None:
        connection = self._connection
        connection.data_received(data)
        if self._cycle is None and connection.transport.get_protocol() is self:
            connection.transport.set_protocol(connection)  # type: ignore[arg-type]

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cycle = None
        self._connection.connection_lost(exc)
