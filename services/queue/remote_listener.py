"""The gateway's reply port: replies of workers on other hosts, without a trip through Redis.

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
from typing import cast

from millstream.services.queue.remote_reply import (
    FRAME_HEAD,
    HELLO,
    LOGIN_HEAD_BYTES,
    LOGIN_S_MAX,
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    RECEIPT,
    Login,
    ReplyAddress,
    decode_login,
    gateway_proof,
    is_valid,
    pool_secret,
)

log = logging.getLogger("millstream.queue")

LINKS_MAX = 1024  # connections of workers; beyond that a worker uses the reply list
LOGINS_MAX = 64  # connections that have not logged in yet; beyond that they are refused
PORTS_TRIED = 16  # the port and those after it, for the gateways of one host
RECEIPT_BYTES_MAX = 64 * 1024  # receipts that a worker has not read; beyond that its connection is closed
KEEP_ALIVE_S = 30  # after which a silent connection is probed: a host that vanished closes nothing
WARN_AGAIN_S = 60.0  # between two warnings about connections that did not log in
_LISTEN_BACKLOG = 64

#: Called with the pool of a worker and its reply. Raises ValueError for what is no reply.
OnReply = Callable[[str, bytes], None]


class RemoteListener:
    """Listens on the reply port of one gateway. Call it only in the event loop.

    Args:
        port: the first port that is tried, up to PORTS_TRIED; 0: any free port.
        on_reply: called with each reply.
        clock: monotonic seconds.
    """

    def __init__(self, port: int, on_reply: OnReply, clock: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self.on_reply = on_reply
        self._secret = os.urandom(32)
        self._bound: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._host = ""
        self._failed = False  # the last attempt to listen, of which a warning told
        self.links: set[RemoteLink] = set()  # those that have logged in
        self.logins: set[RemoteLink] = set()  # those that have not
        self.refused = 0  # connections that did not log in; the gateway counts them, and resets this
        self._warned_at = float("-inf")
        self._unwarned = 0  # refused since the last warning

    async def listen(self, host: str) -> bool:
        """Listen on an address of this host, unless that is done; returns whether the gateway listens now.

        Call it again regularly: a port becomes free, or the host gets another address. The address of the first call
        is kept while the host has it.
        """
        if self._server is not None and host != self._host and not _is_local(self._host):
            log.warning("this host lost the address %s of its reply port", self._host)
            self._server.close()
            self._server = self._bound = None
        if self._bound is None:  # set before the first wait: two pools may get their connections at once
            try:
                self._bound = _bind(host, self._port)
            except OSError as error:
                if not self._failed:
                    log.warning("replies of workers on other hosts come through Redis: no port on %s: %s", host, error)
                self._failed = True
                return False
            self._failed, self._host = False, host
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: RemoteLink(self), sock=self._bound)
            self._log_address()
        return True

    def _log_address(self) -> None:
        host, port, _ = self.address("")
        if ip_address(host).is_loopback:
            log.warning(
                "no other host can send replies to %s port %d: name an address of this host in MILLSTREAM_REDIS_URL "
                "that others can reach",
                host,
                port,
            )
        else:
            log.info("workers on other hosts send replies to %s port %d", host, port)

    def address(self, pool: str) -> ReplyAddress:
        """Return what workers of a pool need in order to connect. Call it after `listen`."""
        assert self._bound is not None
        return ReplyAddress(self._host, self._bound.getsockname()[1], self.secret(pool))

    def secret(self, pool: str) -> bytes:
        """Return the secret by which workers of a pool log in."""
        return pool_secret(self._secret, pool)

    def refuse(self, client: str, why: str) -> None:
        """Count a connection that did not log in, and warn now and then: anybody can open one.

        Args:
            client: its address.
            why: the reason, for people.
        """
        self.refused += 1
        self._unwarned += 1
        now = self._clock()
        if now >= self._warned_at + WARN_AGAIN_S:
            count, self._unwarned, self._warned_at = self._unwarned, 0, now
            log.warning("%d connections to the reply port were refused, the last one from %s: %s", count, client, why)

    def stop(self) -> None:
        """Close all connections. Call it when no batch is in flight."""
        if self._server is not None:
            self._server.close()
        for link in [*self.links, *self.logins]:
            link.close()


class RemoteLink(asyncio.Protocol):
    """One connection of a worker."""

    def __init__(self, listener: RemoteListener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._nonce = os.urandom(NONCE_BYTES)
        self._pool: str | None = None  # of the worker that has logged in
        self._login: Login | None = None
        self._received = bytearray()
        self._taken = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        listener = self._listener
        if len(listener.logins) >= LOGINS_MAX or len(listener.links) >= LINKS_MAX:
            self._refuse("too many are open")
            return
        listener.logins.add(self)
        self._timer = asyncio.get_running_loop().call_later(LOGIN_S_MAX, self._time_out)
        _keep_alive(self._transport.get_extra_info("socket"))
        self._transport.write(HELLO + self._nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._listener.links.discard(self)
        self._listener.logins.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Close the connection. Replies in it have no receipt, so their worker sends them again."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            if self._pool is None and not self._log_in():
                return
            self._take_replies()
        except ValueError as error:
            if self._pool is None:
                self._refuse(str(error))
                return
            log.warning("the connection of a worker on another host is closed: %s", error)
            self.close()

    def _time_out(self) -> None:
        self._listener.refused += 1  # no warning: a worker inside a long run does not go on with its login
        self.close()

    def _refuse(self, why: str) -> None:
        if self._transport is not None:
            peer = self._transport.get_extra_info("peername")
            self._listener.refuse(peer[0] if peer else "a client that is gone", why)
        self.close()

    def _log_in(self) -> bool:
        """Take the login if it is there; return whether the worker has logged in. Raises ValueError."""
        if self._login is None:
            if len(self._received) < LOGIN_HEAD_BYTES:
                return False
            self._login = decode_login(bytes(self._received[:LOGIN_HEAD_BYTES]))
            del self._received[:LOGIN_HEAD_BYTES]
        if len(self._received) < self._login.pool_bytes:
            return False
        name = bytes(self._received[: self._login.pool_bytes])
        del self._received[: self._login.pool_bytes]
        pool = name.decode()
        secret = self._listener.secret(pool)
        if not is_valid(self._login, secret, name, self._nonce):
            raise ValueError("it does not know the pool's secret")
        assert self._transport is not None
        assert self._timer is not None
        self._timer.cancel()
        self._listener.logins.discard(self)
        self._listener.links.add(self)
        self._pool = pool
        self._transport.write(gateway_proof(secret, self._nonce, self._login.nonce))
        return True

    def _take_replies(self) -> None:
        """Take the whole replies that have come, and send one receipt for them. Raises ValueError."""
        assert self._pool is not None
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
            if self._taken > before:
                self._send_receipt()

    def _take(self, reply: bytes) -> None:
        assert self._pool is not None
        try:
            self._listener.on_reply(self._pool, reply)
        except ValueError as error:
            raise ValueError(f"what it sent is no reply: {error}") from error
        except Exception:
            log.exception("handling a reply failed")
        self._taken += 1

    def _send_receipt(self) -> None:
        if self._transport is None:
            return
        self._transport.write(RECEIPT.pack(self._taken))
        if self._transport.get_write_buffer_size() > RECEIPT_BYTES_MAX:
            self.close()


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first free port. Raises OSError if none of them is free."""
    for tried in range(port, min(port + PORTS_TRIED, 1 << 16) if port else 1):
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, tried))
            bound.listen(_LISTEN_BACKLOG)
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return bound
    raise OSError(errno.EADDRINUSE, f"ports {port} to {min(port + PORTS_TRIED, 1 << 16) - 1} are in use")


def _is_local(host: str) -> bool:
    """Return whether this host has an address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _keep_alive(link: socket.socket) -> None:
    with suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
