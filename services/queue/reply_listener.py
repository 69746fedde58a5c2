"""The gateway's end of its reply socket: replies of workers on this host, without a trip through Redis.

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.reply_socket import (
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

log = logging.getLogger("millstream.queue")

LINKS_MAX = 1024  # connections of workers; beyond that a worker uses the reply list
BACKLOG = 64  # connections that were not accepted yet; beyond that a worker uses the reply list and tries later
ACCEPT_AGAIN_S = 1.0  # pause after a connection could not be accepted, because no file descriptor is free


class DirectPeer(Protocol):
    """Handles the connections over which this gateway dispatches batches."""

    def message(self, link: socket.socket, data: bytes) -> None:
        """Handle a message of wire/direct.py. Raises ValueError."""

    def closed(self, link: socket.socket) -> None:
        """Handle the end of a connection. `link` is closed after it."""


class ReplyListener:
    """Listens on the reply socket of one gateway. Call it only in the event loop.

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
        self._folder = folder
        self._installation = keys.installation
        self._name = socket_name(keys.installation, gateway)
        self._on_reply = on_reply
        self._direct = direct
        self._listener: socket.socket | None = None
        self._links: set[socket.socket] = set()
        self._pause: asyncio.TimerHandle | None = None

    @property
    def links(self) -> int:
        """How many workers are connected."""
        return len(self._links)

    def start(self) -> None:
        """Listen, and remove the sockets of killed gateways. Without a socket, all replies come through Redis."""
        remove_dead_sockets(self._folder, self._installation)
        try:
            self._listener = self._listen()
        except OSError as error:
            log.warning("replies of workers on this host come through Redis: no socket in %s: %s", self._folder, error)
            return
        self._accept_on()

    def _listen(self) -> socket.socket:
        """Return the listening socket. Its file gets its name last: a worker that finds it can connect."""
        listener = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
        try:
            listener.setblocking(False)
            draft = f".{self._name}"
            with socket_address(self._folder, draft) as address:
                listener.bind(address)
            path = self._folder / draft
            try:
                path.chmod(0o600)
                listener.listen(BACKLOG)
                path.rename(self._folder / self._name)
            except OSError:
                path.unlink(missing_ok=True)
                raise
        except OSError:
            listener.close()
            raise
        return listener

    def stop(self) -> None:
        """Close all connections. Call it when no batch is in flight."""
        if self._pause is not None:
            self._pause.cancel()
        for link in [*self._links]:
            self._close(link)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with suppress(OSError):
                (self._folder / self._name).unlink()

    def _accept_on(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            log.warning("the connection of a worker cannot be accepted: %s", error)
            loop.remove_reader(self._listener.fileno())
            self._pause = loop.call_later(ACCEPT_AGAIN_S, self._accept_on)
            return
        if len(self._links) >= LINKS_MAX or not is_of_this_user(link):
            link.close()
            return
        link.setblocking(False)
        self._links.add(link)
        loop.add_reader(link.fileno(), self._receive, link)
        with suppress(OSError):  # the worker has left already
            link.send(WELCOME if self._direct is None else WELCOME_DIRECT, socket.MSG_NOSIGNAL)

    def _receive(self, link: socket.socket) -> None:
        """Read one message; the event loop calls again while there are more."""
        try:
            data = link.recv(MESSAGE_BYTES_MAX + 1)
        except (BlockingIOError, ConnectionResetError):
            return  # it ended with messages unread; what it sent before is still read, and then the end (unix(7))
        except OSError:
            data = b""
        if not data:
            self._close(link)
        elif len(data) > MESSAGE_BYTES_MAX:
            log.warning("a message of more than %d bytes on the reply socket was dropped", MESSAGE_BYTES_MAX)
        else:
            try:
                if self._direct is not None and is_control(data):
                    self._direct.message(link, data)
                else:
                    self._on_reply(data)
            except ValueError as error:
                log.warning("a message on the reply socket is no reply: %s", error)
            except Exception:
                log.exception("handling a reply failed")

    def _close(self, link: socket.socket) -> None:
        self._links.discard(link)
        asyncio.get_running_loop().remove_reader(link.fileno())
        if self._direct is not None:
            self._direct.closed(link)
        link.close()


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
