"""The pure HTTP/2 connection: the cuts in the byte stream change nothing, and no bytes break its accounts."""

from __future__ import annotations

import struct

from hpack import Encoder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.gateway.http2 import frames
from millstream.gateway.http2.connection import Http2Connection
from millstream.gateway.http2.events import DataReceived, Event
from millstream.gateway.http2.frames import frame
from millstream.gateway.http2.header_blocks import Headers
from millstream.gateway.http2.limits import ConnectionLimits
from tests.kit.http2_peer import GREETING, REQUEST, interpret

STEADY = settings(deadline=None, derandomize=True)
#: small, so that generated frames reach them
LIMITS = ConnectionLimits(
    streams_max=3,
    stream_window_bytes=300,
    connection_window_bytes=500,
    header_list_bytes_max=400,
    account=100,
    account_per_s=1,
)
numbers = st.sampled_from([0, 1, 3, 5, 7, 9, 2])
BLOCKS = [bytes(Encoder().encode(fields)) for fields in (REQUEST, [*REQUEST, ("te", "gzip")], [("x", "y" * 500)])]
blocks = st.sampled_from([*BLOCKS, b"\xbe", b"\xff\xff"])
words = st.sampled_from([0, 1, 8, 200, 70_000, (1 << 31) - 1])

any_frame = st.one_of(
    st.builds(frame, st.just(frames.HEADERS), st.sampled_from([0, 1, 4, 5, 0x24, 0x0C]), numbers, blocks),
    st.builds(frame, st.just(frames.CONTINUATION), st.sampled_from([0, 4]), numbers, blocks),
    st.builds(frame, st.just(frames.DATA), st.sampled_from([0, 0, 1, 8]), numbers, st.binary(max_size=200)),
    st.builds(frame, st.sampled_from([3, 8]), st.just(0), numbers, words.map(struct.Struct(">I").pack)),
    st.builds(
        frame, st.just(4), st.just(0), st.just(0), st.builds(struct.Struct(">HI").pack, st.integers(1, 7), words)
    ),
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), numbers, st.binary(max_size=20)),
)
streams_of_frames = st.lists(any_frame, max_size=25).map(b"".join)


def play(data: bytes, cuts: list[int]) -> tuple[list[Event[Headers]], bytes]:
    """Return the events of `data` received in pieces, and the output. What is received is consumed at once."""
    connection = Http2Connection(interpret, LIMITS, 0.0)
    events: list[Event[Headers]] = []
    output = []
    edges = sorted({min(cut, len(data)) for cut in cuts})
    for begin, end in zip([0, *edges], [*edges, len(data)], strict=True):
        events += connection.receive(data[begin:end], 0.0)
    output += connection.take_output()
    return events, b"".join(output)


@STEADY
@given(streams_of_frames, st.lists(st.integers(0, 4000), max_size=30))
def test_cuts_change_neither_events_nor_output(data, cuts):
    whole = play(GREETING + data, [])
    assert play(GREETING + data, cuts) == whole
    if len(data) < 200:
        assert play(GREETING + data, list(range(len(GREETING + data)))) == whole


@STEADY
@given(st.binary(max_size=500))
@example(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 3)
def test_any_bytes_are_events(data):
    for greeting in (b"", GREETING):
        play(greeting + data, [])


@STEADY
@given(st.lists(st.tuples(any_frame, st.integers(0, 5)), max_size=40))
def test_bytes_held_are_within_the_windows_and_none_is_lost(steps):
    """Whatever the client does and the server answers: streams, held bytes and windows agree at each step."""
    connection = Http2Connection(interpret, LIMITS, 0.0)
    connection.receive(GREETING, 0.0)
    unconsumed: dict[int, int] = {}
    for data, what in steps:
        for event in connection.receive(data, 0.0):
            if isinstance(event, DataReceived):
                unconsumed[event.stream] = unconsumed.get(event.stream, 0) + len(event.data)
        for number in list(connection.streams)[:1]:
            if what == 0:
                connection.consume(number, unconsumed.pop(number, 0))
            elif what == 1:
                connection.respond(number, b"\x88", b"12345", bytes(100), b"\x88")
            elif what == 2:
                connection.queue(number, bytes(50))
        connection.take_output()
        connection.take_sent()
        unconsumed = {number: size for number, size in unconsumed.items() if number in connection.streams}
        if connection.closed:
            return
        held = {number: stream.held_bytes for number, stream in connection.streams.items()}
        assert {number: size for number, size in held.items() if size} == {
            number: size for number, size in unconsumed.items() if size
        }
        assert len(connection.streams) <= LIMITS.streams_max
        assert sum(held.values()) <= LIMITS.connection_window_bytes
        assert all(size <= LIMITS.stream_window_bytes for size in held.values())
