"""A worker's connections to the reply ports of gateways on other hosts.

send ─> kept until its receipt ─> settled: delivered           the connection ended first ─> settled: to be sent again
A gateway's address comes from Redis, over another thread's connection (`wanted`, `found`).
"""

from __future__ import annotations

import hmac
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from millstream.services.queue.remote_reply import (
    FRAME_HEAD,
    HELLO,
    LOGIN_S_MAX,
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    PROOF_BYTES,
    RECEIPT,
    UNCONFIRMED_BYTES_MAX,
    ReplyAddress,
    encode_login,
    gateway_proof,
)

log = logging.getLogger("millstream.queue")

TRY_AGAIN_S = 5.0  # after a gateway could not be reached: it has no reply port, or a firewall is in between
RECEIPT_S_MAX = 1.0  # wait for a receipt; then the connection is closed, and what has none is sent through Redis
LINKS_MAX = 1024  # gateways that are remembered; beyond that all are forgotten and reached again
_BUFFER_BYTES = 2 * UNCONFIRMED_BYTES_MAX
_HELLO_BYTES = len(HELLO) + NONCE_BYTES

Token = TypeVar("Token")


class Kept(NamedTuple, Generic[Token]):
    """A reply without a receipt, and what its sender knows it by."""

    token: Token
    message: bytes
    sent_at: float


class Settled(NamedTuple, Generic[Token]):
    """Replies about which nothing more will be heard."""

    delivered: list[Token]
    undelivered: list[tuple[Token, bytes]]  # their gateways may have them all the same


class RemoteLinks(Generic[Token]):
    """Sends replies to gateways on other hosts. Never blocks, except in `settled`. Not thread-safe, except where said.

    Args:
        pool: the worker's pool.
        clock: monotonic seconds.
    """

    def __init__(self, pool: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._links: dict[str, _Link[Token]] = {}
        self._opening: set[str] = set()  # of `_links`, those that have not logged in
        self._lost: list[Kept[Token]] = []
        self._addresses: dict[str, ReplyAddress] = {}
        self._away: dict[str, float] = {}  # gateways that cannot be reached, and when to try again
        #: gateways whose addresses are to be looked up; another thread reads this, and calls `found`
        self.wanted: set[str] = set()

    def found(self, gateway: str, value: bytes | None) -> None:
        """Take the address that Redis has for a wanted gateway; None: it has none. Called in any thread."""
        address: ReplyAddress | None = None
        if value is not None:
            with suppress(ValueError):
                address = ReplyAddress.decode(value)
        if address is None:
            self._away[gateway] = self._clock() + TRY_AGAIN_S
        else:
            self._addresses[gateway] = address
        self.wanted.discard(gateway)

    def advance(self) -> None:
        """Connect and log in by a step, where that is not done. Replies alone may come too seldom for a login."""
        if len(self._links) < len(self._addresses):  # which another thread found meanwhile
            for gateway, address in self._addresses.copy().items():
                if gateway not in self._links:
                    self._connect(gateway, address)
        for gateway in [*self._opening]:
            self._log_in(gateway)

    def send(self, gateway: str, message: bytes, token: Token) -> bool:
        """Send a reply and keep it until it is settled; False if that is not possible now: nothing was kept."""
        if len(message) > MESSAGE_BYTES_MAX:
            return False
        link = self._links.get(gateway)
        if link is None:
            self._open(gateway)
            return False
        if gateway in self._opening and not self._log_in(gateway):
            return False
        try:
            return link.send(message, token, self._clock())
        except OSError as error:
            self._drop(gateway, error)
            return False

    @property
    def waiting(self) -> bool:
        """Whether `settled` has, or will have, something to return."""
        return bool(self._lost) or any(link.kept for link in self._links.values())

    def unsettled(self, older_s: float = 0.0) -> list[tuple[Token, bytes]]:
        """Return what is not settled and was sent at least `older_s` seconds ago. May be called in any thread."""
        until = self._clock() - older_s
        links = list(self._links.values())
        kept = [one for kept in (self._lost, *(link.kept for link in links)) for one in [*kept]]
        return [(one.token, one.message) for one in kept if one.sent_at <= until]

    def settled(self, wait_s: float = 0.0) -> Settled[Token]:
        """Return the replies that were settled since the last call; wait up to `wait_s` for receipts of the others."""
        delivered: list[Token] = []
        until = self._clock() + wait_s
        while True:
            waiting = [(gateway, link) for gateway, link in self._links.items() if link.kept]
            for gateway, link in waiting:
                try:
                    delivered += link.delivered(self._clock())
                except OSError as error:
                    self._drop(gateway, error)
            left_s = until - self._clock()
            if left_s <= 0 or not self._wait(left_s):
                break
        undelivered, self._lost = self._lost, []
        return Settled(delivered, [(one.token, one.message) for one in undelivered])

    def _wait(self, seconds: float) -> bool:
        """Wait for a receipt; False: none came, or all are there."""
        poller = select.poll()
        waiting = [link for link in self._links.values() if link.kept]
        for link in waiting:
            poller.register(link.socket.fileno(), select.POLLIN)
        return bool(waiting) and bool(poller.poll(seconds * 1000))

    def _open(self, gateway: str) -> None:
        now = self._clock()
        if len(self._links) + len(self._away) + len(self._addresses) + len(self.wanted) >= LINKS_MAX:
            self.close()
        address = self._addresses.get(gateway)
        if address is None:
            if self._away.get(gateway, 0.0) <= now:
                self.wanted.add(gateway)
            return
        self._connect(gateway, address)

    def _connect(self, gateway: str, address: ReplyAddress) -> None:
        self._away.pop(gateway, None)
        self._close_ended()
        try:
            self._links[gateway] = _Link(address, self._pool, self._clock())
        except OSError as error:
            self._forget(gateway, error)
        else:
            self._opening.add(gateway)

    def _log_in(self, gateway: str) -> bool:
        """Take the next step of a login; return whether it is done."""
        try:
            done = self._links[gateway].log_in(self._clock())
        except OSError as error:
            self._drop(gateway, error)
            return False
        if done:
            self._opening.discard(gateway)
        return done

    def _close_ended(self) -> None:
        """Close the connections of gateways that have ended: nothing is sent to them any longer."""
        for gateway, link in list(self._links.items()):
            if not link.kept and link.ended:
                self._drop(gateway, ConnectionResetError("the gateway closed the connection"))

    def _drop(self, gateway: str, why: OSError) -> None:
        link = self._links.pop(gateway)
        self._opening.discard(gateway)
        self._lost += link.kept
        link.socket.close()
        self._forget(gateway, why)

    def _forget(self, gateway: str, why: OSError) -> None:
        log.debug("replies to gateway %s go through Redis: %s", gateway, why)
        self._addresses.pop(gateway, None)
        self._away[gateway] = self._clock() + TRY_AGAIN_S

    def close(self) -> None:
        """Close all connections; `settled` returns what was kept, and `send` opens them again."""
        for link in self._links.values():
            self._lost += link.kept
            link.socket.close()
        self._links.clear()
        self._opening.clear()
        self._addresses.clear()
        self._away.clear()
        self.wanted.clear()


class _Link(Generic[Token]):
    """One connection. Its methods raise OSError when it has to be closed."""

    def __init__(self, address: ReplyAddress, pool: str, now: float) -> None:
        self.kept: deque[Kept[Token]] = deque()
        self._kept_bytes = 0
        self._taken = 0  # replies that the gateway has said to have
        self._secret = address.secret
        self._pool = pool
        self._login_until = now + LOGIN_S_MAX
        self._nonce = os.urandom(NONCE_BYTES)
        self._gateway_nonce = b""
        self._received = b""
        self.socket = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        try:
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            with suppress(BlockingIOError):
                self.socket.connect((address.host, address.port))
        except OSError:
            self.socket.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether the gateway has closed the connection, and has sent nothing that is not read yet."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: bytes, token: Token, now: float) -> bool:
        if self._kept_bytes + len(message) > UNCONFIRMED_BYTES_MAX:
            return False
        frame_bytes = FRAME_HEAD.size + len(message)
        try:
            sent = self.socket.sendmsg([FRAME_HEAD.pack(len(message)), message], [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        if sent < frame_bytes:
            raise BrokenPipeError("a reply did not fit into the socket's buffer")
        self.kept.append(Kept(token, message, now))
        self._kept_bytes += len(message)
        return True

    def delivered(self, now: float) -> list[Token]:
        """Return the tokens of the replies whose receipts have come."""
        taken = self._taken
        with suppress(BlockingIOError):
            data = self._received + self._receive(64 * RECEIPT.size)
            whole = len(data) // RECEIPT.size * RECEIPT.size
            if whole:
                [taken] = RECEIPT.unpack(data[whole - RECEIPT.size : whole])
            self._received = data[whole:]
        if not 0 <= taken - self._taken <= len(self.kept):
            raise ConnectionError("the gateway has more replies than were sent")
        tokens: list[Token] = []
        while self._taken < taken:
            one = self.kept.popleft()
            self._kept_bytes -= len(one.message)
            self._taken += 1
            tokens.append(one.token)
        if self.kept and now > self.kept[0].sent_at + RECEIPT_S_MAX:
            if tokens:  # what has its receipt is delivered; the next call closes the connection
                return tokens
            raise TimeoutError("the gateway does not read its replies")
        return tokens

    def log_in(self, now: float) -> bool:
        """Take the next step of the login; return whether it is done."""
        if now > self._login_until:
            raise TimeoutError("the gateway does not answer on its reply port")
        with suppress(BlockingIOError):
            if not self._gateway_nonce:
                hello = self._exactly(_HELLO_BYTES)
                if not hello.startswith(HELLO):
                    raise ConnectionError("another service answers on the gateway's reply port")
                self._gateway_nonce = hello[len(HELLO) :]
                login = encode_login(self._secret, self._pool, self._gateway_nonce, self._nonce)
                if self.socket.send(login, socket.MSG_NOSIGNAL) < len(login):
                    raise BrokenPipeError("the login did not fit into the socket's buffer")
            proof = self._exactly(PROOF_BYTES)
            if not hmac.compare_digest(proof, gateway_proof(self._secret, self._gateway_nonce, self._nonce)):
                raise ConnectionError("the server on the gateway's reply port does not know the pool's secret")
            return True
        return False

    def _exactly(self, count: int) -> bytes:
        """Return the next `count` bytes. Raises BlockingIOError until all of them are there."""
        self._received += self._receive(count - len(self._received))
        if len(self._received) < count:
            raise BlockingIOError
        data, self._received = self._received, b""
        return data

    def _receive(self, count: int) -> bytes:
        data = self.socket.recv(count)
        if not data:
            raise ConnectionResetError("the gateway closed the connection")
        return data
