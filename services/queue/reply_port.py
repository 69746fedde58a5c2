"""The gateway's connector for other hosts: its reply port.

worker ─> login ─> frames ─> on_reply(pool, reply) ─> one receipt for all that came together
A reply without a receipt is the worker's: it sends it again, through Redis.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

from millstream.services.queue.reply_listener import BACKLOG, LINKS_MAX, ReplyLink, ReplyListener
from millstream.services.queue.reply_protocol import (
    FRAME_HEAD,
    HELLO,
    LOGIN_S_MAX,
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    RECEIPT,
    Login,
    ReplyAddress,
    gateway_proof,
    pool_secret,
)
from millstream.services.wire.part_messages import is_of_stream

log = logging.getLogger("millstream.queue")

LOGINS_MAX = 64  # connections that have not logged in yet; beyond that they are refused
PORTS_TRIED = 16  # the port and those after it, for the gateways of one host
KEEP_ALIVE_S = 30  # after which a silent connection is probed: a host that vanished closes nothing
WARN_AGAIN_S = 60.0  # between two warnings about connections that did not log in


class ReplyPort(ReplyListener):
    """Listens on the reply port of one gateway.

    Args:
        port: the first port that is tried, up to PORTS_TRIED; 0: any free port.
        on_reply: called with the pool of a worker and its reply. Raises ValueError for what is no reply.
        clock: monotonic seconds.
    """

    def __init__(
        self, port: int, on_reply: Callable[[str, bytes], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._port = port
        self._clock = clock
        self.on_reply = on_reply
        self._secret = os.urandom(32)
        self._host = ""
        self._failed = False  # the last attempt to listen, of which a warning told
        self.logins: set[_PortLink] = set()  # of `links`, those that have not logged in
        self.refused = 0  # connections that did not log in; the gateway counts them, and resets this
        self._warned_at = float("-inf")
        self._unwarned = 0  # refused since the last warning

    def listen(self, host: str) -> bool:
        """Listen on an address of this host, unless that is done; returns whether the gateway listens now.

        Call it again regularly: a port becomes free. The address of the first call is kept.
        """
        if self._bound is None:
            try:
                self._bound = _bind(host, self._port)
            except OSError as error:
                if not self._failed:
                    log.warning("replies of workers on other hosts come through Redis: no port on %s: %s", host, error)
                self._failed = True
                return False
            self._failed, self._host = False, host
            self._accept_on()
            port = self._bound.getsockname()[1]
            if ip_address(host).is_loopback:
                log.warning(
                    "no other host can send replies to %s port %d: name an address of this host in "
                    "MILLSTREAM_REDIS_URL that others can reach",
                    host,
                    port,
                )
            else:
                log.info("workers on other hosts send replies to %s port %d", host, port)
        return True

    def address(self, pool: str) -> ReplyAddress:
        """Return what workers of a pool need in order to connect. Call it after `listen`."""
        assert self._bound is not None
        return ReplyAddress(self._host, self._bound.getsockname()[1], self.secret(pool))

    def secret(self, pool: str) -> bytes:
        """Return the secret by which workers of a pool log in."""
        return pool_secret(self._secret, pool)

    def _welcome(self, connection: socket.socket) -> None:
        if len(self.logins) >= LOGINS_MAX or len(self.links) >= LINKS_MAX:
            self.refuse(connection, "too many are open")
            connection.close()
        else:
            _PortLink(self, connection)

    def refuse(self, connection: socket.socket, why: str) -> None:
        """Count a connection that did not log in, and warn now and then: anybody can open one."""
        self.refused += 1
        self._unwarned += 1
        now = self._clock()
        if now >= self._warned_at + WARN_AGAIN_S:
            count, self._unwarned, self._warned_at = self._unwarned, 0, now
            client = "a client that is gone"
            with suppress(OSError):
                client = connection.getpeername()[0]
            log.warning("%d connections to the reply port were refused, the last one from %s: %s", count, client, why)


class _PortLink(ReplyLink):
    """A connection of a worker on another host: a login, then frames, which get receipts."""

    def __init__(self, port: ReplyPort, connection: socket.socket) -> None:
        super().__init__(port, connection)
        self._port = port
        self._nonce = os.urandom(NONCE_BYTES)
        self._received = bytearray()
        self._taken = 0
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port.logins.add(self)
        self._timer = asyncio.get_running_loop().call_later(LOGIN_S_MAX, self._refuse, "it did not log in in time")
        super().say(HELLO + self._nonce)

    def _refuse(self, why: str) -> None:
        self._port.refuse(self.socket, why)
        self.close()

    def close(self) -> None:
        """Close the connection. Replies in it have no receipt, so their worker sends them again."""
        self._port.logins.discard(self)
        self._timer.cancel()
        super().close()

    def take(self, data: bytes) -> None:
        self._received += data
        try:
            if self.pool is not None or self._log_in():
                self._take_replies()
        except ValueError as error:
            if self.pool is None:
                self._refuse(str(error))
                return
            log.warning("the connection of a worker on another host is closed: %s", error)
            self.close()

    def _log_in(self) -> bool:
        """Take the login if it is there; return whether the worker has logged in. Raises ValueError."""
        login = Login.read(self._received)
        if login is None:
            return False
        pool = login.pool.decode()
        secret = self._port.secret(pool)
        if not login.is_valid(secret, self._nonce):
            raise ValueError("it does not know the pool's secret")
        self._timer.cancel()
        self._port.logins.discard(self)
        self.pool = pool
        super().say(gateway_proof(secret, self._nonce, login.nonce))
        return True

    def _take_replies(self) -> None:
        """Take the whole replies that have come, and send one receipt for them. Raises ValueError."""
        received, at, before = self._received, 0, self._taken
        try:
            while len(received) - at >= FRAME_HEAD.size:
                [size] = FRAME_HEAD.unpack_from(received, at)
                if size > MESSAGE_BYTES_MAX:
                    raise ValueError(f"a reply of {size} bytes, at most {MESSAGE_BYTES_MAX} are allowed")
                end = at + FRAME_HEAD.size + size
                if len(received) < end:
                    break
                self._take(bytes(received[at + FRAME_HEAD.size : end]))
                at = end
        finally:
            del received[:at]
            if self._taken > before and not self.two_way:
                super().say(RECEIPT.pack(self._taken))

    def _take(self, reply: bytes) -> None:
        assert self.pool is not None
        try:
            if is_of_stream(reply):
                self.take_stream(reply)
            else:
                self._port.on_reply(self.pool, reply)
        except ValueError as error:
            raise ValueError(f"what it sent is no reply: {error}") from error
        except Exception:
            log.exception("handling a reply failed")
        self._taken += 1

    def say(self, message: bytes) -> None:
        """Send a frame to the worker."""
        super().say(FRAME_HEAD.pack(len(message)) + message)


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first free port. Raises OSError if none of them is free."""
    for tried in range(port, min(port + PORTS_TRIED, 1 << 16) if port else 1):
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            bound.setblocking(False)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, tried))
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return bound
    raise OSError(errno.EADDRINUSE, f"ports {port} to {min(port + PORTS_TRIED, 1 << 16) - 1} are in use")
