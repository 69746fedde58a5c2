"""A worker's connections to the reply sockets of the gateways on its host.

connect ─> WELCOME of the gateway: it reads what is sent
reply ─> send ─> True: it is in the gateway's socket buffer      False: the caller sends it through Redis
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.reply_socket import (
    MESSAGE_BYTES_MAX,
    SOCKET_TYPE,
    WELCOME,
    WELCOME_DIRECT,
    is_of_this_user,
    socket_address,
    socket_name,
)

log = logging.getLogger("millstream.queue")

TRY_AGAIN_S = 5.0  # after a gateway could not be reached: on another host, of an earlier release, or gone
LINKS_MAX = 1024  # gateways that are remembered; beyond that all are forgotten and reached again


class ReplyLinks:
    """Sends replies to gateways on this host. Never blocks. Not thread-safe.

    Args:
        folder: has the socket files of the gateways.
        keys: the pool's; they name the installation, and a reply list names its gateway.
        clock: monotonic seconds.
    """

    def __init__(self, folder: Path, keys: PoolKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._keys = keys
        self._clock = clock
        self._links: dict[str, socket.socket] = {}
        self._direct: set[str] = set()  # gateways that dispatch batches directly
        self._unwelcomed: dict[str, socket.socket] = {}  # connections that their gateways have not accepted yet
        self._away: dict[str, float] = {}  # gateways that cannot be reached, and when to try again

    def send(self, replies: bytes, message: bytes) -> bool:
        """Send a reply to the gateway that reads the list `replies`; False if that is not possible now.

        The message is sent as a whole or not at all.
        """
        if len(message) > MESSAGE_BYTES_MAX:
            return False
        gateway = self._keys.gateway_of(replies)
        link = self._links.get(gateway) or self._welcomed(gateway)
        if link is None:
            return False
        try:
            link.send(message, socket.MSG_NOSIGNAL)
        except BlockingIOError:  # the gateway does not read now
            return False
        except OSError as error:
            log.debug("gateway %s left its reply socket: %s", gateway, error)
            self.drop(gateway)
            return False
        return True

    def elsewhere(self, replies: bytes) -> str | None:
        """Return the gateway that reads a list if it has no reply socket on this host; None: it has, or might have."""
        gateway = self._keys.gateway_of(replies)
        return gateway if gateway in self._away else None

    def direct(self, gateway: str) -> socket.socket | None:
        """Return the connection to a gateway that dispatches batches directly; None: it does not, or not yet."""
        link = self._links.get(gateway) or self._welcomed(gateway)
        return link if gateway in self._direct else None

    def drop_link(self, link: socket.socket) -> None:
        """Close a connection, as `drop` does."""
        for gateway, known in list(self._links.items()):
            if known is link:
                self.drop(gateway)

    def drop(self, gateway: str) -> None:
        """Close the connection to a gateway, which is tried again after TRY_AGAIN_S."""
        link = self._links.pop(gateway, None)
        if link is not None:
            link.close()
        self._direct.discard(gateway)
        self._away[gateway] = self._clock() + TRY_AGAIN_S

    def _welcomed(self, gateway: str) -> socket.socket | None:
        """Return the connection to a gateway that has just welcomed it; connect to it first."""
        link = self._unwelcomed.get(gateway)
        if link is None:
            self._connect(gateway)
            return None
        try:
            welcome = link.recv(len(WELCOME_DIRECT))
        except BlockingIOError:
            return None
        except OSError:
            welcome = b""
        del self._unwelcomed[gateway]
        if welcome not in {WELCOME, WELCOME_DIRECT}:
            log.debug("gateway %s refused a connection to its reply socket", gateway)
            link.close()
            self._away[gateway] = self._clock() + TRY_AGAIN_S
            return None
        self._links[gateway] = link
        if welcome == WELCOME_DIRECT:
            self._direct.add(gateway)
        return link

    def _connect(self, gateway: str) -> None:
        now = self._clock()
        if "/" in gateway:  # not the name of a gateway
            return
        if self._away.get(gateway, 0.0) > now:
            return
        if len(self._links) + len(self._unwelcomed) + len(self._away) >= LINKS_MAX:
            self.close()
        link = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
        try:
            link.setblocking(False)
            with socket_address(self._folder, socket_name(self._keys.of_installation.installation, gateway)) as address:
                link.connect(address)
            if not is_of_this_user(link):
                raise PermissionError(f"the socket of gateway {gateway} belongs to another user")
        except OSError as error:
            link.close()
            log.debug("gateway %s is reached through Redis: %s", gateway, error)
            self._away[gateway] = now + TRY_AGAIN_S
            return
        self._away.pop(gateway, None)
        self._unwelcomed[gateway] = link

    def close(self) -> None:
        """Close all connections; `send` opens them again."""
        for link in (*self._links.values(), *self._unwelcomed.values()):
            link.close()
        self._links.clear()
        self._direct.clear()
        self._unwelcomed.clear()
        self._away.clear()
