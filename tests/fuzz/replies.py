"""Target of the reply port: what somebody sends there, with and without the pool's secret."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from millstream.services.queue.remote_listener import RemoteLink, RemoteListener
from millstream.services.queue.remote_reply import (
    FRAME_HEAD,
    HELLO,
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    PROOF_BYTES,
    RECEIPT,
    encode_login,
)
from millstream.services.wire.batch import decode_reply

POOL = "cpu"
#: the first byte of an input: a worker that has logged in sends the rest
LOGGED_IN = b"L"


def fuzz_replies(data: bytes) -> None:
    """Pieces mean the same as the whole; a receipt counts each reply that was taken; nobody else gets in."""
    asyncio.run(_fuzz(data[:1] == LOGGED_IN, data[1:]))


async def _fuzz(logged_in: bool, data: bytes) -> None:
    whole, pieces = _Sent(logged_in), _Sent(logged_in)
    whole.feed(data)
    for at in range(0, len(data), 5):
        pieces.feed(data[at : at + 5])
    assert (whole.taken, whole.closed, whole.receipts()) == (pieces.taken, pieces.closed, pieces.receipts())
    assert whole.receipts() == len(whole.taken)
    assert logged_in or not whole.taken
    whole.end()
    pieces.end()


class _Sent:
    """A connection to a listener, without a socket: what it is sent, and what it answers."""

    def __init__(self, logged_in: bool) -> None:
        self.taken: list[bytes] = []
        self.closed = False
        self._answers = bytearray()
        self._logged_in = logged_in
        self._listener = RemoteListener(0, self._take)
        self._link = RemoteLink(self._listener)
        self._link.connection_made(cast("asyncio.Transport", self))
        assert self._answers[: len(HELLO)] == HELLO
        nonce = bytes(self._answers[len(HELLO) :])
        self._answers.clear()
        if logged_in:
            self.feed(encode_login(self._listener.secret(POOL), POOL, nonce, bytes(NONCE_BYTES)))
            assert len(self._answers) == PROOF_BYTES
            self._answers.clear()
            assert self._listener.links == {self._link}

    def _take(self, pool: str, reply: bytes) -> None:
        """What a gateway does with a reply before it looks for its batch. Raises ValueError."""
        assert pool == POOL
        decode_reply(reply)
        self.taken.append(reply)

    def feed(self, data: bytes) -> None:
        if not self.closed:
            self._link.data_received(data)
            assert len(self._link._received) < MESSAGE_BYTES_MAX + FRAME_HEAD.size

    def receipts(self) -> int:
        """Return how many replies the last receipt confirms."""
        if not self._logged_in:
            assert not self._answers
        return int(RECEIPT.unpack(self._answers[-RECEIPT.size :])[0]) if self._answers else 0

    def end(self) -> None:
        self._link.connection_lost(None)
        assert not self._listener.links
        assert not self._listener.logins

    # what a transport does

    def write(self, data: bytes) -> None:
        self._answers += data

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else None

    def setsockopt(self, *option: int) -> None:
        pass
