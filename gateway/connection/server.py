"""Uvicorn's server, and the order in which a gateway drains.

SIGTERM ─> stops accepting ─> not ready, replies say close ─> idle connections close ─> requests in flight are answered
SIGUSR1 of a supervisor that stops all gateways of a port, or SIGTERM to the only one: not ready and say close first,
and accept for `delay_s` more.
A server of another protocol in the same event loop takes the same steps at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Protocol

import uvicorn

from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.tls_connection import Handshakes
from millstream.services.errors import Failure
from millstream.services.process.exit_status import end_at_once
from millstream.services.process.logs import about, exit_message
from millstream.services.process.sign_of_life import SignOfLife

log = logging.getLogger("millstream.gateway")

POLL_S = 0.02
TICK_S = 0.5  # between two updates of the date in replies
TASKS_S = 1  # time for routes to notice that their client is gone
#: time for connections accepted last to send their first request, which is then answered without `Connection: close`
ARRIVING_S = 0.25
#: how long replies say `Connection: close` before idle connections are closed: a client that sends requests more often
#: than this always gets the header before the close
NOTICE_S_MAX = 2.0
NOTICE_SHARE = 0.25  # the same limit as a part of the drain time, for short drain times
#: the part of the drain time after which requests in flight are refused; the rest is for sending the refusals
GIVE_UP_SHARE = 0.9

#: files, pipes and sockets besides those of clients; half of the limit, if that is less
OTHER_FILES = 256
#: descriptors that a connection of the limit may take over HTTP: as many again are open while they are refused
HTTP_SHARE, GRPC_SHARE = 2, 1


class Drainable(Protocol):
    """The parts of a gateway that the server needs to drain it."""

    drain: Drain

    def ready(self) -> bool:
        """Whether the gateway answers requests now."""

    async def settle(self) -> None:
        """Return when no request is in flight."""

    def abandon(self) -> None:
        """Refuse the requests that are in flight, and all new ones."""


class SideServer(Protocol):
    """A server of another protocol, in the same event loop."""

    async def start(self) -> None:
        """Listen. Raises Failure."""

    def stop_accepting(self) -> None:
        """Leave new connections to other gateways on the port, if there are any."""

    async def drain(self, give_up: float) -> None:
        """Return when all requests are answered, or at the instant `give_up` of the loop's clock."""

    async def close(self) -> None:
        """End the connections and calls that are left."""


class Server(uvicorn.Server):
    """The HTTP server of one gateway process.

    Args:
        config: uvicorn's configuration.
        gateway: The gateway that is drained when the server shuts down.
        drain_s: Seconds that the server may take to shut down.
        shared_port: Whether other processes accept on the same ports.
        ready_fd: A file descriptor of the supervisor that started this process, and ends it if a drain is to be cut
            short: it gets the line "ready" when the gateway is first ready; None: no supervisor started it.
        side_server: A server that starts and drains together with this server.
        handshakes: Connections whose TLS handshake is not complete; None: the server does without TLS.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Drainable,
        drain_s: float,
        *,
        shared_port: bool,
        ready_fd: int | None,
        side_server: SideServer | None = None,
        handshakes: Handshakes | None = None,
    ) -> None:
        super().__init__(config)
        self._side_server = side_server
        self._gateway = gateway
        self._drain_s = drain_s
        self._shared_port = shared_port
        self._ready_fd = ready_fd
        self.delay_s = 0.0  # between not being ready and a drain, after SIGTERM
        self._terminated = False  # by SIGTERM
        self.life = SignOfLife(None)  # shows the supervisor that the event loop turns
        self._signs: asyncio.Task[None] | None = None
        self._handshakes = Handshakes() if handshakes is None else handshakes
        self._supervised = ready_fd is not None
        self._announcement: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain; at a second signal, end at once.

        uvicorn's own raises the signal again after the drain: a clean end would look like a failure (status 143).
        """
        if self.should_exit and not self._supervised:
            end_at_once(sig)
        self._terminated = sig == signal.SIGTERM
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._exit.set)

    async def main_loop(self) -> None:
        """Return when the server is to end. uvicorn's own looks ten times a second whether it is."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S - time.monotonic() % TICK_S):
                    await self._exit.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._signs = asyncio.create_task(self.life.show_always(), name="sign of life")
        await super().startup(sockets)
        if self._side_server is not None and self.started:
            try:
                await self._side_server.start()
            except Failure as failure:
                exit_message(failure.message)
                await self.lifespan.shutdown()
                self.started, self.should_exit = False, True
                return
        if self.started:
            log.info("listens on %s, accepting connections", ", ".join(sorted(self._addresses())))
        if self._ready_fd is not None:
            self._announcement = asyncio.create_task(self._announce_ready(self._ready_fd))

    def _addresses(self) -> set[str]:
        names = (listener.getsockname() for server in self.servers for listener in server.sockets)
        return {f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name) for name in names}

    async def _announce_ready(self, fd: int) -> None:
        while not self._gateway.ready():
            await asyncio.sleep(POLL_S)
        with suppress(OSError):  # the reader has closed its end
            os.write(fd, b"ready\n")
        os.close(fd)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain without failing a request, within `drain_s`."""
        loop = asyncio.get_running_loop()
        delay_s = self.delay_s if self._terminated and not self._shared_port else 0.0
        if delay_s:
            self.leave_ready()
            await asyncio.sleep(delay_s)
        began = loop.time()
        log.info("draining: %d connections are open", len(self.server_state.connections))
        give_up = loop.time() + self._drain_s * GIVE_UP_SHARE
        notice_s = min(NOTICE_S_MAX, self._drain_s * NOTICE_SHARE)
        if self._shared_port:
            # Other processes take new connections from now on. Readiness changes after that: a probe on a new
            # connection asks the port, not this process, and the port is still served.
            self._stop_accepting()
            if self._side_server is not None:
                self._side_server.stop_accepting()
            await asyncio.sleep(min(ARRIVING_S, notice_s))
        self._gateway.drain.begin()
        side = None if self._side_server is None else asyncio.create_task(self._side_server.drain(give_up))
        # With a port of its own the server goes on accepting: load balancers have to see that it is not ready, and
        # send requests until they do.
        if delay_s:
            self._stop_accepting()
        others = self._shared_port or delay_s
        await self._until(self._no_connections if others else _never, loop.time() + notice_s)
        self._stop_accepting()
        self._handshakes.abort()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # idle connections close; the others close after their reply
        await self._until(self._no_connections, give_up)
        if side is not None:
            await side
        with suppress(TimeoutError):
            async with asyncio.timeout_at(give_up):
                await self._gateway.settle()
        self._gateway.abandon()
        await self._until(self._no_connections, loop.time() + self._drain_s * (1 - GIVE_UP_SHARE) / 2)
        if self._side_server is not None:
            await self._side_server.close()
        if self._announcement is not None:
            self._announcement.cancel()
        unread = list(self.server_state.connections)
        for connection in unread:
            connection.transport.abort()  # its client does not read
        values = about(seconds=round(loop.time() - began, 3), aborted=len(unread))
        log.info("drained in %.3g s; %d connections were aborted", loop.time() - began, len(unread), extra=values)
        self.config.timeout_graceful_shutdown = TASKS_S
        await super().shutdown(sockets)

    def leave_ready(self) -> None:
        """Be not ready, and tell clients to connect anew, but go on accepting."""
        self._gateway.drain.begin()

    def _stop_accepting(self) -> None:
        for server in self.servers:
            server.close()  # a shared listening socket stays open in the other gateways and in the supervisor

    def _no_connections(self) -> bool:
        return not self.server_state.connections and not self._handshakes

    @staticmethod
    async def _until(condition: Callable[[], bool], instant_s: float) -> None:
        loop = asyncio.get_running_loop()
        while not condition() and loop.time() < instant_s:
            await asyncio.sleep(POLL_S)


def _never() -> bool:
    return False


def connections_within_limit(wanted: int, *, grpc: bool, handshakes: int) -> int:
    """Return how many connections each listener may have, at most `wanted`, and keep file descriptors in reserve.

    Without a reserve, idle connections take the last descriptor, and keys and models can no longer be read.

    Raises the soft limit on open files (1,024 in most shells) to what is needed, or to the hard limit.

    Args:
        wanted: the connections that the settings allow.
        grpc: whether there is a listener for gRPC.
        handshakes: connections that may be open besides, before their TLS handshake is complete.
    """
    shares = HTTP_SHARE + (GRPC_SHARE if grpc else 0)
    needed = wanted * shares + handshakes + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised >= needed:
        return wanted
    free = raised - min(OTHER_FILES, raised // 2)
    fitting = max(1, (free - min(handshakes, free // 2)) // shares)
    log.warning(
        "%d connections may be open (MILLSTREAM_CLIENT_CONNECTIONS_MAX), but only %d files: %d are accepted over HTTP"
        "%s, and the rest of the files is kept for keys and models; raise the limit (ulimit -n %d)",
        wanted,
        raised,
        fitting,
        " and over gRPC each" if grpc else "",
        needed,
    )
    return fitting
