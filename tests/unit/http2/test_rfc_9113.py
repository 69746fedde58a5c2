"""What RFC 9113 requires of a server, by its sections: the cases of h2spec that it still requires, and more.

Priorities (section 5.3) have no meaning any more: a stream that depends on itself is no fault.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.http2 import frames
from millstream.gateway.http2.events import ConnectionFault, DataReceived, ErrorCode, RequestStarted, StreamReset
from millstream.gateway.http2.frames import FRAME_BYTES_MAX, Frame, ReceivedFrames, frame
from millstream.gateway.http2.header_blocks import encode
from millstream.gateway.http2.limits import ConnectionLimits
from millstream.gateway.http2.stream import CLOSED_FIRST_MAX, ClosedStreams
from tests.kit.http2_peer import GREETING, REQUEST, Peer, PlainReader, ended_with, of_kind, resets

SETTINGS_ACK = frame(frames.SETTINGS, frames.ACK, 0)
WORD = struct.Struct(">I")
LIMITS = ConnectionLimits()
HEAD_FIELDS = [(name.encode(), value.encode()) for name, value in REQUEST[:3]]
RESET = frame(frames.RST_STREAM, 0, 1, WORD.pack(ErrorCode.CANCEL))


def setting(key: int, value: int) -> bytes:
    return frame(frames.SETTINGS, 0, 0, struct.pack(">HI", key, value))


def trailers(name: bytes, value: bytes) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, encode([(name, value)]))


#: section and case -> (frames after the greeting, with stream 1 open, the code of GOAWAY)
CONNECTION_FAULTS: dict[str, tuple[bytes, ErrorCode]] = {
    "4.2 DATA over the limit": (
        frames.head(LIMITS.frame_bytes_max + 1, frames.DATA, 0, 1),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "4.2 HEADERS over the limit": (
        frames.head(LIMITS.header_frame_bytes_max + 1, frames.HEADERS, frames.END_HEADERS, 3),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "4.3 PRIORITY within a header block": (
        frame(frames.HEADERS, 0, 3) + frame(frames.PRIORITY, 0, 3, bytes(5)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "4.3 HEADERS of another stream within a header block": (
        frame(frames.HEADERS, 0, 3) + frame(frames.HEADERS, frames.END_HEADERS, 5),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1 DATA of an idle stream": (frame(frames.DATA, 0, 5, b"x"), ErrorCode.PROTOCOL_ERROR),
    "5.1 RST_STREAM of a stream that no client opens": (
        frame(frames.RST_STREAM, 0, 2, WORD.pack(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1 WINDOW_UPDATE of an idle stream": (frame(frames.WINDOW_UPDATE, 0, 5, WORD.pack(1)), ErrorCode.PROTOCOL_ERROR),
    "5.1 CONTINUATION of an idle stream": (
        frame(frames.CONTINUATION, frames.END_HEADERS, 5),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1 DATA behind a reset by the client": (RESET + frame(frames.DATA, 0, 1, b"x"), ErrorCode.STREAM_CLOSED),
    "5.1 HEADERS behind a reset by the client": (
        RESET + frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x82"),
        ErrorCode.STREAM_CLOSED,
    ),
    "5.1 CONTINUATION behind a reset by the client": (
        RESET + frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"\x82"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1 CONTINUATION behind the end of the request": (
        frame(frames.DATA, frames.END_STREAM, 1) + frame(frames.CONTINUATION, frames.END_HEADERS, 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1.1 HEADERS of a stream below one that is open": (
        frame(frames.HEADERS, frames.END_HEADERS, 5, Peer().block())
        + frame(frames.HEADERS, frames.END_HEADERS, 3, Peer().block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1.1 DATA of a stream below one that is open": (
        frame(frames.HEADERS, frames.END_HEADERS, 5, Peer().block()) + frame(frames.DATA, 0, 3, b"x"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1.1 HEADERS of an even stream": (
        frame(frames.HEADERS, frames.END_HEADERS, 2, Peer().block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.5 unknown frame within a header block": (
        frame(frames.HEADERS, 0, 3) + frame(0x42, 0, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.1 DATA of stream 0": (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "6.1 padding as long as the frame": (frame(frames.DATA, frames.PADDED, 1, b"\x01"), ErrorCode.PROTOCOL_ERROR),
    "6.1 padding longer than a long frame's rest": (
        frames.head(3, frames.DATA, frames.PADDED, 1) + b"\xff12",
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.1 padded frame without a length": (frame(frames.DATA, frames.PADDED, 1), ErrorCode.FRAME_SIZE_ERROR),
    "6.2 HEADERS of stream 0": (frame(frames.HEADERS, frames.END_HEADERS, 0), ErrorCode.PROTOCOL_ERROR),
    "6.2 HEADERS whose padding is as long as the frame": (
        frame(frames.HEADERS, frames.END_HEADERS | frames.PADDED, 3, b"\x01"),
        ErrorCode.PROTOCOL_ERROR,
    ),
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
    "6.10 CONTINUATION of stream 0": (
        frame(frames.HEADERS, 0, 3) + frame(frames.CONTINUATION, frames.END_HEADERS, 0),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION behind complete HEADERS": (
        frame(frames.HEADERS, frames.END_HEADERS, 3, Peer().block()) + frame(frames.CONTINUATION, 4, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION behind a complete CONTINUATION": (
        frame(frames.HEADERS, 0, 3, Peer().block()) + frame(frames.CONTINUATION, 4, 3) * 2,
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION behind DATA": (
        frame(frames.DATA, 0, 1, b"x") + frame(frames.CONTINUATION, 4, 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.10 CONTINUATION without HEADERS": (frame(frames.CONTINUATION, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "6.10 CONTINUATION of another stream": (
        frame(frames.HEADERS, 0, 3) + frame(frames.CONTINUATION, 0, 5),
        ErrorCode.PROTOCOL_ERROR,
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
    "8.1 pseudo-header in trailers": (trailers(b":method", b"POST"), ErrorCode.PROTOCOL_ERROR),
    "8.2.1 name in upper case in trailers": (trailers(b"X", b"1"), ErrorCode.PROTOCOL_ERROR),
    "8.2.2 connection-specific field in trailers": (trailers(b"connection", b"close"), ErrorCode.PROTOCOL_ERROR),
}

#: section and case -> fields of a malformed request
MALFORMED: dict[str, list[tuple[str, str]]] = {
    "8.2 name in upper case": [*REQUEST, ("X-Up", "1")],
    "8.2.1 line end in a value": [*REQUEST, ("x", "a\nb")],
    "8.2.1 space around the path": [(name, f"{value} " if name == ":path" else value) for name, value in REQUEST],
    "8.2.1 NUL in a value": [*REQUEST, ("x", "a\0b")],
    "8.2.1 space in a name": [*REQUEST, ("x y", "1")],
    "8.2.1 empty name": [*REQUEST, ("", "1")],
    "8.2.2 connection-specific field": [*REQUEST, ("connection", "close")],
    "8.2.2 transfer-encoding": [*REQUEST, ("transfer-encoding", "chunked")],
    "8.2.2 te other than trailers": [*REQUEST, ("te", "gzip")],
    "8.3 unknown pseudo-header": [*REQUEST, (":status", "200")],
    "8.3 pseudo-header behind a field": [*REQUEST[:2], ("x", "1"), *REQUEST[2:]],
    "8.3.1 repeated pseudo-header": [*REQUEST, (":path", "/again")],
    "8.3 pseudo-header unknown to HTTP": [*REQUEST, (":test", "1")],
    "8.3.1 missing method": [field for field in REQUEST if field[0] != ":method"],
    "8.3.1 missing scheme": [field for field in REQUEST if field[0] != ":scheme"],
    "8.3.1 missing path": [field for field in REQUEST if field[0] != ":path"],
    "8.3.1 repeated method": [REQUEST[0], *REQUEST],
    "8.1.1 content-length that is no number": [*REQUEST, ("content-length", "+3")],
    "8.1.1 two content-lengths": [*REQUEST, ("content-length", "3"), ("content-length", "4")],
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


#: section and case -> frames of stream 1, which is open, that are no fault
ALLOWED: dict[str, bytes] = {
    "4.1 undefined flags": frame(frames.PING, 0xFE, 0, bytes(8)),
    "5.1 PRIORITY of an idle stream": frame(frames.PRIORITY, 0, 9, bytes(5)),
    "5.1 PRIORITY of a half-closed stream": frame(frames.DATA, 1, 1) + frame(frames.PRIORITY, 0, 1, bytes(5)),
    "5.1 PRIORITY of a closed stream": RESET + frame(frames.PRIORITY, 0, 1, bytes(5)),
    "5.1 WINDOW_UPDATE of a half-closed stream": frame(frames.DATA, 1, 1)
    + frame(frames.WINDOW_UPDATE, 0, 1, WORD.pack(1)),
    "5.1 WINDOW_UPDATE of a closed stream": RESET + frame(frames.WINDOW_UPDATE, 0, 1, WORD.pack(1)),
    # Not by the RFC: grpc-core (C++ 1.51) resets calls of which it has sent nothing, and goes on with lower numbers.
    "5.1 RST_STREAM of an idle stream": frame(frames.RST_STREAM, 0, 9, WORD.pack(8)),
    "5.1 RST_STREAM of a half-closed stream": frame(frames.DATA, 1, 1) + RESET,
    "5.1 RST_STREAM of a closed stream": RESET + RESET,
    "5.3 stream that depends on itself": frame(frames.PRIORITY, 0, 1, WORD.pack(1) + b"\x10"),
    "6.5.2 unknown setting": setting(0xFF, 1),
    "6.5.3 a setting twice": frame(frames.SETTINGS, 0, 0, struct.pack(">HIHI", 4, 100, 4, 1)),
    "6.8 GOAWAY of the client": frame(frames.GOAWAY, 0, 0, bytes(8)),
    "7 GOAWAY with an unknown code": frame(frames.GOAWAY, 0, 0, bytes(4) + WORD.pack(0xFF)),
    "7 RST_STREAM with an unknown code": frame(frames.RST_STREAM, 0, 1, WORD.pack(0xFF)),
    "9.1.1 authority of another host": frame(frames.HEADERS, 5, 3, encode([*HEAD_FIELDS, (b":authority", b"other")])),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_no_fault_ends_nothing(case):
    peer = Peer()
    peer.begin(1)

    events = peer.send(ALLOWED[case])

    assert ended_with(events) is None
    assert resets(peer.sent()) == {}
    [started] = peer.begin(11)
    assert isinstance(started, RequestStarted)


def test_8_2_1_blanks_at_the_ends_of_a_value_are_dropped_as_grpc_allows():
    [started] = Peer().begin(1, headers=[*REQUEST, ("x", " a b\t"), ("y", " "), ("content-length", " 3")])

    assert isinstance(started, RequestStarted)
    assert (started.head or [])[-3:] == [(b"x", b"a b"), (b"y", b""), (b"content-length", b"3")]


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


def test_6_5_3_of_a_setting_sent_twice_the_last_value_holds():
    peer = Peer()
    peer.send(frame(frames.SETTINGS, 0, 0, struct.pack(">HIHI", 4, 100, 4, 1)))
    assert peer.sent() == [(frames.SETTINGS, frames.ACK, 0, b"")]
    peer.begin(1, end=True)
    peer.connection.queue(1, b"reply")
    assert [payload for _, _, _, payload in of_kind(peer.sent(), frames.DATA)] == [b"r"]


def test_6_5_2_the_largest_frame_is_offered_and_read():
    peer = Peer(ConnectionLimits(stream_window_bytes=1 << 20), greet=False)
    [(_, _, _, payload), _] = peer.sent()
    assert dict(struct.iter_unpack(">HI", payload))[5] == LIMITS.frame_bytes_max
    peer.send(GREETING)
    peer.begin(1)

    events = peer.data(1, bytes(LIMITS.frame_bytes_max), end=True)

    assert events == [DataReceived(1, bytes(LIMITS.frame_bytes_max), True)]


def behind_preface(data_bytes_max: int) -> ReceivedFrames:
    reader = ReceivedFrames(data_bytes_max, FRAME_BYTES_MAX)
    reader.add(frames.PREFACE)
    return reader


@pytest.mark.parametrize("padding", [None, 0, 1, 255])
@pytest.mark.parametrize("flags", [0, frames.END_STREAM])
@pytest.mark.parametrize("step", [1, 1000, 16384, 30_000])
def test_6_1_long_data_is_passed_on_as_it_arrives(padding, flags, step):
    content = bytes(range(256)) * 100
    sent = frame(frames.DATA, flags, 1, content)
    if padding is not None:
        padded = bytes((padding,)) + content + bytes(padding)
        sent = frame(frames.DATA, flags | frames.PADDED, 1, padded)
    reader, read = behind_preface(1 << 20), list[Frame]()
    sent += frame(frames.PING, 0, 0, bytes(8))
    for at in range(0, len(sent), step):
        reader.add(sent[at : at + step])
        read += iter(reader.take, None)
        assert at < 1000 or any(kind == frames.DATA for kind, *_ in read)  # it is not held until it is complete

    assert read.pop() == (frames.PING, 0, 0, bytes(8))
    assert b"".join(frames.without_padding(flags, payload) for _, flags, _, payload in read) == content
    assert sum(len(payload) for *_, payload in read) == len(content) + (0 if padding is None else 1 + padding)
    assert [one[1] & frames.END_STREAM for one in read] == [0] * (len(read) - 1) + [flags]
    assert not reader.partial


SIZES = st.sampled_from([0, 1, frames.JOINED_BYTES_MIN - 1, frames.JOINED_BYTES_MIN, 5000, frames.FRAME_BYTES_MAX])
DATA_FRAMES = st.tuples(
    st.just(frames.DATA),
    st.sampled_from([0, 0, 0, frames.END_STREAM, frames.PADDED]),
    st.sampled_from([1, 1, 3]),
    SIZES,
)
OTHER_FRAMES = st.tuples(
    st.sampled_from([frames.PING, frames.HEADERS, frames.CONTINUATION]), st.just(0), st.just(1), SIZES
)


@given(
    sent=st.lists(DATA_FRAMES | DATA_FRAMES | DATA_FRAMES | OTHER_FRAMES, max_size=30),
    cuts=st.lists(st.sampled_from([1, 9, 10, 4105, 16393, 65536, 1 << 18]), min_size=1, max_size=30),
    count_max=st.sampled_from([1, 3, 256]),
)
def test_joined_data_means_what_its_frames_mean(sent, cuts, count_max):
    """Between frames that are no long DATA of one stream nothing is joined, and nothing is lost, moved or held back."""
    data = b"".join(
        frame(kind, flags, stream, bytes((at % 251,)) * size) for at, (kind, flags, stream, size) in enumerate(sent)
    )
    plain, joined = list[Frame](), list[Frame]()
    PlainReader().read(data, plain)
    reader, rest = behind_preface(FRAME_BYTES_MAX), data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "CUT_MAX", count_max)
        for cut in [*cuts, len(data)]:
            reader.add(rest[:cut])
            rest = rest[cut:]
            joined += iter(reader.take, None)

    assert not reader.partial
    assert len(joined) <= len(plain)
    for kind, flags, stream, payload in joined:
        parts = [plain.pop(0)]
        while sum(len(part[3]) for part in parts) < len(payload) or parts[-1][1] != flags:
            parts.append(plain.pop(0))
        assert payload == b"".join(part[3] for part in parts)
        assert [part[:3] for part in parts] == [(kind, 0, stream)] * (len(parts) - 1) + [(kind, flags, stream)]
        if len(parts) > 1:
            assert kind == frames.DATA
            assert all(len(part[3]) >= frames.JOINED_BYTES_MIN for part in parts[:-1])
    assert not plain


def test_4_2_header_block_may_come_in_one_frame_over_16_kib():
    peer = Peer()
    [started] = peer.begin(1, headers=[*REQUEST, *((f"x{number}", "y" * 900) for number in range(20))])
    assert isinstance(started, RequestStarted)
    assert started.head is None  # over the limit on the list; the connection is in order


def test_10_5_header_block_over_its_limit_in_one_frame_ends_the_connection():
    block = bytes(LIMITS.header_block_bytes_max + 1)
    events = Peer().send(frame(frames.HEADERS, frames.END_HEADERS, 1, block))
    assert ended_with(events) is ErrorCode.ENHANCE_YOUR_CALM


#: content-length, DATA of the request, whether the last one ends it; the last DATA is the fault
LENGTHS: dict[str, tuple[str, list[bytes], bool]] = {
    "less than announced": ("5", [b"1234"], True),
    "less than announced in two frames": ("5", [b"12", b"34"], True),
    "more than announced": ("5", [b"123456"], False),
    "more than announced in two frames": ("5", [b"12345", b"6"], False),
    "none was announced": ("0", [b"1"], False),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_8_1_1_content_that_differs_from_its_length_resets_the_stream(case):
    length, parts, ended = LENGTHS[case]
    peer = Peer()
    peer.begin(1, headers=[*REQUEST, ("content-length", length)])
    for part in parts[:-1]:
        peer.data(1, part)

    assert peer.data(1, parts[-1], end=ended) == [StreamReset(1, ErrorCode.PROTOCOL_ERROR)]

    assert resets(peer.sent()) == {1: ErrorCode.PROTOCOL_ERROR}


def test_8_1_1_content_length_without_content_is_malformed():
    peer = Peer()
    assert peer.begin(1, end=True, headers=[*REQUEST, ("content-length", "5")]) == []
    assert resets(peer.sent()) == {1: ErrorCode.PROTOCOL_ERROR}


def test_8_1_1_trailers_do_not_count_and_do_not_end_a_request_early():
    for parts, fault in ((b"12345", False), (b"1234", True)):
        peer = Peer()
        peer.begin(1, headers=[*REQUEST, ("content-length", "5")])
        peer.data(1, parts)
        [event] = peer.begin(1, end=True, headers=[("x", "1")])
        assert isinstance(event, StreamReset) is fault


def test_8_1_1_padding_does_not_count_as_content():
    peer = Peer()
    peer.begin(1, headers=[*REQUEST, ("content-length", "3")])
    padded = frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x03abc\0\0\0")
    assert peer.send(padded) == [DataReceived(1, b"abc", True)]


def test_5_1_what_crosses_a_reset_of_the_server_is_dropped_and_the_table_kept():
    peer = Peer()
    peer.begin(1)
    peer.connection.reset(1, ErrorCode.CANCEL)
    peer.sent()

    assert peer.data(1, b"late") == []
    assert peer.begin(1, end=True, headers=[("x", "trailers")]) == []

    assert resets(peer.sent()) == {}
    [started] = peer.begin(3, headers=[*REQUEST, ("x", "trailers")])
    assert isinstance(started, RequestStarted)
    assert (b"x", b"trailers") in (started.head or [])


def test_5_1_streams_that_the_server_closed_are_remembered_within_a_limit():
    closed = ClosedStreams()
    for number in range(1, 2 * CLOSED_FIRST_MAX + 3, 2):
        closed.open(number)
        closed.closed_first(number)
    closed.open(number := closed.last + 2)
    for late in (1, 3, closed.last - 2):
        closed.check_late(late)
    with pytest.raises(ConnectionFault):
        closed.check_late(number)


def test_6_7_ping_acknowledgement_is_not_answered():
    peer = Peer()
    peer.send(frame(frames.PING, frames.ACK, 0, b"12345678"))
    assert peer.sent() == []


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
