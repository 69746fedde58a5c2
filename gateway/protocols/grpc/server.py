"""server: the gRPC server of a gateway, in its event loop, and how it leaves.

stop_accepting ─> (not ready) ─> leave: connections come of age and go elsewhere ─> nothing new, what is in flight is answered

A server that is told to stop fails the calls that cross its goodbye. A connection that comes of age says goodbye in
two steps, and no call is lost; so all connections come of age after some seconds, and a server that leaves only waits until
they have gone. That also spreads callers over the gateways anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from millstream.gateway.connection.drain import Drain
from millstream.gateway.protocols.grpc import proc_net
from millstream.gateway.protocols.grpc.handlers import MethodTable
from millstream.gateway.protocols.grpc.messages import Messages
from millstream.gateway.protocols.grpc.receiver import Receiver
from millstream.gateway.protocols.grpc.stalled_replies import StalledReplies
from millstream.gateway.protocols.http.deps import Deps
from millstream.services.errors import Code, Failure
from millstream.services.settings import Settings

LOOK_S = 0.05
LOOK_FIRST_S = 0.5
#: when a connection comes of age: the most, and of the time that stopping may take
AGE_S_MAX = 10.0
AGE_SHARE = 0.25
JITTER = 1.1  # of the library's, on ages
#: no call for so long: who is connected has nothing to ask, and would not notice
QUIET_S = 0.5

STREAMS_MAX = 1024  # of one connection
WINDOW_BYTES = 65535  # of a stream whose message is not being read: beyond it the client waits
CALLS_BESIDE = 256  # streams, watches and questions beside requests
KEEPALIVE_S = 60
KEEPALIVE_ANSWER_S = 20
REFUSING_S = 1  # for refusals to go out
SECOND_MS = 1000


def age_s(settings: Settings) -> float:
    """How old a connection gets."""
    return min(AGE_S_MAX, settings.drain_s * AGE_SHARE)


def _calls_max(settings: Settings) -> int:
    return settings.inflight_requests_max + CALLS_BESIDE


def _options(settings: Settings, *, shared: bool) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_receive_message_length", settings.request_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.per_message_decompression", 0),  # millstream.gateway.protocols.grpc.messages does it
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.max_allowed_incoming_connections", settings.client_connections_max),
        ("grpc.max_connection_age_ms", round(age_s(settings) * SECOND_MS)),
        ("grpc.max_connection_age_grace_ms", round(settings.grpc_age_grace_s * SECOND_MS)),
        # With the probe, windows grow to 4 MiB and more for each stream: what nobody reads yet would lie here.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # Who does not answer is gone, or does not read: its calls must not be held for ever.
        ("grpc.keepalive_time_ms", KEEPALIVE_S * SECOND_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_S * SECOND_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping as often as they are set to: being thrown out for that looks like a fault of the server.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _worth_saying(record: logging.LogRecord) -> bool:
    """A caller that goes while its reply is written is no fault: the library logs that with a traceback."""
    return "ExecuteBatchError" not in record.getMessage()


def _run_anywhere() -> None:
    """Let this process run wherever its supervisor may.

    A gateway may be kept on one core, where its event loop has it for itself. The gRPC library reads and writes in threads
    of its own: on one core they and the loop wait for each other's turn at every call.
    """
    cores = os.sched_getaffinity(os.getppid())
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


class GrpcServer:
    """`shared`: others listen on the same port. Make it and use it in one event loop."""

    def __init__(self, deps: Deps, drain: Drain, *, shared: bool) -> None:
        self._settings = deps.settings
        self._shared = shared
        settings = deps.settings
        self._receiver = Receiver(deps.receive_budget, settings.client_stall_s_max, _calls_max(settings) // 2)
        self._watch = StalledReplies(settings.client_stall_s_max)
        messages = Messages(
            deps.receive_budget, deps.reply_budget, self._receiver, self._watch, settings.request_bytes_max
        )
        self._table = MethodTable(deps, drain, messages)
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None
        self._spreading: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises Failure(CONFLICT) in one line where that cannot be."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_worth_saying)
        settings = self._settings
        self._server = grpc.aio.server(
            options=_options(settings, shared=self._shared),
            maximum_concurrent_rpcs=_calls_max(settings),
        )
        self._server.add_generic_rpc_handlers((self._table,))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{settings.grpc_port}")
        except RuntimeError:
            raise Failure(
                Code.CONFLICT,
                f"cannot listen for gRPC on {settings.host} port {settings.grpc_port}: it is in use, or not of this "
                "machine; choose another with MILLSTREAM_GRPC_PORT, or none with -1",
            ) from None
        self._receiver.listen(self.port)
        self._watch.listen(self.port)
        await self._server.start()
        if self._shared:
            self._spreading = asyncio.create_task(self._spread())

    async def _spread(self) -> None:
        """The library starts its threads when the first call comes; who is asked by HTTP alone stays where it is."""
        while not self._table.calls:
            await asyncio.sleep(LOOK_FIRST_S)
        _run_anywhere()

    def stop_accepting(self) -> None:
        """Others on the port get all new connections from now on. Without others there is nobody to take them."""
        if self._shared:
            proc_net.stop_listening(self.port)

    async def drain(self, give_up: float) -> None:
        """Return when everybody has gone elsewhere and all calls are answered; at the instant `give_up` at the latest."""
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        await self._until_deserted(min(give_up, loop.time() + age_s(self._settings) * JITTER + QUIET_S))
        left_s = max(0.0, give_up - loop.time())
        # What is not answered by then is refused by those who hold it; the library would only cut it off.
        self._stopping = asyncio.create_task(self._server.stop(left_s + REFUSING_S))
        await asyncio.wait({self._stopping}, timeout=left_s)

    async def _until_deserted(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        calls, since = self._table.calls, loop.time()
        while proc_net.connections(self.port) and loop.time() < until and loop.time() < since + QUIET_S:
            await asyncio.sleep(LOOK_S)
            if self._table.calls != calls:
                calls, since = self._table.calls, loop.time()

    async def close(self) -> None:
        """End what is still there."""
        if self._server is None:
            return
        if self._spreading is not None:
            self._spreading.cancel()
        await self._server.stop(0)
        self._receiver.close()
        self._watch.close()
        if self._stopping is not None:
            await self._stopping
