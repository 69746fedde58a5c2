"""server: uvicorn's server, and the order in which a gateway leaves.

SIGTERM -> accepts no more -> not ready, answers say close -> idle connections close -> what is in flight is answered
A server of another protocol in the same loop goes through the same steps at the same time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import uvicorn

from millstream.gateway.connection.drain import Drain
from millstream.services.errors import Failure

LOOK_S = 0.02
TASKS_S = 1  # for routes to notice that their client is gone
#: who connected just before the gateway stopped accepting has sent its first request by then, and gets a plain answer
ARRIVING_S = 0.25
#: for how long connections are told by their answers to leave, before those that did not ask are closed: a client that
#: asks more often is never met by a close that it did not hear of
NOTICE_S_MAX = 2.0
NOTICE_SHARE = 0.25  # of the time there is, where that is short
GIVE_UP_SHARE = 0.9  # after which what is still in flight is refused; the rest is for saying so


class Drainable(Protocol):
    """What the server has to know about its gateway to take it out of service."""

    drain: Drain

    def ready(self) -> bool:
        """Whether requests are being answered now."""

    async def settle(self) -> None:
        """Return when nothing is on its way."""

    def abandon(self) -> None:
        """Refuse whatever is still on its way, and all that comes."""


class SideServer(Protocol):
    """A server of another protocol, in the same event loop."""

    async def start(self) -> None:
        """Listen. Raises Failure."""

    def stop_accepting(self) -> None:
        """New connections go to others, if there are any."""

    async def leave(self, give_up: float) -> None:
        """Return when all is answered, at the instant `give_up` at the latest. Called when draining has begun."""

    async def close(self) -> None:
        """End what is still there."""


class Server(uvicorn.Server):
    """`shared`: others accept on the same ports. `drain_s`: it has left so many seconds after a SIGTERM.

    `ready_fd`: where it says, in one line, that it is ready for the first time; None: nowhere. `beside`: what starts and
    leaves with it.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Drainable,
        drain_s: float,
        *,
        shared: bool,
        ready_fd: int | None,
        beside: SideServer | None = None,
    ) -> None:
        super().__init__(config)
        self._beside = beside
        self._gateway = gateway
        self._drain_s = drain_s
        self._shared = shared
        self._ready_fd = ready_fd
        self._saying: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._beside is not None and self.started:
            try:
                await self._beside.start()
            except Failure as failure:
                print(f"error: {failure.message}", file=sys.stderr)
                await self.lifespan.shutdown()
                self.started, self.should_exit = False, True
                return
        if self._ready_fd is not None:
            self._saying = asyncio.create_task(self._say_ready(self._ready_fd))

    async def _say_ready(self, fd: int) -> None:
        while not self._gateway.ready():
            await asyncio.sleep(LOOK_S)
        with suppress(OSError):  # nobody listens any more
            os.write(fd, b"ready\n")
        os.close(fd)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave without failing anybody, and within the time there is."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._drain_s * GIVE_UP_SHARE
        notice_s = min(NOTICE_S_MAX, self._drain_s * NOTICE_SHARE)
        if self._shared:
            # Others take new connections from now on. Readiness comes after that: a probe that connects anew asks the
            # port, not this process, and somebody serves there.
            self._stop_accepting()
            if self._beside is not None:
                self._beside.stop_accepting()
            await asyncio.sleep(min(ARRIVING_S, notice_s))
        self._gateway.drain.begun = True
        leaving = None if self._beside is None else asyncio.create_task(self._beside.leave(give_up))
        # With a port of its own, whoever looks at readiness has to be able to see it, and sends until then.
        await self._until(self._no_connections if self._shared else _never, loop.time() + notice_s)
        self._stop_accepting()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # idle ones close; the others are told by their answers
        await self._until(self._no_connections, give_up)
        if leaving is not None:
            await leaving
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gateway.settle(), max(0.0, give_up - loop.time()))
        self._gateway.abandon()
        await self._until(self._no_connections, loop.time() + self._drain_s * (1 - GIVE_UP_SHARE) / 2)
        if self._beside is not None:
            await self._beside.close()
        if self._saying is not None:
            self._saying.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client does not even read
        self.config.timeout_graceful_shutdown = TASKS_S
        await super().shutdown(sockets)

    def _stop_accepting(self) -> None:
        for server in self.servers:
            server.close()  # a listening socket that is shared stays open in the other gateways and the supervisor

    def _no_connections(self) -> bool:
        return not self.server_state.connections

    @staticmethod
    async def _until(true: Callable[[], bool], instant_s: float) -> None:
        loop = asyncio.get_running_loop()
        while not true() and loop.time() < instant_s:
            await asyncio.sleep(LOOK_S)


def _never() -> bool:
    return False
