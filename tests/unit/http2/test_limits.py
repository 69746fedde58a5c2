"""What a hostile client may do, and where it ends. Source: RFC 9113, section 10.5."""

from __future__ import annotations

import pytest

from millstream.gateway.http2 import frames
from millstream.gateway.http2.events import ErrorCode, RequestStarted, StreamReset
from millstream.gateway.http2.frames import STREAM_ID_MAX, Setting, frame
from millstream.gateway.http2.limits import DRAIN_PING, KEEPALIVE_PING, READ_RATE_MIN, ConnectionLimits
from tests.kit.http2_peer import GREETING, REQUEST, Peer, ended_with, of_kind, resets

CALM = ErrorCode.ENHANCE_YOUR_CALM


def test_stream_beyond_the_limit_is_refused_and_may_come_later():
    peer = Peer(ConnectionLimits(streams_max=1))
    peer.begin(1)

    assert peer.begin(3) == []

    assert resets(peer.sent()) == {3: ErrorCode.REFUSED_STREAM}
    peer.connection.reset(1, ErrorCode.CANCEL)
    assert [type(event) for event in peer.begin(5)] == [RequestStarted]


def test_header_list_over_the_limit_is_told_without_its_fields():
    peer = Peer(ConnectionLimits(header_list_bytes_max=500))
    [event] = peer.begin(1, headers=[*REQUEST, ("x", "y" * 500)])
    assert event == RequestStarted(1, None, False)
    [event] = peer.begin(3)  # the table is in order
    assert event.head is not None  # type: ignore[union-attr]


def test_client_without_preface_is_closed():
    peer = Peer(greet=False)
    peer.send(frames.PREFACE[:5])
    peer.now += ConnectionLimits().preface_s_max - 1
    assert peer.connection.check(peer.now) == []
    peer.now += 1
    assert ended_with(peer.connection.check(peer.now)) is ErrorCode.PROTOCOL_ERROR


def test_client_that_does_not_acknowledge_settings_is_closed():
    peer = Peer(greet=False)
    peer.send(GREETING)
    peer.now += ConnectionLimits().settings_ack_s_max
    assert ended_with(peer.connection.check(peer.now)) is ErrorCode.SETTINGS_TIMEOUT


@pytest.mark.parametrize(
    "partial", [frame(frames.HEADERS, 0, 1), frame(frames.DATA, 0, 1, b"xyz")[:-1]], ids=["block", "frame"]
)
def test_frame_or_block_that_does_not_end_ends_the_connection(partial):
    peer = Peer(ConnectionLimits(keepalive_s=1000))
    peer.send(partial)
    peer.now += ConnectionLimits().frame_s_max - 1
    assert peer.connection.check(peer.now) == []
    peer.now += 1
    assert ended_with(peer.connection.check(peer.now)) is CALM


def test_silent_client_is_pinged_and_closed_without_an_answer():
    peer = Peer()
    peer.now += 60
    assert peer.connection.check(peer.now) == []
    assert peer.sent() == [(frames.PING, 0, 0, KEEPALIVE_PING)]
    peer.send(frame(frames.PING, frames.ACK, 0, KEEPALIVE_PING))
    peer.now += 60
    peer.connection.check(peer.now)
    peer.now += 20
    assert ended_with(peer.connection.check(peer.now)) is ErrorCode.NO_ERROR


def test_stream_whose_client_gives_no_window_is_reset_and_others_go_on():
    peer = Peer(ConnectionLimits(keepalive_s=10_000))
    peer.set(Setting.INITIAL_WINDOW_SIZE, 0)
    peer.begin(1, end=True)
    peer.begin(3, end=True)
    peer.connection.queue(1, bytes(READ_RATE_MIN))
    peer.now += 60
    assert peer.connection.check(peer.now) == []  # 64 KiB earn a second
    peer.now += 1

    assert peer.connection.check(peer.now) == [StreamReset(1, CALM)]

    peer.widen(3, 100)
    assert peer.connection.respond(3, b"\x88", b"", b"reply", b"\x88")


def test_large_replies_are_reset_together_once_nothing_is_taken():
    """A reply of 8 MiB alone would earn two minutes."""
    peer = Peer(ConnectionLimits(keepalive_s=10_000))
    peer.set(Setting.INITIAL_WINDOW_SIZE, 0)
    for stream in (1, 3):
        peer.begin(stream, end=True)
        peer.connection.queue(stream, bytes(8 << 20))
    for second in range(61):
        peer.now = 100.0 + second
        if second == 30:
            peer.widen(1, READ_RATE_MIN - 1)  # too little
            peer.sent()
        events = peer.connection.check(peer.now)
        assert bool(events) == (second == 60)
    assert events == [StreamReset(1, CALM), StreamReset(3, CALM)]


def test_large_reply_that_is_taken_fast_enough_goes_on():
    peer = Peer(ConnectionLimits(keepalive_s=10_000))
    peer.widen(0, 8 << 20)
    peer.begin(1, end=True)
    peer.connection.queue(1, bytes(8 << 20))
    for _ in range(100):
        peer.widen(1, READ_RATE_MIN)
        peer.sent()
        peer.now += 1
        assert peer.connection.check(peer.now) == []


def test_drain_serves_the_calls_that_cross_its_first_step():
    peer = Peer()
    peer.begin(1, end=True)
    peer.connection.drain(peer.now)
    first, ping = peer.sent()
    assert (first[0], int.from_bytes(first[3][:4])) == (frames.GOAWAY, STREAM_ID_MAX)
    assert [type(event) for event in peer.begin(3, end=True)] == [RequestStarted]

    peer.send(frame(frames.PING, frames.ACK, 0, ping[3]))

    [(_, _, _, payload)] = of_kind(peer.sent(), frames.GOAWAY)
    assert int.from_bytes(payload[:4]) == 3
    assert peer.begin(5) == []
    assert resets(peer.sent()) == {5: ErrorCode.REFUSED_STREAM}
    assert not peer.connection.drained
    for stream in (1, 3):
        peer.connection.respond(stream, b"\x88", b"", b"reply", b"\x88")
    assert peer.connection.drained


def test_drain_goes_on_without_an_answer_to_its_ping():
    peer = Peer()
    peer.connection.drain(peer.now)
    peer.connection.drain(peer.now)
    assert [one[3] for one in of_kind(peer.sent(), frames.PING)] == [DRAIN_PING]
    peer.now += 1
    peer.connection.check(peer.now)
    assert peer.connection.drained
