"""How much of what a client sent is read in one turn of the event loop, and that nothing is lost between turns."""

from __future__ import annotations

import struct

import pytest

from millstream.gateway.http2 import frames
from millstream.gateway.http2.connection import SETTINGS_BYTES_MAX, SETTINGS_WORK, TURN_WORK_MAX
from millstream.gateway.http2.events import DataReceived, ErrorCode, Event, RequestStarted
from millstream.gateway.http2.frames import Setting, frame
from millstream.gateway.http2.header_blocks import Headers
from millstream.gateway.http2.sender import Sender
from tests.kit.http2_peer import Peer, ended_with

MANY = 3 * TURN_WORK_MAX
REST = Event[Headers]


def turns(peer: Peer, data: bytes) -> list[list[REST]]:
    """Return the events of each turn that reading `data` takes."""
    found = [peer.send(data)]
    while peer.connection.unread:
        found.append(peer.connection.receive_rest(peer.now))
    return found


def test_frames_beyond_the_work_of_a_turn_wait_for_the_next():
    peer = Peer()
    peer.begin(1)
    read = turns(peer, b"".join(frame(frames.DATA, 0, 1, b"%d" % (at % 10)) for at in range(MANY)))
    assert len(read) >= 3
    assert max(len(events) for events in read) <= TURN_WORK_MAX
    data = b"".join(event.data for events in read for event in events if isinstance(event, DataReceived))
    assert data == b"".join(b"%d" % (at % 10) for at in range(MANY))


def test_header_blocks_count_by_their_bytes():
    """A field of four bytes takes as long to decode as a frame takes to read."""
    peer = Peer()
    block = peer.block() + b"\x10\x01a\x01b" * 300
    sent = [frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1 + 2 * at, block) for at in range(20)]
    read = turns(peer, b"".join(sent))
    assert len(read) >= 10
    assert sum(isinstance(event, RequestStarted) for events in read for event in events) == 20


def test_large_data_needs_one_turn():
    peer = Peer()
    peer.begin(1)
    assert len(turns(peer, frame(frames.DATA, 0, 1, bytes(16384)) * 15)) == 1


def test_a_fault_ends_the_connection_after_the_frames_before_it():
    peer = Peer()
    peer.begin(1)
    read = turns(peer, frame(frames.DATA, 0, 1, b"x") * MANY + frame(frames.PING, 0, 1, bytes(8)))
    assert sum(isinstance(event, DataReceived) for events in read for event in events) == MANY
    assert [ended_with(events) for events in read] == [None] * (len(read) - 1) + [ErrorCode.PROTOCOL_ERROR]
    assert not peer.connection.unread


def test_a_frame_that_is_too_long_ends_the_connection_after_the_frames_before_it():
    peer = Peer()
    peer.begin(1)
    read = turns(peer, frame(frames.DATA, 0, 1, b"x") * MANY + frame(frames.SETTINGS, 0, 0, bytes(1 << 20)))
    assert sum(isinstance(event, DataReceived) for events in read for event in events) == MANY
    assert ended_with(read[-1]) is ErrorCode.FRAME_SIZE_ERROR


def test_what_waits_is_dropped_with_the_connection():
    peer = Peer()
    peer.begin(1)
    peer.send(frame(frames.DATA, 0, 1, b"x") * MANY)
    waited = [peer.connection.unread]
    peer.connection.abandon()
    assert [*waited, peer.connection.unread] == [True, False]
    assert peer.connection.receive_rest(peer.now) == []


def test_a_frame_in_pieces_is_read_after_those_that_waited():
    peer = Peer()
    peer.begin(1)
    last = frame(frames.DATA, frames.END_STREAM, 1, b"end")
    turns(peer, frame(frames.DATA, 0, 1, b"x") * MANY + last[:4])
    assert peer.send(last[4:]) == [DataReceived(1, b"end", True)]


def test_a_repeated_setting_changes_the_windows_once(monkeypatch: pytest.MonkeyPatch):
    """Each change walks all streams: 16 KiB of changes took half a second with 1,024 streams."""
    set_to: list[int] = []
    monkeypatch.setattr(Sender, "set_initial_window", lambda _, size_bytes: set_to.append(size_bytes))
    values = [1, 70_000, 65_535]
    payload = b"".join(struct.pack(">HI", Setting.INITIAL_WINDOW_SIZE, value) for value in values)
    assert Peer().send(frame(frames.SETTINGS, 0, 0, payload)) == []
    assert set_to == [65_535]


@pytest.mark.parametrize(("size_bytes", "code"), [(SETTINGS_BYTES_MAX // 6 * 6, None), (1026, "ENHANCE_YOUR_CALM")])
def test_settings_of_a_frame_are_bounded(size_bytes: int, code: str | None):
    payload = struct.pack(">HI", 0xAAAA, 1) * (size_bytes // 6)
    ended = ended_with(Peer().send(frame(frames.SETTINGS, 0, 0, payload)))
    assert (None if ended is None else ended.name) == code


def test_settings_frames_are_not_all_read_in_one_turn():
    peer = Peer()
    assert len(turns(peer, frame(frames.SETTINGS, 0, 0) * 16)) >= 16 * SETTINGS_WORK // TURN_WORK_MAX
