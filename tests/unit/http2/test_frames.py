"""Frames that a server must refuse or ignore, by sections of RFC 9113."""

from __future__ import annotations

import struct

import pytest

from millstream.gateway.connection.http2 import frames
from millstream.gateway.connection.http2.events import DataReceived, RequestStarted, StreamReset
from millstream.gateway.connection.http2.faults import ErrorCode
from millstream.gateway.connection.http2.frames import FRAME_BYTES_MAX, frame
from tests.kit.http2_peer import GREETING, REQUEST, Peer, ended_with, of_kind, resets

SETTINGS_ACK = frame(frames.SETTINGS, frames.ACK, 0)
WORD = struct.Struct(">I")


def setting(key: int, value: int) -> bytes:
    return frame(frames.SETTINGS, 0, 0, struct.pack(">HI", key, value))


#: section and case -> (frames after the greeting, with stream 1 open, the code of GOAWAY)
CONNECTION_FAULTS: dict[str, tuple[bytes, ErrorCode]] = {
    "4.2 frame over the limit": (frame(frames.DATA, 0, 1, bytes(FRAME_BYTES_MAX + 1)), ErrorCode.FRAME_SIZE_ERROR),
    "5.1 DATA of an idle stream": (frame(frames.DATA, 0, 5, b"x"), ErrorCode.PROTOCOL_ERROR),
    "5.1 RST_STREAM of an idle stream": (frame(frames.RST_STREAM, 0, 5, WORD.pack(8)), ErrorCode.PROTOCOL_ERROR),
    "5.1 WINDOW_UPDATE of an idle stream": (frame(frames.WINDOW_UPDATE, 0, 5, WORD.pack(1)), ErrorCode.PROTOCOL_ERROR),
    "5.1.1 HEADERS of an even stream": (
        frame(frames.HEADERS, frames.END_HEADERS, 2, Peer().block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.1 DATA of stream 0": (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "6.1 padding as long as the frame": (frame(frames.DATA, frames.PADDED, 1, b"\x01"), ErrorCode.PROTOCOL_ERROR),
    "6.1 padded frame without a length": (frame(frames.DATA, frames.PADDED, 1), ErrorCode.FRAME_SIZE_ERROR),
    "6.2 HEADERS of stream 0": (frame(frames.HEADERS, frames.END_HEADERS, 0), ErrorCode.PROTOCOL_ERROR),
    "6.2 HEADERS shorter than their priority": (
        frame(frames.HEADERS, frames.END_HEADERS | frames.HAS_PRIORITY, 3, b"1234"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.2 header block interrupted": (frame(frames.HEADERS, 0, 3) + SETTINGS_ACK, ErrorCode.PROTOCOL_ERROR),
    "6.3 PRIORITY of stream 0": (frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    "6.4 RST_STREAM of 3 bytes": (frame(frames.RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
    "6.4 RST_STREAM of stream 0": (frame(frames.RST_STREAM, 0, 0, WORD.pack(8)), ErrorCode.PROTOCOL_ERROR),
    "6.5 SETTINGS of a stream": (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "6.5 SETTINGS of 5 bytes": (frame(frames.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
    "6.5 acknowledgement with a payload": (
        frame(frames.SETTINGS, frames.ACK, 0, bytes(6)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.5.2 ENABLE_PUSH 2": (setting(2, 2), ErrorCode.PROTOCOL_ERROR),
    "6.5.2 INITIAL_WINDOW_SIZE over 2^31-1": (setting(4, 1 << 31), ErrorCode.FLOW_CONTROL_ERROR),
    "6.5.2 MAX_FRAME_SIZE below 2^14": (setting(5, (1 << 14) - 1), ErrorCode.PROTOCOL_ERROR),
    "6.5.2 MAX_FRAME_SIZE over 2^24-1": (setting(5, 1 << 24), ErrorCode.PROTOCOL_ERROR),
    "6.6 PUSH_PROMISE": (frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "6.7 PING of a stream": (frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "6.7 PING of 7 bytes": (frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "6.8 GOAWAY of a stream": (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "6.8 GOAWAY of 7 bytes": (frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "6.9 WINDOW_UPDATE of 3 bytes": (frame(frames.WINDOW_UPDATE, 0, 0, b"123"), ErrorCode.FRAME_SIZE_ERROR),
    "6.9 connection window widened by 0": (frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "6.9.1 connection window over 2^31-1": (
        frame(frames.WINDOW_UPDATE, 0, 0, WORD.pack((1 << 31) - 1)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "6.10 CONTINUATION without HEADERS": (frame(frames.CONTINUATION, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "6.10 CONTINUATION of another stream": (
        frame(frames.HEADERS, 0, 3) + frame(frames.CONTINUATION, 0, 5),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "RFC 7541 2.3.3 index beyond the tables": (
        frame(frames.HEADERS, frames.END_HEADERS, 3, b"\xff\x00"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "RFC 7541 5.1 integer that does not end": (
        frame(frames.HEADERS, frames.END_HEADERS, 3, b"\xff" * 10_000),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "RFC 7541 4.2 table size over the setting": (
        frame(frames.HEADERS, frames.END_HEADERS, 3, b"\x3f\xff\xff\x03"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "RFC 7541 5.2 string longer than its block": (
        frame(frames.HEADERS, frames.END_HEADERS, 3, b"\x00\x7f\x00abc"),
        ErrorCode.COMPRESSION_ERROR,
    ),
}

#: section and case -> (frames of stream 1, which is open, the code of RST_STREAM)
STREAM_FAULTS: dict[str, tuple[bytes, ErrorCode]] = {
    "5.1 DATA behind the end of the request": (
        frame(frames.DATA, frames.END_STREAM, 1, b"x") + frame(frames.DATA, 0, 1, b"x"),
        ErrorCode.STREAM_CLOSED,
    ),
    "5.1 HEADERS behind the end of the request": (
        frame(frames.DATA, frames.END_STREAM, 1) + frame(frames.HEADERS, 5, 1, b"\x82"),
        ErrorCode.STREAM_CLOSED,
    ),
    "6.3 PRIORITY of 4 bytes": (frame(frames.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    "6.9 window widened by 0": (frame(frames.WINDOW_UPDATE, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "6.9.1 window over 2^31-1": (
        frame(frames.WINDOW_UPDATE, 0, 1, WORD.pack((1 << 31) - 1)),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "8.1 trailers that do not end the request": (
        frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x00\x01a\x01b"),
        ErrorCode.PROTOCOL_ERROR,
    ),
}

#: section and case -> fields of a malformed request
MALFORMED: dict[str, list[tuple[str, str]]] = {
    "8.2 name in upper case": [*REQUEST, ("X-Up", "1")],
    "8.2.1 line end in a value": [*REQUEST, ("x", "a\nb")],
    "8.2.1 space around a value": [*REQUEST, ("x", " a")],
    "8.2.2 connection-specific field": [*REQUEST, ("connection", "close")],
    "8.2.2 te other than trailers": [*REQUEST, ("te", "gzip")],
    "8.3 unknown pseudo-header": [*REQUEST, (":status", "200")],
    "8.3 pseudo-header behind a field": [*REQUEST[:2], ("x", "1"), *REQUEST[2:]],
    "8.3.1 repeated pseudo-header": [*REQUEST, (":path", "/again")],
    "8.3.1 missing path": [field for field in REQUEST if field[0] != ":path"],
    "8.3.1 empty path": [(name, "" if name == ":path" else value) for name, value in REQUEST],
}


@pytest.mark.parametrize("case", CONNECTION_FAULTS)
def test_fault_ends_the_connection_with_its_code(case):
    wrong, code = CONNECTION_FAULTS[case]
    peer = Peer()
    peer.begin(1)

    assert ended_with(peer.send(wrong)) is code

    [(_, _, _, payload)] = of_kind(peer.sent(), frames.GOAWAY)
    assert int.from_bytes(payload[4:8]) == code
    assert peer.begin(7) == []  # nothing is read behind it


@pytest.mark.parametrize("case", STREAM_FAULTS)
def test_fault_of_a_stream_ends_that_stream(case):
    wrong, code = STREAM_FAULTS[case]
    peer = Peer()
    peer.begin(1)

    events = peer.send(wrong)

    assert ended_with(events) is None
    assert events[-1] == StreamReset(1, code)
    assert resets(peer.sent()) == {1: code}
    assert [type(event) for event in peer.begin(3)] == [RequestStarted]


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_request_is_reset_and_the_next_one_read(case):
    peer = Peer()

    assert peer.begin(1, headers=MALFORMED[case]) == []

    assert resets(peer.sent()) == {1: ErrorCode.PROTOCOL_ERROR}
    [started] = peer.begin(3)
    assert isinstance(started, RequestStarted)
    assert (b":path", b"/service/Method") in (started.head or [])


@pytest.mark.parametrize(
    ("greeting", "code"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR, id="3.4 HTTP/1.1"),
        pytest.param(
            frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR, id="3.4 PING first"
        ),
        pytest.param(frames.PREFACE + SETTINGS_ACK, ErrorCode.PROTOCOL_ERROR, id="3.4 acknowledgement first"),
    ],
)
def test_wrong_greeting_ends_the_connection(greeting, code):
    assert ended_with(Peer(greet=False).send(greeting)) is code


def test_3_4_server_greets_with_settings_and_acknowledges_those_of_the_client():
    peer = Peer(greet=False)
    assert peer.sent()[0][:3] == (frames.SETTINGS, 0, 0)

    assert peer.send(GREETING) == []

    assert peer.sent() == [(frames.SETTINGS, frames.ACK, 0, b"")]


def test_4_1_reserved_bit_and_unknown_frames_are_ignored():
    peer = Peer()
    peer.begin(1)

    data = bytearray(frame(frames.DATA, 0, 1, b"x"))
    data[5] |= 0x80

    assert peer.send(frame(0x42, 0xFF, 1, b"unknown"), bytes(data)) == [DataReceived(1, b"x", False)]


def test_6_1_padding_is_removed_and_given_back_to_the_windows():
    peer = Peer()
    peer.begin(1)

    assert peer.send(frame(frames.DATA, frames.PADDED, 1, b"\x03abc\0\0\0")) == [DataReceived(1, b"abc", False)]
    assert peer.connection.streams[1].held_bytes == 3


def test_6_2_padding_and_priority_of_headers_are_removed():
    peer = Peer()
    flags = frames.END_HEADERS | frames.PADDED | frames.HAS_PRIORITY | frames.END_STREAM

    [started] = peer.send(frame(frames.HEADERS, flags, 1, b"\x02" + bytes(5) + peer.block() + b"\0\0"))

    assert started == RequestStarted(1, [(name.encode(), value.encode()) for name, value in REQUEST], True)


def test_6_10_header_block_comes_in_continuations():
    peer = Peer()
    block = peer.block()

    events = peer.send(
        frame(frames.HEADERS, frames.END_STREAM, 1, block[:3]),
        frame(frames.CONTINUATION, 0, 1, block[3:5]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[5:]),
    )

    assert [type(event) for event in events] == [RequestStarted]
    assert events[0].ended  # type: ignore[union-attr]


def test_6_7_ping_is_answered_with_its_payload():
    peer = Peer()
    peer.send(frame(frames.PING, 0, 0, b"12345678"))
    assert peer.sent() == [(frames.PING, frames.ACK, 0, b"12345678")]


def test_8_1_trailers_end_the_request():
    peer = Peer()
    peer.begin(1)
    assert peer.begin(1, end=True, headers=[("x", "1")]) == [DataReceived(1, b"", True)]


def test_8_1_reply_before_the_end_of_the_request_resets_the_stream_without_an_error():
    peer = Peer()
    peer.begin(1)

    peer.connection.headers(1, b"\x88", end=True)

    sent = peer.sent()
    assert [kind for kind, *_ in sent] == [frames.HEADERS, frames.RST_STREAM]
    assert resets(sent) == {1: ErrorCode.NO_ERROR}
    assert peer.data(1, b"late") == []  # 5.1: what crosses the reset is ignored


def test_reset_by_the_client_is_an_event_once():
    peer = Peer()
    peer.begin(1)
    reset = frame(frames.RST_STREAM, 0, 1, WORD.pack(ErrorCode.CANCEL))

    assert peer.send(reset) == [StreamReset(1, ErrorCode.CANCEL)]
    assert peer.send(reset) == []
    assert not peer.connection.streams
