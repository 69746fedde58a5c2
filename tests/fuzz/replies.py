"""Target of the reply port: what somebody sends there, with and without the pool's secret."""

from __future__ import annotations

import asyncio
import socket

from millstream.services.queue.reply_port import ReplyPort
from millstream.services.queue.reply_protocol import (
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
    assert (whole.taken, whole.closed) == (pieces.taken, pieces.closed)
    assert whole.receipts() == pieces.receipts() == len(whole.taken)
    assert logged_in or not whole.taken
    whole.end()
    pieces.end()


class _Sent:
    """A connection to a reply port: what it is sent, and what it answers."""

    def __init__(self, logged_in: bool) -> None:
        self.taken: list[bytes] = []
        self._logged_in = logged_in
        self._port = ReplyPort(0, self._take)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._socket = socket.create_connection(server.getsockname())
            connection, _ = server.accept()
        connection.setblocking(False)
        self._port._welcome(connection)
        [self._link] = self._port.links
        hello = self._socket.recv(1000)
        assert hello[: len(HELLO)] == HELLO
        if logged_in:
            self.feed(encode_login(self._port.secret(POOL), POOL, hello[len(HELLO) :], bytes(NONCE_BYTES)))
            assert len(self._socket.recv(1000)) == PROOF_BYTES
            assert not self._port.logins

    def _take(self, pool: str, reply: bytes) -> None:
        """What a gateway does with a reply before it looks for its batch. Raises ValueError."""
        assert pool == POOL
        decode_reply(reply)
        self.taken.append(reply)

    @property
    def closed(self) -> bool:
        return not self._port.links

    def feed(self, data: bytes) -> None:
        if not self.closed:
            self._link.take(data)
            assert len(self._link._received) < MESSAGE_BYTES_MAX + FRAME_HEAD.size  # type: ignore[attr-defined]

    def receipts(self) -> int:
        """Return how many replies the last receipt confirms."""
        self._link.close()
        answers = b""
        while more := self._socket.recv(1000):
            answers += more
        assert self._logged_in or not answers
        return int(RECEIPT.unpack(answers[-RECEIPT.size :])[0]) if answers else 0

    def end(self) -> None:
        self._socket.close()
        assert not self._port.links
        assert not self._port.logins
