"""server: the gRPC server of a gateway, in its event loop, and how it drains.

stop_accepting ─> (not ready) ─> drain: connections reach their maximum age and close ─> calls in flight are answered

A server that stops fails the calls that cross its GOAWAY. A connection that reaches its maximum age sends GOAWAY in two
steps, and no call is lost. So all connections have a maximum age of some seconds, and a draining server waits until
they are closed. Reconnecting also spreads clients over the gateways.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc

from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.tls_handshakes import HANDSHAKE_S_MAX
from millstream.gateway.grpc.codec.messages import Messages
from millstream.gateway.grpc.connections import proc_net
from millstream.gateway.grpc.connections.credentials import server_credentials
from millstream.gateway.grpc.connections.receiver import Receiver
from millstream.gateway.grpc.connections.stalled_replies import StalledReplies
from millstream.gateway.grpc.handlers import MethodTable
from millstream.gateway.http.deps import Deps
from millstream.services.errors import Code, Failure
from millstream.services.settings import Settings
from millstream.services.tls.identity import Identity

DRAIN_POLL_S = 0.05
#: maximum age of a connection: AGE_SHARE of the drain time, but at most AGE_S_MAX
AGE_S_MAX = 10.0
AGE_SHARE = 0.25
JITTER = 1.1  # the library adds up to a tenth to the maximum age
#: after this time without a call, idle connections may be closed without a failure for their clients
QUIET_S = 0.5

STREAMS_MAX = 1024  # concurrent calls of one connection
WINDOW_BYTES = 65535  # bytes that a client may send of a call that is not being read
#: Calls that have begun and wait for the event loop, over all connections. Each takes about 14 KiB, also if its client
#: has reset it. Beyond, the library answers random ones with CANCELLED; by itself from 1,000 on, which a single client
#: that resets its calls exceeds, to the cost of all others.
PENDING_CALLS_MAX = 8 * STREAMS_MAX
OTHER_CALLS_MAX = 256  # streams, health watches and unary calls beside inference requests
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20
REFUSING_S = 1  # time for sending refusals
SECOND_MS = 1000


def max_age_s(settings: Settings) -> float:
    """Return the maximum age of a connection in seconds."""
    return min(AGE_S_MAX, settings.drain_s * AGE_SHARE)


def calls_max(settings: Settings) -> int:
    return settings.inflight_requests_max + OTHER_CALLS_MAX


def _options(settings: Settings, *, shared: bool) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_receive_message_length", settings.request_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.per_message_decompression", 0),  # millstream.gateway.grpc.codec.messages does it
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_MAX),
        ("grpc.max_allowed_incoming_connections", settings.client_connections_max),
        ("grpc.max_connection_age_ms", round(max_age_s(settings) * SECOND_MS)),
        ("grpc.max_connection_age_grace_ms", round(settings.grpc_age_grace_s * SECOND_MS)),
        # With the probe, the window of each stream grows to 4 MiB and more: unread bytes would fill memory here.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # A client that does not answer pings is gone or does not read: its calls must end.
        ("grpc.keepalive_time_ms", KEEPALIVE_S * SECOND_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * SECOND_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S_MAX * SECOND_MS)),
        # Clients may ping at any rate: closing their connections for it would look like a fault of the server.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for a client that disconnects while its reply is written: the library logs a traceback for it."""
    return "ExecuteBatchError" not in record.getMessage()


def port_taken(settings: Settings) -> Failure:
    """Return the failure of a server that cannot listen."""
    return Failure(
        Code.CONFLICT,
        f"cannot listen for gRPC on {settings.host} port {settings.grpc_port}: it is in use, or not of this "
        "machine; choose another with MILLSTREAM_GRPC_PORT, or none with -1",
    )


class GrpcServer:
    """The gRPC server of a gateway. Make it and use it in one event loop.

    Args:
        deps: the parts of the gateway.
        drain: tells whether the gateway is draining.
        shared: whether other processes listen on the same port.
        identity: returns the certificate for a new connection; None: the server does without TLS.
    """

    def __init__(
        self, deps: Deps, drain: Drain, *, shared: bool, identity: Callable[[], Identity] | None = None
    ) -> None:
        self._settings = deps.settings
        self._shared = shared
        self._identity = identity
        settings = deps.settings
        self._receiver = Receiver(deps.receive_budget, settings.client_stall_s_max, calls_max(settings) // 2)
        self._stalled_replies = StalledReplies(settings.client_stall_s_max)
        messages = Messages(
            deps.receive_budget, deps.reply_budget, self._receiver, self._stalled_replies, settings.request_bytes_max
        )
        self._table = MethodTable(deps, drain, messages)
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None
        self.port = 0
        self.http2 = None  # the library makes its connections itself

    async def start(self) -> None:
        """Listen. Raises Failure(CONFLICT) if the port is taken or the address is not an address of this machine."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_logging)
        settings = self._settings
        self._server = grpc.aio.server(
            options=_options(settings, shared=self._shared),
            maximum_concurrent_rpcs=calls_max(settings),
        )
        self._server.add_generic_rpc_handlers((self._table,))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            self.port = self._listen(f"{host}:{settings.grpc_port}")
        except RuntimeError:
            raise port_taken(settings) from None
        self._receiver.listen(self.port)
        self._stalled_replies.listen(self.port)
        await self._server.start()

    def _listen(self, address: str) -> int:
        """Listen on `address` and return the port. Raises RuntimeError."""
        if self._identity is None:
            port: int = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, server_credentials(self._identity))
        return port

    def stop_accepting(self) -> None:
        """Stop listening if other processes share the port; they get all new connections."""
        if self._shared:
            proc_net.stop_listening(self.port)

    async def drain(self, give_up: float) -> None:
        """Wait until all connections are closed and all calls answered, or until the instant `give_up`."""
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        await self._until_no_connections(min(give_up, loop.time() + max_age_s(self._settings) * JITTER + QUIET_S))
        left_s = max(0.0, give_up - loop.time())
        # Calls that are still open then are refused by their lanes; the library would only cut them off.
        self._stopping = asyncio.create_task(self._server.stop(left_s + REFUSING_S))
        await asyncio.wait({self._stopping}, timeout=left_s)

    async def _until_no_connections(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        calls, since = self._table.calls, loop.time()
        while proc_net.connections(self.port) and loop.time() < until and loop.time() < since + QUIET_S:
            await asyncio.sleep(DRAIN_POLL_S)
            if self._table.calls != calls:
                calls, since = self._table.calls, loop.time()

    async def close(self) -> None:
        """Stop the server and end all calls."""
        if self._server is None:
            return
        await self._server.stop(0)
        self._receiver.close()
        self._stalled_replies.close()
        if self._stopping is not None:
            await self._stopping
        await self._table.close()
