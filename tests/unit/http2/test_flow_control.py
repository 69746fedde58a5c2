"""Flow control both ways. Source: RFC 9113, sections 5.2 and 6.9."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from millstream.gateway.http2 import frames
from millstream.gateway.http2.events import ErrorCode, StreamReset, StreamSent
from millstream.gateway.http2.frames import FRAME_BYTES_MAX, Frame, Setting
from millstream.gateway.http2.limits import ConnectionLimits
from millstream.gateway.http2.stream import WINDOW_BYTES
from tests.kit.http2_peer import Peer, ended_with, of_kind, resets

HEAD, TRAILERS = b"\x88", b"\x00\x01a\x01b"
SMALL = ConnectionLimits(stream_window_bytes=1000, connection_window_bytes=1500)


def data_of(sent: list[Frame], stream: int) -> bytes:
    return b"".join(payload for kind, _, number, payload in sent if kind == frames.DATA and number == stream)


def increments(sent: list[Frame]) -> dict[int, int]:
    return {number: int.from_bytes(payload) for _, _, number, payload in of_kind(sent, frames.WINDOW_UPDATE)}


def test_6_9_reply_within_the_windows_is_sent_at_once():
    peer = Peer()
    peer.begin(1, end=True)

    assert peer.connection.respond(1, HEAD, b"12345", b"message", TRAILERS)

    sent = peer.sent()
    assert [(kind, flags) for kind, flags, _, _ in sent] == [
        (frames.HEADERS, frames.END_HEADERS),
        (frames.DATA, 0),
        (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM),
    ]
    assert data_of(sent, 1) == b"12345message"
    assert not peer.connection.streams


def test_6_9_1_reply_waits_for_the_window_of_its_stream_and_others_pass():
    peer = Peer()
    peer.set(Setting.INITIAL_WINDOW_SIZE, 10)
    peer.begin(1, end=True)
    peer.begin(3, end=True)

    assert not peer.connection.respond(1, HEAD, b"", b"x" * 25, TRAILERS)
    assert not peer.connection.respond(3, HEAD, b"", b"y" * 15, TRAILERS)
    assert data_of(peer.sent(), 1) == b"x" * 10
    peer.widen(3, 100)

    assert data_of(peer.sent(), 3) == b"y" * 5
    assert peer.connection.take_sent() == [StreamSent(3, True)]
    peer.widen(1, 15)
    sent = peer.sent()
    assert data_of(sent, 1) == b"x" * 15
    assert sent[-1][:3] == (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1)
    assert peer.connection.take_sent() == [StreamSent(1, True)]


def test_6_9_1_replies_share_the_window_of_the_connection():
    peer = Peer()
    for stream in (1, 3):
        peer.begin(stream, end=True)
        peer.connection.respond(stream, HEAD, b"", bytes(WINDOW_BYTES), TRAILERS)

    sent = peer.sent()

    assert len(data_of(sent, 1)) + len(data_of(sent, 3)) == WINDOW_BYTES
    assert data_of(sent, 3)  # in turn, not one behind the other
    peer.widen(0, 2 * WINDOW_BYTES)
    peer.sent()
    assert {event.stream for event in peer.connection.take_sent()} == {1, 3}


def test_6_9_2_setting_changes_open_windows_even_below_zero():
    peer = Peer()
    peer.begin(1, end=True)
    peer.connection.queue(1, bytes(100))
    peer.set(Setting.INITIAL_WINDOW_SIZE, 60)
    assert len(data_of(peer.sent(), 1)) == 60
    peer.set(Setting.INITIAL_WINDOW_SIZE, 0)  # 60 were sent: -60
    peer.widen(1, 60)
    assert data_of(peer.sent(), 1) == b""
    peer.set(Setting.INITIAL_WINDOW_SIZE, 40)
    assert len(data_of(peer.sent(), 1)) == 40


def test_6_9_2_setting_that_overflows_a_window_ends_the_connection():
    peer = Peer()
    peer.begin(1)
    peer.widen(1, 100)
    assert ended_with(peer.set(Setting.INITIAL_WINDOW_SIZE, (1 << 31) - 1)) is ErrorCode.FLOW_CONTROL_ERROR


def test_6_5_2_frames_are_as_long_as_the_client_accepts():
    peer = Peer()
    peer.set(Setting.INITIAL_WINDOW_SIZE, 1 << 20)
    peer.widen(0, 1 << 20)
    peer.begin(1, end=True)
    peer.connection.respond(1, HEAD, b"", bytes(100_000), TRAILERS)
    assert {len(payload) for _, _, _, payload in of_kind(peer.sent(), frames.DATA)} <= {
        FRAME_BYTES_MAX,
        100_000 % FRAME_BYTES_MAX,
    }
    peer.set(Setting.MAX_FRAME_SIZE, 20_000)
    peer.begin(3, end=True)
    peer.connection.respond(3, HEAD, b"", bytes(40_000), TRAILERS)
    assert [len(payload) for _, _, _, payload in of_kind(peer.sent(), frames.DATA)] == [20_000, 20_000]


def test_output_is_bounded_while_the_transport_has_no_room():
    peer = Peer()
    peer.begin(1, end=True)
    peer.connection.pause()
    assert not peer.connection.respond(1, HEAD, b"", bytes(1000), TRAILERS)
    assert data_of(peer.sent(), 1) == b""
    peer.connection.resume()
    assert len(data_of(peer.sent(), 1)) == 1000


def test_replies_of_a_lost_connection_are_freed_without_a_garbage_collection():
    peer = Peer()
    peer.begin(1, end=True)
    reply = np.zeros(1 << 20, np.uint8)
    alive = weakref.ref(reply)
    peer.connection.queue(1, reply.data)
    peer.sent()
    gc.disable()
    try:
        del reply
        assert alive() is not None
        connection = weakref.ref(peer.connection)
        del peer
        assert connection() is None
        assert alive() is None
    finally:
        gc.enable()


def test_5_2_client_that_exceeds_the_window_of_a_stream_loses_the_stream():
    peer = Peer(SMALL)
    peer.begin(1)
    assert peer.data(1, bytes(1001)) == [StreamReset(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_5_2_client_that_exceeds_the_window_of_the_connection_loses_it():
    peer = Peer(SMALL)
    peer.begin(1)
    peer.begin(3)
    peer.data(1, bytes(1000))
    assert ended_with(peer.data(3, bytes(501))) is ErrorCode.FLOW_CONTROL_ERROR


def test_6_9_windows_grow_by_what_is_consumed():
    peer = Peer(SMALL)
    peer.begin(1)
    peer.data(1, bytes(900))
    assert increments(peer.sent()) == {}

    peer.connection.consume(1, 900)

    assert increments(peer.sent()) == {0: 900, 1: 900}
    assert ended_with(peer.data(1, bytes(1000))) is None


def test_6_9_bytes_of_a_stream_that_ended_are_given_back_to_the_connection():
    peer = Peer(SMALL)
    peer.begin(1)
    peer.data(1, bytes(900))

    peer.connection.reset(1, ErrorCode.CANCEL)

    assert increments(peer.sent()) == {0: 900}
    peer.data(1, bytes(900))  # crosses the reset
    sent = peer.sent()
    assert increments(sent) == {0: 900}
    assert resets(sent) == {}


def test_6_9_bytes_of_an_answered_request_are_given_back():
    for blocked in (False, True):
        peer = Peer(SMALL)
        if blocked:
            peer.set(Setting.INITIAL_WINDOW_SIZE, 0)
        peer.begin(1)
        peer.data(1, bytes(900), end=True)
        peer.sent()
        assert peer.connection.respond(1, HEAD, b"", b"reply", TRAILERS) is not blocked
        if blocked:
            peer.sent()
            peer.widen(1, 5)
        assert increments(peer.sent()) == {0: 900}
