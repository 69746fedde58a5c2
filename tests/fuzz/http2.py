"""Targets of the gRPC server on our own connections: frames, and header blocks beside another decoder."""

from __future__ import annotations

from hpack import Decoder
from hpack.exceptions import HPACKError

from millstream.gateway.grpc.connections.call_head import CallHead, read_head
from millstream.gateway.grpc.connections.message_framing import HEAD, MessageReader, trailers
from millstream.gateway.http2.connection import Http2Connection
from millstream.gateway.http2.events import ConnectionFault, DataReceived, Event, RequestStarted
from millstream.gateway.http2.header_blocks import HeaderReader, Headers
from millstream.gateway.http2.limits import ConnectionLimits
from millstream.services.errors import Failure
from tests.kit.http2_peer import GREETING, joined

MESSAGE_BYTES_MAX = 1 << 16
LIST_BYTES_MAX = 1 << 16
#: cuts the input of `fuzz_hpack` into header blocks
BETWEEN = b"\xff\xfe\xfd"


def fuzz_frames(data: bytes) -> None:
    """What a client sends after its greeting: pieces of it mean the same, and what is answered is accounted for."""
    whole, pieces = (Http2Connection(read_head, ConnectionLimits(), 0.0) for _ in range(2))
    for connection in (whole, pieces):
        connection.receive(GREETING, 0.0)
    events = whole.receive(data, 0.0)
    cut: list[Event[CallHead]] = []
    for at in range(0, len(data), 7):
        cut += pieces.receive(data[at : at + 7], 0.0)
    assert joined(events) == joined(cut)
    _answer(whole, events)


def _answer(connection: Http2Connection[CallHead], events: list[Event[CallHead]]) -> None:
    readers: dict[int, MessageReader] = {}
    for event in events:
        if isinstance(event, RequestStarted):
            reader = readers[event.stream] = MessageReader(MESSAGE_BYTES_MAX)
            if event.stream & 2:
                reader.allocate = lambda size_bytes, _: memoryview(bytearray(size_bytes))
        elif isinstance(event, DataReceived):
            try:
                for _, body in readers[event.stream].read(event.data):
                    connection.respond(event.stream, HEAD, b"", bytes(body), trailers(0))
            except Failure as failure:
                connection.headers(event.stream, HEAD + trailers(13, failure.message), end=True)
            connection.consume(event.stream, len(event.data))
    while connection.take_output():
        connection.take_sent()
    assert all(stream.held_bytes >= 0 for stream in connection.streams.values())
    connection.check(1e6)  # at the latest now a PING is due
    connection.check(2e6)
    assert connection.closed  # its client is silent


def fuzz_hpack(data: bytes) -> None:
    """Header blocks of one connection: what is read of each is what another decoder reads, each time it comes."""
    reader: HeaderReader[Headers] = HeaderReader(lambda headers: headers, LIST_BYTES_MAX, LIST_BYTES_MAX)
    decoder = Decoder(LIST_BYTES_MAX)
    for block in data.split(BETWEEN):
        for _ in range(2):
            try:
                read = reader.read(block)
            except ConnectionFault:
                return
            try:
                expected = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
            except HPACKError:
                raise AssertionError("another decoder refuses the block") from None
            assert read == expected
