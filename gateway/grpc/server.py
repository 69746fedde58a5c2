"""The gRPC server of a gateway, on HTTP/2 connections of its own, in its event loop, and how it drains.

stop_accepting ─> (not ready) ─> drain: GOAWAY in two steps on each connection ─> calls in flight are answered

All connections have a maximum age of some seconds, so that clients reconnect and spread over the gateways.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter

from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.tls_connection import TlsListener, tls_protocol
from millstream.gateway.grpc.codec.messages import Messages
from millstream.gateway.grpc.connections.fast_call import FastCall
from millstream.gateway.grpc.connections.fast_connection import FastConnection, Parts
from millstream.gateway.grpc.fast_infer import FastInfer
from millstream.gateway.grpc.handlers import MethodTable
from millstream.gateway.http.deps import Deps
from millstream.gateway.http2.limits import ConnectionLimits
from millstream.services.errors import Code, Failure
from millstream.services.process.waits import next_tick
from millstream.services.settings import Settings

DRAIN_POLL_S = 0.05
#: maximum age of a connection: AGE_SHARE of the drain time, but at most AGE_S_MAX
AGE_S_MAX = 10.0
AGE_SHARE = 0.25
#: seconds that a call or stream may continue after its connection reached its maximum age: streams may last long
AGE_GRACE_S = 3600.0
#: after this time without a call, idle connections may be closed without a failure for their clients
QUIET_S = 0.5

STREAMS_MAX = 1024  # concurrent calls of one connection
OTHER_CALLS_MAX = 256  # streams, health watches and unary calls beside inference requests
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20
REFUSING_S = 1  # time for sending refusals
#: calls that wait for their requests for less than this are not ended to make room for others
CROWDED_S_MIN = 1.0
#: period of the checks of connections: deadlines, ages and slow clients
CHECK_S = 0.25
IDLE_S = 1.0  # between two checks while there is no connection
BACKLOG = 4096
#: a connection lives up to this share longer than its age: clients that came together do not leave together
JITTER = 0.1


def max_age_s(settings: Settings) -> float:
    """Return the maximum age of a connection in seconds."""
    return min(AGE_S_MAX, settings.drain_s * AGE_SHARE)


def calls_max(settings: Settings) -> int:
    """Return the limit on calls that have not ended."""
    return settings.inflight_requests_max + OTHER_CALLS_MAX


class GrpcServer:
    """The gRPC server of a gateway. Make it and use it in one event loop.

    `reads_max`: calls whose requests may be on their way; beyond, the oldest end.
    `http2` makes a connection for another port, whose TLS, if any, is below it.

    Args:
        deps: the parts of the gateway.
        drain: tells whether the gateway is draining.
        shared: whether other processes listen on the same port.
        tls: what connections over TLS share; None: the server does without TLS.
    """

    def __init__(self, deps: Deps, drain: Drain, *, shared: bool, tls: TlsListener | None = None) -> None:
        self._settings = settings = deps.settings
        self._shared = shared
        self._connection = FastConnection if tls is None else tls_protocol(FastConnection, tls)
        messages = Messages(deps.receive_budget, deps.reply_budget, settings.request_bytes_max)
        self._table = MethodTable(deps, drain, messages)
        infer = FastInfer(
            self._table.infer,
            deps.gate,
            deps.reply_budget,
            settings.request_timeout_s_max,
            self._table.count_infer,
            deps.shared_buffers,
            deps.observer,
        )
        self._parts = Parts(
            self._table.find,
            deps.receive_budget,
            replace(
                ConnectionLimits(),
                streams_max=STREAMS_MAX,
                keepalive_s=KEEPALIVE_S,
                keepalive_timeout_s=KEEPALIVE_TIMEOUT_S,
                frame_s_max=settings.client_stall_s_max,
                stall_s_max=settings.client_stall_s_max,
            ),
            settings.client_connections_max,
            calls_max(settings),
            settings.request_bytes_max,
            settings.client_stall_s_max,
            lambda: max_age_s(settings) * (1 + JITTER * random.random()),
            AGE_GRACE_S,
            infer.may_submit,
            infer.submit,
            infer.memory,
            infer.gave_up,
        )
        self.reads_max = calls_max(settings) // 2
        self.http2: Callable[[], asyncio.Protocol] = lambda: FastConnection(parts=self._parts)
        self._listener: asyncio.Server | None = None
        self._checking: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._parts.connections)

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return self._parts.calls

    async def start(self) -> None:
        """Listen. Raises Failure(CONFLICT) if the port is taken or the address is not an address of this machine."""
        self._checking = asyncio.create_task(self._check())
        if self._settings.serves_grpc and not self._settings.grpc_on_http_port:
            await self._listen(self._settings)

    async def _listen(self, settings: Settings) -> None:
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: self._connection(parts=self._parts),
                settings.host,
                settings.grpc_port,
                reuse_port=self._shared or None,
                backlog=BACKLOG,
            )
        except OSError:
            raise Failure(
                Code.CONFLICT,
                f"cannot listen for gRPC on {settings.host} port {settings.grpc_port}: it is in use, or not of this "
                "machine; choose another with MILLSTREAM_GRPC_PORT, or none with -1",
            ) from None
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _check(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await next_tick(CHECK_S if self._parts.connections else IDLE_S)
            now = loop.time()
            for connection in list(self._parts.connections):
                connection.check(now)
            if self._parts.calls > self.reads_max:
                self._end_oldest(now)

    def _end_oldest(self, now: float) -> None:
        """End those of too many calls that wait longest for their requests, which do not arrive."""
        waiting: list[tuple[float, FastCall]] = []
        for connection in self._parts.connections:
            for call in connection.calls.values():
                since = call.waits_since
                if since is not None:
                    waiting.append((since, call))
        waiting.sort(key=itemgetter(0))
        for since, call in waiting[: max(0, len(waiting) - self.reads_max)]:
            if now >= since + CROWDED_S_MIN:
                busy = f"more than {self.reads_max} calls wait for their requests, this one longest; try again later"
                call.fail(Failure(Code.UNAVAILABLE, busy, retry_after_s=1))

    def stop_accepting(self) -> None:
        """Stop listening if other processes share the port; they get all new connections."""
        if self._shared:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def drain(self, give_up: float) -> None:
        """Wait until all connections are closed and all calls answered, or until the instant `give_up`."""
        loop = asyncio.get_running_loop()
        self._parts.draining = True  # connections that are still accepted drain from their beginning
        self._drain_connections()
        # With a port of its own the server goes on accepting: load balancers have to see that it is not ready.
        await self._until_quiet(min(give_up, loop.time() + max_age_s(self._settings) + QUIET_S))
        self._stop_listening()
        self._drain_connections()
        await self._until(lambda: not self._parts.connections, give_up)

    def _drain_connections(self) -> None:
        for connection in list(self._parts.connections):
            connection.drain()

    async def _until_quiet(self, until: float) -> None:
        """Return when no connection is open, when no call has begun for QUIET_S, or at the instant `until`."""
        loop = asyncio.get_running_loop()
        calls, since = self._table.calls, loop.time()
        while self._parts.connections and loop.time() < until and loop.time() < since + QUIET_S:
            await asyncio.sleep(DRAIN_POLL_S)
            if self._table.calls != calls:
                calls, since = self._table.calls, loop.time()

    @staticmethod
    async def _until(condition: Callable[[], bool], until: float) -> None:
        loop = asyncio.get_running_loop()
        while not condition() and loop.time() < until:
            await asyncio.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        """Stop the server and end all calls; refusals of the last calls are sent before."""
        self._stop_listening()
        loop = asyncio.get_running_loop()
        await self._until(lambda: not self._parts.calls, loop.time() + REFUSING_S)
        if self._checking is not None:
            self._checking.cancel()
        for connection in list(self._parts.connections):
            connection.close()
        await self._table.close()
