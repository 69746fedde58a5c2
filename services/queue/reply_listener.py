"""The gateway's end of the reply channel, and its connector for this host: replies without a trip through Redis.

worker <─ WELCOME; worker ─> send ─> socket buffer of this gateway ─> on_reply, or DirectPeer.message
A message that was sent is in a buffer of this process. It is read even if its worker has died meanwhile, and it is lost
only with the gateway, whose requests are then lost, too.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.reply_protocol import (
    MESSAGE_BYTES_MAX,
    SOCKET_TYPE,
    SUFFIX,
    WELCOME,
    WELCOME_DIRECT,
    is_of_this_user,
    socket_address,
    socket_name,
)
from millstream.services.wire.batch import is_control
from millstream.services.wire.part_messages import (
    KIND_FRAGMENT,
    KIND_LAST_FRAGMENT,
    KIND_PART,
    KIND_TWO_WAY,
    PART_BYTES_MAX,
)

log = logging.getLogger("millstream.queue")

LINKS_MAX = 1024  # connections of workers to one listener; beyond that a worker uses the reply list
BACKLOG = 64  # connections that were not accepted yet; beyond that a worker uses the reply list and tries later
ACCEPT_AGAIN_S = 1.0  # pause after a connection could not be accepted, because no file descriptor is free


class DirectPeer(Protocol):
    """Handles the connections over which this gateway dispatches batches."""

    def message(self, link: socket.socket, data: bytes) -> None:
        """Handle a message of wire/batch.py. Raises ValueError."""

    def closed(self, link: socket.socket) -> None:
        """Handle the end of a connection. `link` is closed after it."""


class StreamPeer(Protocol):
    """Handles the parts of replies that workers send."""

    def part(self, link: ReplyLink, data: bytes) -> None:
        """Handle a part (wire/part_messages.py). Raises ValueError."""

    def closed(self, link: ReplyLink) -> None:
        """Handle the end of a connection."""


class ReplyListener(ABC):
    """Accepts the connections of workers on a listening socket. Call it only in the event loop.

    `streams` gets the parts of replies; None: this gateway asks for none.
    """

    streams: StreamPeer | None = None

    def __init__(self) -> None:
        self.links: set[ReplyLink] = set()
        self._bound: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None

    @abstractmethod
    def _welcome(self, connection: socket.socket) -> None:
        """Take a new connection, or close it."""

    def _accept_on(self) -> None:
        if self._bound is not None:
            asyncio.get_running_loop().add_reader(self._bound.fileno(), self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._bound is not None
        try:
            connection, _ = self._bound.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            log.warning("the connection of a worker cannot be accepted: %s", error)
            loop.remove_reader(self._bound.fileno())
            self._pause = loop.call_later(ACCEPT_AGAIN_S, self._accept_on)
            return
        connection.setblocking(False)
        self._welcome(connection)

    def stop(self) -> None:
        """Close all connections. Call it when no batch is in flight."""
        for link in [*self.links]:
            link.close()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._bound is not None:
            asyncio.get_running_loop().remove_reader(self._bound.fileno())
            self._bound.close()
            self._bound = None


class ReplyLink(ABC):
    """One connection of a worker."""

    def __init__(self, listener: ReplyListener, connection: socket.socket) -> None:
        self.socket = connection
        self.pool: str | None = None  # of the worker, once it has logged in; None: it is on this host
        self.two_way = False  # whether it carries streams, and gets messages
        self._whole = bytearray()  # fragments of a message
        self._others = listener.links
        self._streams = listener.streams
        listener.links.add(self)
        asyncio.get_running_loop().add_reader(connection.fileno(), self._receive)

    @abstractmethod
    def take(self, data: bytes) -> None:
        """Handle what the worker sent."""

    def take_stream(self, data: bytes) -> None:
        """Handle a message of wire/part_messages.py. Raises ValueError."""
        kind = data[0]
        if kind == KIND_TWO_WAY:
            self.two_way = True
        elif self._streams is None or not self.two_way:
            raise ValueError("it was asked for no parts")
        elif kind == KIND_PART:
            self._streams.part(self, data)
        elif kind in {KIND_FRAGMENT, KIND_LAST_FRAGMENT}:
            self._whole += data[1:]
            if len(self._whole) > PART_BYTES_MAX:
                raise ValueError(f"a part of more than {PART_BYTES_MAX} bytes")
            if kind == KIND_LAST_FRAGMENT:
                whole, self._whole = bytes(self._whole), bytearray()
                self._streams.part(self, whole)
        else:
            raise ValueError(f"a message of kind {kind}")

    def say(self, message: bytes) -> None:
        """Send a message of a few bytes to the worker, or close the connection: it does not read."""
        try:
            whole = self.socket.send(message, socket.MSG_NOSIGNAL) == len(message)
        except OSError:
            whole = False
        if not whole:
            self.close()

    def _receive(self) -> None:
        """Read once: the event loop calls again while there is more, but not after a reset; then read to the end."""
        reset = False
        while True:
            try:
                data = self.socket.recv(MESSAGE_BYTES_MAX + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the worker left messages unread; what it sent before is there (unix(7))
                reset = True
                continue
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self.take(data)
            if not reset:
                return

    def close(self) -> None:
        """Close the connection, unless that is done."""
        if self in self._others:
            self._others.discard(self)
            asyncio.get_running_loop().remove_reader(self.socket.fileno())
            self.socket.close()
            if self._streams is not None and self.two_way:
                self._streams.closed(self)


class ReplySocket(ReplyListener):
    """Listens on the socket file of one gateway.

    Connections of other users, and too many, are refused: they get no WELCOME. Every other connection is closed only
    after its worker closed it: a message that was sent is always read.

    Args:
        folder: has the socket file, which workers on this host find by its name.
        keys: name the installation.
        gateway: unique name of the gateway.
        on_reply: called with each reply.
        direct: gets the other messages; None: this gateway dispatches no batches by itself.
    """

    def __init__(
        self,
        folder: Path,
        keys: InstallationKeys,
        gateway: str,
        on_reply: Callable[[bytes], None],
        direct: DirectPeer | None = None,
    ) -> None:
        super().__init__()
        self._folder = folder
        self._installation = keys.installation
        self._name = socket_name(keys.installation, gateway)
        self.on_reply = on_reply
        self.direct = direct

    def start(self) -> None:
        """Listen, and remove the sockets of killed gateways. Without a socket, all replies come through Redis."""
        remove_dead_sockets(self._folder, self._installation)
        try:
            self._bound = self._listen()
        except OSError as error:
            log.warning("replies of workers on this host come through Redis: no socket in %s: %s", self._folder, error)
            return
        self._accept_on()

    def _listen(self) -> socket.socket:
        """Return the listening socket. Its file gets its name last: a worker that finds it can connect."""
        listener = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
        draft = self._folder / f".{self._name}"
        try:
            listener.setblocking(False)
            with socket_address(self._folder, draft.name) as address:
                listener.bind(address)
            try:
                draft.chmod(0o600)
                listener.listen(BACKLOG)
                draft.rename(self._folder / self._name)
            except OSError:
                draft.unlink(missing_ok=True)
                raise
        except OSError:
            listener.close()
            raise
        return listener

    def _welcome(self, connection: socket.socket) -> None:
        if len(self.links) >= LINKS_MAX or not is_of_this_user(connection):
            connection.close()
            return
        _SocketLink(self, connection)
        with suppress(OSError):  # the worker has left already
            connection.send(WELCOME if self.direct is None else WELCOME_DIRECT, socket.MSG_NOSIGNAL)

    def stop(self) -> None:
        listened = self._bound is not None
        super().stop()
        if listened:
            with suppress(OSError):
                (self._folder / self._name).unlink()


class _SocketLink(ReplyLink):
    """A connection whose messages keep their boundaries."""

    def __init__(self, listener: ReplySocket, connection: socket.socket) -> None:
        super().__init__(listener, connection)
        self._listener = listener

    def take(self, data: bytes) -> None:
        direct = self._listener.direct
        if len(data) > MESSAGE_BYTES_MAX:
            log.warning("a message of more than %d bytes on the reply socket was dropped", MESSAGE_BYTES_MAX)
            return
        try:
            if direct is not None and is_control(data):
                direct.message(self.socket, data)
            elif KIND_PART <= data[0] <= KIND_LAST_FRAGMENT:
                self.take_stream(data)
            else:
                self._listener.on_reply(data)
        except ValueError as error:
            log.warning("a message on the reply socket is no reply: %s", error)
        except Exception:
            log.exception("handling a reply failed")

    def close(self) -> None:
        if self._listener.direct is not None:
            self._listener.direct.closed(self.socket)
        super().close()


def remove_dead_sockets(folder: Path, installation: str) -> int:
    """Remove the socket files of gateways of this installation that have ended; returns how many."""
    removed = 0
    for path in folder.glob(f"{glob.escape(installation)}.*{SUFFIX}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, SOCKET_TYPE) as link:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                continue
            link.setblocking(False)
            try:
                with socket_address(folder, path.name) as address:
                    link.connect(address)
            except ConnectionRefusedError:
                path.unlink()
                removed += 1
    return removed
