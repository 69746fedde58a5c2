"""A worker's connection to a gateway for replies in parts: it sends in order, and hears what the gateway says.

open_link: socket file of a gateway on this host, or login at its reply port ─> StreamLink
send ─> fragments ─> the gateway, waiting while it does not read          a thread reads ─> on_message ─> on_end, once
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.reply_links import LocalLink, RemoteLink
from millstream.services.queue.reply_protocol import (
    FRAME_HEAD,
    LOGIN_S_MAX,
    MESSAGE_BYTES_MAX,
    WELCOME,
    ReplyAddress,
    socket_name,
)
from millstream.services.wire.part_messages import TWO_WAY, Cancel, Taken, in_fragments, read_from_gateway

log = logging.getLogger("millstream.queue")

#: for a gateway to read what fills the buffers; then the connection is given up, with its streams
SEND_S_MAX = 5.0
_WORDS_BYTES_MAX = 4096  # of a message of a gateway
_TIME = struct.Struct("ll")


class StreamLink:
    """One connection. `send` may be called in any thread.

    Args:
        connection: to a gateway that has welcomed it.
        framed: whether it is a stream of bytes, in which each message has its length before it.
        on_message: called in a thread of the link with what the gateway says.
        on_end: called there once, after the last of them.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        framed: bool,
        on_message: Callable[[Taken | Cancel], None],
        on_end: Callable[[], None],
    ) -> None:
        self._socket = connection
        self._framed = framed
        self._on_message, self._on_end = on_message, on_end
        self._sending = threading.Lock()
        self.ended = False
        connection.setblocking(True)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(SEND_S_MAX), int(SEND_S_MAX % 1 * 1e6))
        )
        self.send(TWO_WAY)
        threading.Thread(target=self._read, name="streams of a gateway", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message as a whole. Raises OSError: the connection has ended, or the gateway does not read."""
        with self._sending:
            try:
                for piece in in_fragments(message, MESSAGE_BYTES_MAX):
                    if self._framed:
                        self._socket.sendall(FRAME_HEAD.pack(len(piece)) + piece, socket.MSG_NOSIGNAL)
                    else:
                        self._socket.send(piece, socket.MSG_NOSIGNAL)
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; its thread ends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while message := self._next():
                self._on_message(read_from_gateway(message))
        except (OSError, ValueError) as error:
            log.debug("a connection for streams ended: %s", error)
        except Exception:
            log.exception("what a gateway said could not be handled")
        self.close()
        self.ended = True
        self._on_end()
        with self._sending:
            self._socket.close()

    def _next(self) -> bytes:
        """Return the next message; b"": the connection has ended."""
        if not self._framed:
            return self._socket.recv(_WORDS_BYTES_MAX)
        [size] = FRAME_HEAD.unpack(self._exactly(FRAME_HEAD.size))
        if size > _WORDS_BYTES_MAX:
            raise ValueError(f"a message of {size} bytes")
        return self._exactly(size)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise ConnectionResetError("the gateway closed the connection")
            data += more
        return data


def open_link(
    folder: Path,
    keys: PoolKeys,
    gateway: str,
    address: Callable[[str], bytes | None],
    on_message: Callable[[Taken | Cancel], None],
    on_end: Callable[[], None],
) -> StreamLink:
    """Connect to a gateway. Blocks up to LOGIN_S_MAX. Raises OSError, which says why that is not possible.

    Args:
        folder: has the socket files of the gateways on this host.
        keys: of the worker's pool.
        gateway: its name.
        address: returns what Redis has as the address of a gateway's reply port; None: it has none.
        on_message: as of StreamLink.
        on_end: as of StreamLink.
    """
    link: LocalLink[None] | RemoteLink[None]
    try:
        link = LocalLink(folder, socket_name(keys.of_installation.installation, gateway))
    except OSError:
        try:
            found = ReplyAddress.decode(address(gateway) or b"")
        except ValueError as error:
            raise ConnectionRefusedError(
                "replies in parts need a connection to the gateway, which has no reply port (MILLSTREAM_REPLY_PORT)"
            ) from error
        link = RemoteLink(found, keys.pool)
    else:
        link.socket.settimeout(LOGIN_S_MAX)
        try:
            if not link.welcome().startswith(WELCOME):
                raise ConnectionRefusedError("the gateway refused the connection")
        except OSError:
            link.socket.close()
            raise
    framed = isinstance(link, RemoteLink)
    return StreamLink(link.socket, framed=framed, on_message=on_message, on_end=on_end)
