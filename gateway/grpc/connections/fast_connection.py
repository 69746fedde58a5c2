"""Drives the pure HTTP/2 connection with a transport, and starts the calls that arrive on it.

transport ─> Connection.receive ─> FastCall ─> handler ……… replies ─> one write for each turn of the event loop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from millstream.gateway.connection.bounded_protocol import LINGER_S, WriteStallGuard
from millstream.gateway.connection.budgets import BodyReservation, ReceiveBudget
from millstream.gateway.grpc.connections import message_framing
from millstream.gateway.grpc.connections.call_head import ENCODINGS, CallHead, read_head
from millstream.gateway.grpc.connections.fast_call import FastCall
from millstream.gateway.grpc.connections.message_framing import Allocate
from millstream.gateway.http2.connection import Http2Connection
from millstream.gateway.http2.events import ConnectionEnded, DataReceived, Event, RequestStarted, StreamReset
from millstream.gateway.http2.limits import ConnectionLimits

_Code = grpc.StatusCode
INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass
class Parts:
    """What all connections of a server share."""

    find: Callable[[str], Any]  # method -> its handler, one of grpc's; None: there is none. Counts the call
    receive_budget: ReceiveBudget
    limits: ConnectionLimits  # of a connection
    connections_max: int  # open connections; more are closed
    calls_max: int  # calls that have not ended, over all connections
    message_bytes_max: int
    stall_s_max: float  # seconds that a client may be late when it sends a request or reads a reply
    age_s_max: Callable[[], float]  # seconds after which a connection is drained
    age_grace_s: float  # seconds after that until it is closed with its calls
    #: Whether `infer` may take a call of ModelInfer with this head. Otherwise its handler starts at once, and refuses a
    #: caller without a right key before the message comes.
    may_infer: Callable[[CallHead], bool]
    #: Submits a call of ModelInfer whose message is complete. Returns False if its handler has to take the call.
    infer: Callable[[FastCall], bool]
    memory: Allocate  # for a large message that `infer` would take
    gave_up: Callable[[FastCall], None]  # notes that a call that `infer` would take ended before its message
    connections: set[FastConnection] = field(default_factory=set)
    calls: int = 0
    draining: bool = False  # the server drains: new connections, too


class FastConnection(asyncio.Protocol):
    """One connection. Use it in the event loop's thread."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.loop = asyncio.get_running_loop()
        self.reservation = BodyReservation(parts.receive_budget, "")
        self.peer = self.address = ""  # of the client: as the library writes it, and the address alone
        self.calls: dict[int, FastCall] = {}
        now = self.loop.time()
        self.h2: Http2Connection[CallHead] = Http2Connection(read_head, parts.limits, now)
        self._drain_at = now + parts.age_s_max()
        self._end_at = self._drain_at + parts.age_grace_s
        self._writing = False  # a write is due in this turn of the loop
        self._paused = False
        self._behind = False  # received frames wait for the next turn of the loop
        self._lingering: asyncio.TimerHandle | None = None  # of a connection whose output has ended
        self._transport: asyncio.Transport
        self._stall: WriteStallGuard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._stall = WriteStallGuard(self.loop, transport, self.parts.stall_s_max)
        name = transport.get_extra_info("peername")
        self.peer = _peer(name)
        self.address = self.reservation.caller = name[0] if isinstance(name, tuple) else "unix"
        if len(self.parts.connections) >= self.parts.connections_max:
            transport.abort()
            return
        self.parts.connections.add(self)
        if self.parts.draining:
            self.h2.drain(self.loop.time())
        self.touch()

    def connection_lost(self, _: Exception | None) -> None:
        self.parts.connections.discard(self)
        self._stall.end()
        if self._lingering is not None:
            self._lingering.cancel()
        self._lose_calls()
        self.h2.abandon()

    def _lose_calls(self) -> None:
        for call in list(self.calls.values()):
            call.lost()

    def pause_writing(self) -> None:
        """Read no more either: what is read would be answered."""
        self._paused = True
        self.h2.pause()
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._stall.begin()

    def _may_read(self) -> None:
        if not (self._paused or self._behind or self._transport.is_closing()):
            self._transport.resume_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self.h2.resume()
        self._stall.end()
        if self._behind:
            self.loop.call_soon(self._catch_up)
        self._may_read()
        self.touch()

    def eof_received(self) -> bool:
        """Close: a client that sends no more acknowledges no frames."""
        return False

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            return
        now = self.loop.time()
        self._on_events(self.h2.receive(data, now), now)
        self._note_rest()
        self.touch()

    def _note_rest(self) -> None:
        """Read nothing more while received frames wait: connections take turns."""
        if self.h2.unread:
            self._behind = True
            self._transport.pause_reading()
            self.loop.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        """Take the next frames that wait, unless the client has to read replies first."""
        if not self._behind or self._paused or self._transport.is_closing():
            return
        self._behind = False
        if self._lingering is not None:
            self._may_read()
            return
        now = self.loop.time()
        self._on_events(self.h2.receive_rest(now), now)
        self._note_rest()
        self._may_read()
        self.touch()

    def _on_events(self, events: list[Event[CallHead]], now: float) -> None:
        for event in events:
            kind = type(event)
            if kind is DataReceived:
                call = self.calls.get(event.stream)  # type: ignore[union-attr]
                if call is not None:
                    call.received(event.data, now, ended=event.ended)  # type: ignore[union-attr]
                    if call.pending is not None and not call.receiving:
                        self._submit(call)
            elif kind is RequestStarted:
                if event.stream in self.h2.streams:  # type: ignore[union-attr]  # not reset in the same turn
                    self._begin(event, now)  # type: ignore[arg-type]
            elif kind is StreamReset:
                call = self.calls.get(event.stream)  # type: ignore[union-attr]
                if call is not None:
                    call.lost()
            elif kind is ConnectionEnded:
                self._lose_calls()

    def _begin(self, event: RequestStarted[CallHead], now: float) -> None:
        number, head, ended = event
        block = self._refusal(head)
        handler = None if block is not None or head is None else self.parts.find(head.method)
        if head is None or handler is None:
            unknown = _status(_Code.UNIMPLEMENTED, "Method not found!")
            self.h2.headers(number, block or message_framing.trailers_only(*unknown), end=True)
            return
        call = self.calls[number] = FastCall(self, number, head, now, unary=handler.stream_unary is not None)
        self.parts.calls += 1
        if ended:
            call.received(b"", now, ended=True)
        elif head.plain and head.method == INFER and self.parts.may_infer(head):
            call.await_message(handler, self.parts.memory)
            return
        call.start(handler)

    def _submit(self, call: FastCall) -> None:
        """Submit a call whose message is complete; if only the handler can answer it, start the handler."""
        handler, call.pending = call.pending, None
        if not call.has_message or not self.parts.infer(call):
            call.start(handler)

    def _refusal(self, head: CallHead | None) -> bytes | None:
        """Return the reply to a request that starts no call; None: it starts one."""
        if head is None:
            status = _status(_Code.RESOURCE_EXHAUSTED, "received metadata size exceeds limit")
        elif head.http_status != 200:
            return message_framing.http_only(head.http_status)
        elif head.fault:
            status = _status(_Code.INTERNAL, head.fault)
        elif head.encoding not in ENCODINGS:
            name = head.encoding.decode("ascii", "replace")
            unknown = _status(_Code.UNIMPLEMENTED, f"Compression algorithm '{name}' is not supported.")
            return message_framing.trailers_only(*unknown, encodings=True)
        elif self.parts.calls >= self.parts.calls_max:
            status = _status(_Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        else:
            return None
        return message_framing.trailers_only(*status)

    def forget(self, number: int) -> None:
        """Drop a call that is over."""
        if self.calls.pop(number, None) is not None:
            self.parts.calls -= 1

    def touch(self) -> None:
        """Write what there is to write at the end of this turn of the loop."""
        if not self._writing:
            self._writing = True
            self.loop.call_soon(self._write)

    def _write(self) -> None:
        self._writing = False
        if self._transport.is_closing() or self._lingering is not None:
            return
        while pieces := self.h2.take_output():
            self._transport.write(b"".join(pieces))
            if self._paused:
                break
        for stream, ended in self.h2.take_sent():
            call = self.calls.get(stream)
            if call is not None:
                call.sent(ended=ended)
        if self.h2.closed:
            self._transport.close()
        elif self.h2.drained:
            self._linger()

    def _linger(self) -> None:
        """End the output, and discard input until the client closes.

        A client that reads its last replies sends window meanwhile. A socket that is closed would answer with a reset,
        which cuts the replies that are on their way.
        """
        self._transport.write_eof()
        self._lingering = self.loop.call_later(LINGER_S, self._transport.close)

    def check(self, now: float) -> None:
        """Do what the passing of time requires. Called a few times a second."""
        if self._lingering is not None:
            return
        self._on_events(self.h2.check(now), now)
        if now >= self._end_at:
            self.close()
            return
        if now >= self._drain_at:
            self.h2.drain(now)
        for call in list(self.calls.values()):
            call.check(now, self.parts.stall_s_max)
        self.touch()

    def drain(self) -> None:
        """Begin to close the connection without failing a call."""
        self.h2.drain(self.loop.time())
        self.touch()

    def close(self) -> None:
        """Close the connection. Its calls end."""
        self._lose_calls()
        self._write()
        self._transport.close()


def _status(code: grpc.StatusCode, message: str) -> tuple[int, str]:
    return code.value[0], message


def _peer(address: Any) -> str:
    """Return an address as the library writes it: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000."""
    if not isinstance(address, tuple):
        return "unix:"
    host, port = address[:2]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
