"""The account of frames that are no work: what overdraws it, and what never does. Source: RFC 9113, section 10.5."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.gateway.http2 import frames, limits
from millstream.gateway.http2.events import ErrorCode
from millstream.gateway.http2.frames import Setting, frame
from millstream.gateway.http2.limits import ConnectionLimits
from tests.kit.http2_peer import REQUEST, Peer, ended_with, of_kind

STEADY = settings(deadline=None, derandomize=True, max_examples=30)
CALM = ErrorCode.ENHANCE_YOUR_CALM
HEAD, TRAILERS = b"\x88", b"\x00\x01a\x01b"
WINDOW = frame(frames.WINDOW_UPDATE, 0, 0, (1).to_bytes(4))
PING = frame(frames.PING, 0, 0, bytes(8))
FLOOD_FRAMES_MAX = 50_000  # no flood is longer

FIRST = 5  # number of the first stream that a flood may begin
STREAMS_MAX = 2
#: limits for a client that is as fast as one can be: no time passes, and the account is small
STILL = ConnectionLimits(account=200, account_per_s=0)

#: returns one frame of a flood, or two; the number is that of a new stream
Flood = Callable[[Peer, int], bytes]


def begin(peer: Peer, number: int, headers: list[tuple[str, str]] | None = None) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS, number, peer.block(headers))


def rapid_resets(peer: Peer, number: int) -> bytes:
    """CVE-2023-44487."""
    return begin(peer, number) + frame(frames.RST_STREAM, 0, number, bytes(4))


def provoked_resets(peer: Peer, number: int) -> bytes:
    """CVE-2025-8671: the client makes the server reset the streams."""
    return begin(peer, number) + frame(frames.WINDOW_UPDATE, 0, number, bytes(4))


def malformed_requests(peer: Peer, number: int) -> bytes:
    return begin(peer, number, [*REQUEST, ("connection", "close")])


def refused_streams(peer: Peer, number: int) -> bytes:
    """Streams beyond SETTINGS_MAX_CONCURRENT_STREAMS."""
    return begin(peer, number)


def headers_of_ended_streams(peer: Peer, _: int) -> bytes:
    return begin(peer, 3)


def continuations(_: Peer, number: int) -> bytes:
    """CVE-2024-27316: a header block that does not end."""
    return frame(frames.HEADERS if number == FIRST else frames.CONTINUATION, 0, FIRST)


FLOODS: dict[str, Flood] = {
    "rapid resets": rapid_resets,
    "provoked resets": provoked_resets,
    "malformed requests": malformed_requests,
    "refused streams": refused_streams,
    "headers of ended streams": headers_of_ended_streams,
    "continuations": continuations,
    "settings": lambda *_: frame(frames.SETTINGS, 0, 0),
    "pings": lambda *_: PING,
    "empty data": lambda *_: frame(frames.DATA, 0, 1),
    "padding alone": lambda *_: frame(frames.DATA, frames.PADDED, 1, b"\x02\0\0"),
    "empty data of an ended stream": lambda *_: frame(frames.DATA, 0, 3),
    "priorities": lambda *_: frame(frames.PRIORITY, 0, 1, bytes(5)),
    "unknown frames": lambda *_: frame(0x55, 0, 0),
    "goaways": lambda *_: frame(frames.GOAWAY, 0, 0, bytes(8)),
    "windows of the connection": lambda *_: WINDOW,
    "windows of a stream": lambda *_: frame(frames.WINDOW_UPDATE, 0, 1, (1).to_bytes(4)),
    "windows of an ended stream": lambda *_: frame(frames.WINDOW_UPDATE, 0, 3, (1).to_bytes(4)),
    "resets of an ended stream": lambda *_: frame(frames.RST_STREAM, 0, 3, bytes(4)),
    "resets of an idle stream": lambda *_: frame(frames.RST_STREAM, 0, 2**30 + 1, bytes(4)),
}


def sent_at_once(peer: Peer, *parts: bytes) -> ErrorCode | None:
    """Send frames for several turns, and return the code with which the connection ended."""
    code = ended_with(peer.send(*parts))
    while code is None and peer.connection.unread:
        code = ended_with(peer.connection.receive_rest(peer.now))
    peer.sent()
    return code


def flood(peer: Peer, kind: str, count: int, number: int = FIRST) -> ErrorCode | None:
    """Send `count` frames of a flood at once, and return the code with which the connection ended."""
    return sent_at_once(peer, *(FLOODS[kind](peer, number + 2 * at) for at in range(count)))


def peer_with_streams() -> Peer:
    """Return a peer whose stream 1 is open, and whose stream 3 the server has ended."""
    peer = Peer(ConnectionLimits(streams_max=STREAMS_MAX))
    peer.begin(1)
    peer.begin(3)
    peer.connection.reset(3, ErrorCode.CANCEL)
    return peer


@pytest.mark.parametrize("kind", FLOODS)
def test_flood_ends_the_connection(kind):
    assert flood(peer_with_streams(), kind, 20_000) is CALM


@pytest.mark.parametrize("kind", FLOODS)
def test_flood_that_goes_on_as_fast_as_a_client_can_send_ends_the_connection(kind):
    peer = peer_with_streams()
    for turn in range(1000):
        if flood(peer, kind, 100, FIRST + 200 * turn) is CALM:
            return
        peer.now += 100 * 10e-6
    pytest.fail("it goes on")


@pytest.mark.parametrize("kind", sorted(FLOODS.keys() - {"continuations"}))
def test_a_client_may_send_some_of_each_kind_without_any_work(kind):
    peer = peer_with_streams()
    number = FIRST
    for _ in range(60):
        assert flood(peer, kind, 100, number) is None
        number += 200
        peer.now += 1.0


def call(peer: Peer, number: int, replies: list[int], *, between: bytes = b"") -> None:
    """Make a call that gets replies of these sizes; for each DATA frame give window twice, and ping, as a client may.

    Then send `between`. No time passes.
    """
    window = frame(frames.WINDOW_UPDATE, 0, number, (1 << 20).to_bytes(4))
    assert ended_with(peer.send(begin(peer, number), window, WINDOW, frame(frames.DATA, 1, number, b"x"))) is None
    connection = peer.connection
    if len(replies) == 1:
        connection.respond(number, HEAD, b"12345", bytes(replies[0]), TRAILERS)
    else:
        connection.headers(number, HEAD)
        for size in replies:
            connection.queue(number, bytes(size))
        connection.queue(number, trailers=TRAILERS)
    while sent := peer.sent():
        for _, _, _, payload in of_kind(sent, frames.DATA):
            widen = frame(frames.WINDOW_UPDATE, 0, 0, len(payload).to_bytes(4)) if payload else b""
            widen_stream = frame(frames.WINDOW_UPDATE, 0, number, max(1, len(payload)).to_bytes(4))
            assert ended_with(peer.send(widen, widen_stream, PING)) is None
    assert ended_with(peer.send(between)) is None


@STEADY
@given(st.lists(st.lists(st.integers(1, 100_000), min_size=1, max_size=5), min_size=1, max_size=10))
def test_a_client_that_gets_work_done_gains_however_fast_it_is(calls):
    peer = Peer(STILL)
    number = 1
    for _ in range(20):
        for replies in calls:
            call(peer, number, replies)
            number += 2
    assert peer.connection._account.balance > 200


@pytest.mark.parametrize(
    "frame_of", [lambda _: PING, lambda _: WINDOW, lambda n: frame(frames.PRIORITY, 0, n, bytes(5))]
)
def test_a_client_may_send_each_kind_for_each_call(frame_of):
    peer = Peer(STILL)
    for number in range(1, 20_001, 2):
        call(peer, number, [10], between=frame_of(number))


def test_window_given_in_small_pieces_for_large_replies_is_work():
    """A client that gives window for each KiB that it has read."""
    peer = Peer(STILL)
    peer.set(Setting.INITIAL_WINDOW_SIZE, 1 << 20)
    for number in range(1, 101, 2):
        peer.begin(number, end=True)
        peer.connection.respond(number, HEAD, b"", bytes(50_000), TRAILERS)
        peer.sent()
        assert ended_with(peer.send(*[frame(frames.WINDOW_UPDATE, 0, 0, (1000).to_bytes(4))] * 50)) is None


def test_windows_of_many_replies_may_be_given_at_once():
    peer = Peer(STILL)
    peer.widen(0, 1 << 24)
    for number in range(1, 100_001, 2):
        peer.begin(number, end=True)
        peer.connection.respond(number, HEAD, b"", b"x", TRAILERS)
        peer.sent()
    assert flood(peer, "windows of the connection", 100_000) is None


@pytest.mark.parametrize("answered_share", [0.25, 0.5, 0.9])
def test_a_client_may_cancel_most_of_its_calls_at_once(answered_share):
    peer = Peer(STILL)
    answered = 0.0
    for number in range(1, 20_001, 2):
        answered += answered_share
        if answered >= 1:
            answered -= 1
            call(peer, number, [10])
        else:
            sent = [begin(peer, number), *[frame(frames.WINDOW_UPDATE, 0, number, (1).to_bytes(4)), WINDOW]]
            assert ended_with(peer.send(*sent, frame(frames.RST_STREAM, 0, number, bytes(4)))) is None


def test_a_client_may_cancel_all_calls_that_it_has_waited_for():
    """As many at once as it may have: a deadline that the server does not meet."""
    peer = Peer(ConnectionLimits(account=4096, account_per_s=0))
    number = 1
    for _ in range(50):
        numbers = range(number, number + 2048, 2)
        number += 2048
        assert sent_at_once(peer, *(begin(peer, one) + WINDOW for one in numbers)) is None
        peer.now += limits.RESET / limits.RESET_DISCOUNT
        assert sent_at_once(peer, *(frame(frames.RST_STREAM, 0, one, bytes(4)) for one in numbers)) is None


def test_a_refused_upload_may_still_be_on_its_way():
    """The server answers before the request has come: the client sends on until it reads the answer."""
    peer = Peer(STILL)
    for number in range(1, 2001, 2):
        peer.begin(number)
        peer.connection.headers(number, HEAD, end=True)
        for _ in range(10):
            assert ended_with(peer.data(number, bytes(16_000))) is None
            peer.sent()


def test_time_fills_the_account_up_to_its_first_balance_and_no_work_lapses():
    peer = Peer(ConnectionLimits(account=80, account_per_s=8))
    peer.now += 1000
    assert flood(peer, "pings", 10) is None
    peer.now += 1
    assert flood(peer, "pings", 1) is None
    peer.now += 1000
    assert flood(peer, "pings", 11) is CALM
    peer = Peer(ConnectionLimits(account=80, account_per_s=8))
    for number in range(1, 21, 2):
        call(peer, number, [10])
    balance = peer.connection._account.balance
    peer.now += 1000
    assert flood(peer, "pings", int(balance) // limits.PING) is None
    assert flood(peer, "pings", 1) is CALM
