"""A blocking connection to Redis for a worker's main loop: a command can be sent now and its reply read later."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from typing import Any, cast

import hiredis

from millstream.services.errors import Code, Failure
from millstream.services.queue.pipeline import check_reply, handshake_commands
from millstream.services.queue.url import RedisAddress, locate

_READ_BYTES = 1 << 18
NOTHING = object()  # returned by `try_receive`: no reply has come yet
#: Errors caused by the server's state or role, not by the command: it will succeed on another connection, or later.
_STATE_ERRORS = frozenset(
    {"NOSCRIPT", "READONLY", "MASTERDOWN", "LOADING", "BUSY", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED"}
)


class CommandRefused(Failure):
    """Redis refused this command: it has no memory, a limit is exceeded, or access is denied."""

    def __init__(self, answer: str) -> None:
        super().__init__(Code.UNAVAILABLE, f"Redis answered: {answer}")
        self.answer = answer

    @property
    def error_code(self) -> str:
        """The first word of the answer, by which Redis' protocol tells errors apart."""
        return self.answer.partition(" ")[0]


class ConsumerLink:
    """One blocking connection, whose replies come in the order of the commands. Not thread-safe.

    Every method raises Failure(UNAVAILABLE) when the connection is lost: close it and open another.

    Args:
        timeout_s: how long a reply may take; None: the address's `reply_s_max`.
    """

    def __init__(self, address: RedisAddress, timeout_s: float | None = None) -> None:
        self._reader = hiredis.Reader()
        try:
            self._socket = self._open(locate(address), timeout_s or address.reply_s_max)
        except OSError as error:
            raise Failure(Code.UNAVAILABLE, f"Redis at {address} is not reachable: {error}") from error
        try:
            for words in handshake_commands(address):
                check_reply(words, self.call(*words))
        except Failure:
            self.close()
            raise

    @staticmethod
    def _open(address: RedisAddress, timeout_s: float) -> socket.socket:
        if address.path is not None:
            link = socket.socket(socket.AF_UNIX)
            link.settimeout(timeout_s)
            try:
                link.connect(address.path)
            except OSError:
                link.close()
                raise
        else:
            context = address.ssl_context()
            link = socket.create_connection((address.host, address.port), timeout_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = link if context is None else context.wrap_socket(link, server_hostname=address.host)
        # Python's own timeout polls before every send and receive: two system calls where the kernel's needs none.
        link.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1_000_000))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, limit)
        return link

    def send(self, words: tuple[bytes | str | int, ...]) -> None:
        """Send a command; its reply is read by a later `receive`."""
        self._write(hiredis.pack_command(cast("Any", words)))

    def send_both(self, first: tuple[bytes | str | int, ...], second: tuple[bytes | str | int, ...]) -> None:
        """Send two commands in one write."""
        self._write(hiredis.pack_command(cast("Any", first)) + hiredis.pack_command(cast("Any", second)))

    def _write(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except OSError as error:
            raise Failure(Code.UNAVAILABLE, f"the connection to Redis was lost: {error}") from error

    def receive(self, spin_s: float = 0.0) -> Any:
        """Return the reply to the earliest unanswered command, after busy-polling for up to `spin_s` before blocking.

        Raises `CommandRefused` if Redis refuses this command. Any other error of Redis (a script is gone, the server
        is still loading) is a Failure like a lost connection, and a new connection resolves it.
        """
        reader = self._reader
        try:
            while (reply := reader.gets()) is False:
                self._feed(self._spin(spin_s) if spin_s else self._socket.recv(_READ_BYTES))
        except (OSError, hiredis.ProtocolError) as error:
            raise Failure(Code.UNAVAILABLE, f"the connection to Redis was lost: {error}") from error
        return self._checked(reply)

    def try_receive(self) -> Any:
        """Return the reply to the earliest unanswered command, or NOTHING. Not for TLS. Raises as `receive` does."""
        reader = self._reader
        try:
            if (reply := reader.gets()) is False:
                try:
                    self._feed(self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT))
                except BlockingIOError:
                    return NOTHING
                reply = reader.gets()
        except (OSError, hiredis.ProtocolError) as error:
            raise Failure(Code.UNAVAILABLE, f"the connection to Redis was lost: {error}") from error
        return NOTHING if reply is False else self._checked(reply)

    @property
    def pollable(self) -> bool:
        """Whether a reply makes `fileno` readable. With TLS, a reply may be in a record that was read before."""
        return not isinstance(self._socket, ssl.SSLSocket)

    def fileno(self) -> int:
        return self._socket.fileno()

    def _feed(self, data: bytes) -> None:
        if not data:
            raise Failure(Code.UNAVAILABLE, "Redis closed the connection")
        self._reader.feed(data)

    @staticmethod
    def _checked(reply: Any) -> Any:
        """Return a reply that is no error. Raises as `receive` does."""
        if isinstance(reply, hiredis.ReplyError):
            answer = str(reply)
            refused = CommandRefused(answer)
            if refused.error_code in _STATE_ERRORS:
                raise Failure(Code.UNAVAILABLE, refused.message) from reply
            raise refused from reply
        return reply

    def _spin(self, seconds: float) -> bytes:
        # A TLS socket reads whole records: it cannot be polled with MSG_DONTWAIT.
        until = time.perf_counter() + (0 if isinstance(self._socket, ssl.SSLSocket) else seconds)
        while time.perf_counter() < until:
            try:
                return self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()  # let runnable threads go first
        return self._socket.recv(_READ_BYTES)

    def call(self, *words: bytes | str | int) -> Any:
        """Send a command and return its reply."""
        self.send(words)
        return self.receive()

    def close(self) -> None:
        self._socket.close()
