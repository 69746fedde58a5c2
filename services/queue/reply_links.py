"""A worker's connections to gateways, which take replies without a trip through Redis.

on this host: socket file ─> WELCOME ─> send: DELIVERED, it is in the gateway's socket buffer
on another host: address, login in a thread ─> send: KEPT until its receipt ─> settled: delivered, or to be sent again
A reply that `send` does not take is sent through Redis. An address comes from Redis, over another thread's connection
(`wanted`, `found`).
"""

from __future__ import annotations

import hmac
import logging
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.reply_protocol import (
    FRAME_HEAD,
    HELLO,
    LOGIN_S_MAX,
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    PROOF_BYTES,
    RECEIPT,
    SOCKET_TYPE,
    UNCONFIRMED_BYTES_MAX,
    WELCOME,
    WELCOME_DIRECT,
    ReplyAddress,
    encode_login,
    gateway_proof,
    is_of_this_user,
    socket_address,
    socket_name,
)

log = logging.getLogger("millstream.queue")

TRY_AGAIN_S = 5.0  # after a gateway could not be reached: it has no reply port, a firewall is in between, or it is gone
RECEIPT_S_MAX = 1.0  # wait for a receipt; then the connection is closed, and what has none is sent through Redis
LINKS_MAX = 1024  # gateways that are remembered; beyond that all are forgotten and reached again

Token = TypeVar("Token")


class Sent(Enum):
    """What became of a message that was sent."""

    DELIVERED = auto()
    KEPT = auto()  # `settled` tells of it


class Kept(NamedTuple, Generic[Token]):
    """A reply without a receipt, and what its sender knows it by."""

    token: Token
    message: bytes
    sent_at: float


class ReplyLinks(Generic[Token]):
    """Sends replies to gateways. Never blocks, except in `settled`. Not thread-safe, except where said.

    Args:
        folder: has the socket files of the gateways on this host.
        keys: the pool's; they name the installation, and a reply list names its gateway.
        clock: monotonic seconds.
    """

    def __init__(self, folder: Path, keys: PoolKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._keys = keys
        self._clock = clock
        self._links: dict[str, _Link[Token]] = {}
        self._logged_in: dict[str, _Link[Token]] = {}  # by another thread, and not used yet
        self._lost: list[Kept[Token]] = []
        self._away: dict[str, float] = {}  # gateways that cannot be reached, and when to try again
        #: gateways on other hosts to log in to; another thread reads this, and calls `found`
        self.wanted: set[str] = set()
        #: whether `settled` has, or will have, something to return
        self.waiting = False

    def send(self, replies: bytes, message: bytes, token: Token) -> Sent | None:
        """Send a reply to the gateway that reads the list `replies`, as a whole; None if that is not possible now."""
        if len(message) > MESSAGE_BYTES_MAX:
            return None
        gateway = self._keys.gateway_of(replies)
        link = self._links.get(gateway) or self._connect(gateway, elsewhere=True)
        if link is None:
            return None
        try:
            sent = link.send(message, token, self._clock())
        except BlockingIOError:  # the gateway does not read now
            return None
        except OSError as error:
            self._drop(gateway, error)
            return None
        if sent is Sent.KEPT:
            self.waiting = True
        return sent

    def direct(self, gateway: str) -> socket.socket | None:
        """Return the connection to a gateway that dispatches batches directly; None: it does not, or not yet."""
        link = self._links.get(gateway) or self._connect(gateway, elsewhere=False)
        try:
            return link.socket if isinstance(link, LocalLink) and link.welcome() == WELCOME_DIRECT else None
        except BlockingIOError:
            return None
        except OSError as error:
            self._drop(gateway, error)
            return None

    def drop(self, connection: socket.socket, why: OSError) -> None:
        """Close a connection that `direct` returned. Its gateway is tried again after TRY_AGAIN_S."""
        for gateway, link in list(self._links.items()):
            if link.socket is connection:
                self._drop(gateway, why)

    def found(self, gateway: str, value: bytes | None) -> None:
        """Log in, in a thread, at the address that Redis has for a wanted gateway; None: it has none.

        Called in any thread.
        """
        try:
            address = ReplyAddress.decode(value or b"")
        except ValueError:
            self._leave_alone(gateway)
        else:
            threading.Thread(target=self._log_in, args=(gateway, address), name="reply login", daemon=True).start()

    def _log_in(self, gateway: str, address: ReplyAddress) -> None:
        try:
            link = RemoteLink[Token](address, self._keys.pool)
        except OSError as error:
            log.debug("replies to gateway %s go through Redis: %s", gateway, error)
            self._leave_alone(gateway)
            return
        if self._logged_in.setdefault(gateway, link) is not link:
            link.socket.close()
        self.wanted.discard(gateway)

    def _leave_alone(self, gateway: str) -> None:
        self._away[gateway] = self._clock() + TRY_AGAIN_S
        self.wanted.discard(gateway)

    def unsettled(self, older_s: float = 0.0) -> list[tuple[Token, bytes]]:
        """Return what is not settled and was sent at least `older_s` seconds ago. May be called in any thread."""
        until = self._clock() - older_s
        links = list(self._links.values())
        kept = [one for kept in (self._lost, *(link.kept for link in links)) for one in [*kept]]
        return [(one.token, one.message) for one in kept if one.sent_at <= until]

    def settled(self, wait_s: float = 0.0) -> tuple[list[Token], list[tuple[Token, bytes]]]:
        """Return what was settled since the last call; wait up to `wait_s` for receipts of the other replies.

        These are the tokens of replies that were delivered, and the replies of which nothing more will be heard: their
        gateways may have them all the same.
        """
        delivered: list[Token] = []
        until = self._clock() + wait_s
        while True:
            waiting = {gateway: link for gateway, link in self._links.items() if link.kept}
            for gateway, link in waiting.items():
                try:
                    delivered += link.delivered(self._clock())
                except OSError as error:
                    self._drop(gateway, error)
            poller = select.poll()
            waiting = {gateway: link for gateway, link in self._links.items() if link.kept}
            for link in waiting.values():
                poller.register(link.socket.fileno(), select.POLLIN)
            left_s = until - self._clock()
            if left_s <= 0 or not waiting or not poller.poll(left_s * 1000):
                break
        undelivered, self._lost = self._lost, []
        self.waiting = bool(waiting)
        return delivered, [(one.token, one.message) for one in undelivered]

    def _connect(self, gateway: str, *, elsewhere: bool) -> _Link[Token] | None:
        """Return a new connection; None: there is none now. `elsewhere`: look on other hosts, too."""
        if gateway in self._logged_in:
            self._links[gateway] = self._logged_in.pop(gateway)
            return self._links[gateway]
        if gateway in self.wanted or self._away.get(gateway, 0.0) > self._clock() or "/" in gateway:
            return None
        if len(self._links) + len(self._logged_in) + len(self._away) + len(self.wanted) >= LINKS_MAX:
            self.close()
        self._close_ended()
        try:
            link = LocalLink[Token](self._folder, socket_name(self._keys.of_installation.installation, gateway))
        except OSError as error:
            log.debug("gateway %s has no socket on this host: %s", gateway, error)
            if elsewhere:
                self.wanted.add(gateway)
            else:
                self._leave_alone(gateway)
            return None
        self._away.pop(gateway, None)
        self._links[gateway] = link
        return link

    def _close_ended(self) -> None:
        """Close the connections of gateways that have ended: nothing is sent to them any longer."""
        for gateway, link in list(self._links.items()):
            if not link.kept and link.ended:
                self._drop(gateway, ConnectionResetError("the gateway closed the connection"))

    def _drop(self, gateway: str, why: OSError) -> None:
        log.debug("replies to gateway %s take another way: %s", gateway, why)
        link = self._links.pop(gateway)
        self._lost += link.kept
        link.socket.close()
        self._leave_alone(gateway)

    def close(self) -> None:
        """Close all connections; `settled` returns what was kept, and `send` opens them again."""
        for link in (*self._links.values(), *self._logged_in.values()):
            self._lost += link.kept
            link.socket.close()
        self._links.clear()
        self._logged_in.clear()
        self._away.clear()
        self.wanted.clear()


class _Link(ABC, Generic[Token]):
    """One connection. Its methods raise OSError when it has to be closed."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.kept: deque[Kept[Token]] = deque()

    @property
    def ended(self) -> bool:
        """Whether the gateway has closed the connection, and has sent nothing that is not read yet."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @abstractmethod
    def send(self, message: bytes, token: Token, now: float) -> Sent:
        """Send a message as a whole. Raises BlockingIOError if that is not possible now."""

    def delivered(self, now: float) -> list[Token]:
        """Return the tokens of the kept replies whose receipts have come."""
        return []


class LocalLink(_Link[Token]):
    """A connection to a gateway on this host."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(socket.socket(socket.AF_UNIX, SOCKET_TYPE))
        self._welcome = b""
        try:
            self.socket.setblocking(False)
            with socket_address(folder, name) as address:
                self.socket.connect(address)
            if not is_of_this_user(self.socket):
                raise PermissionError("its socket belongs to another user")
        except OSError:
            self.socket.close()
            raise

    def welcome(self) -> bytes:
        """Return what the gateway said to this connection. Raises BlockingIOError until it has."""
        if not self._welcome:
            welcome = self.socket.recv(len(WELCOME_DIRECT))
            if welcome not in {WELCOME, WELCOME_DIRECT}:
                raise ConnectionRefusedError("it refused the connection to its socket")
            self._welcome = welcome
        return self._welcome

    def send(self, message: bytes, token: Token, now: float) -> Sent:
        if not self._welcome:
            self.welcome()
        self.socket.send(message, socket.MSG_NOSIGNAL)
        return Sent.DELIVERED


class RemoteLink(_Link[Token]):
    """A connection to the reply port of a gateway on another host. Its constructor blocks, and raises OSError."""

    def __init__(self, address: ReplyAddress, pool: str) -> None:
        super().__init__(socket.create_connection((address.host, address.port), LOGIN_S_MAX))
        self._kept_bytes = 0
        self._taken = 0  # replies that the gateway has said to have
        self._received = b""
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * UNCONFIRMED_BYTES_MAX)
            self._log_in(address.secret, pool)
            self.socket.setblocking(False)
        except OSError:
            self.socket.close()
            raise

    def _log_in(self, secret: bytes, pool: str) -> None:
        nonce, hello = os.urandom(NONCE_BYTES), self._exactly(len(HELLO) + NONCE_BYTES)
        if not hello.startswith(HELLO):
            raise ConnectionError("another service answers on the gateway's reply port")
        gateway_nonce = hello[len(HELLO) :]
        self.socket.sendall(encode_login(secret, pool, gateway_nonce, nonce))
        if not hmac.compare_digest(self._exactly(PROOF_BYTES), gateway_proof(secret, gateway_nonce, nonce)):
            raise ConnectionError("the server on the gateway's reply port does not know the pool's secret")

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise ConnectionResetError("the gateway closed the connection")
            data += more
        return data

    def send(self, message: bytes, token: Token, now: float) -> Sent:
        """Send a reply and keep it."""
        if self._kept_bytes + len(message) > UNCONFIRMED_BYTES_MAX:
            raise BlockingIOError
        frame_bytes = FRAME_HEAD.size + len(message)
        if self.socket.sendmsg([FRAME_HEAD.pack(len(message)), message], [], socket.MSG_NOSIGNAL) < frame_bytes:
            raise BrokenPipeError("a reply did not fit into the socket's buffer")
        self.kept.append(Kept(token, message, now))
        self._kept_bytes += len(message)
        return Sent.KEPT

    def delivered(self, now: float) -> list[Token]:
        taken = self._taken
        with suppress(BlockingIOError):
            data = self._received + self.socket.recv(64 * RECEIPT.size)
            if len(data) == len(self._received):
                raise ConnectionResetError("the gateway closed the connection")
            whole = len(data) // RECEIPT.size * RECEIPT.size
            if whole:
                [taken] = RECEIPT.unpack(data[whole - RECEIPT.size : whole])
            self._received = data[whole:]
        if not 0 <= taken - self._taken <= len(self.kept):
            raise ConnectionError("the gateway has more replies than were sent")
        settled = [self.kept.popleft() for _ in range(taken - self._taken)]
        self._taken = taken
        self._kept_bytes -= sum(len(one.message) for one in settled)
        # What has its receipt is delivered; the next call closes a connection that is late.
        if not settled and self.kept and now > self.kept[0].sent_at + RECEIPT_S_MAX:
            raise TimeoutError("the gateway does not read its replies")
        return [one.token for one in settled]
