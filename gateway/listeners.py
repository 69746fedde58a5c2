"""Builds the servers of one gateway process: HTTP and gRPC, each with or without TLS, on one port or two."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn

from millstream.gateway.app import build_app, served_adapters
from millstream.gateway.connection.cors import Cors
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.gateway.connection.foreign_protocol import PLAIN_GRPC, PLAIN_HTTP, ForeignLog, ForeignProtocol
from millstream.gateway.connection.request_head import PathCache
from millstream.gateway.connection.tls_connection import TlsListener, tls_protocol
from millstream.gateway.gateway import Gateway
from millstream.gateway.http.deps import Deps
from millstream.gateway.http2.frames import PREFACE
from millstream.gateway.observing.observed_http import with_observer
from millstream.services.settings import Settings

if TYPE_CHECKING:
    from millstream.gateway.grpc.server import GrpcServer


def grpc_server(settings: Settings, gateway: Gateway, deps: Deps, *, shared: bool) -> GrpcServer | None:
    """Return the gRPC server; None: gRPC is turned off. `shared`: other processes accept on its port."""
    if not settings.serves_grpc:
        return None
    # Imported only where gRPC is on: the import costs time and memory.
    from millstream.gateway.grpc.server import GrpcServer

    certificates = gateway.certificates
    tls = None
    if certificates is not None:
        tls = _tls(gateway, lambda: certificates.identity.h2_context, "gRPC", PLAIN_GRPC)
    return GrpcServer(deps, gateway.drain, shared=shared, tls=tls)


def http_config(settings: Settings, deps: Deps, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    """Return the configuration of the HTTP server. `protocol`: the class of its connections."""
    return uvicorn.Config(
        build_app(deps),
        host=settings.host,
        port=settings.http_port,
        http=protocol,
        loop="uvloop",
        log_config=None,  # its records are ours
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        backlog=4096,
        timeout_keep_alive=round(settings.http_keep_alive_s),
        lifespan="on",
    )


def http_protocol(settings: Settings, gateway: Gateway, grpc: GrpcServer | None) -> type[asyncio.Protocol]:
    """Return the protocol class of HTTP connections: over TLS if there is a certificate. Raises Failure(INVALID)."""
    plain, certificates = _plain_protocol(settings, gateway), gateway.certificates
    if grpc is not None and settings.grpc_on_http_port:
        plain = shared_port_protocol(plain, grpc.http2)
    if certificates is None:
        return plain
    if settings.grpc_on_http_port:
        return tls_protocol(plain, _tls(gateway, lambda: certificates.identity.shared_context))
    return tls_protocol(plain, _tls(gateway, lambda: certificates.identity.context))


def _tls(
    gateway: Gateway, context: Callable[[], ssl.SSLContext], port: str = "HTTP", plain: ForeignProtocol = PLAIN_HTTP
) -> TlsListener:
    return TlsListener(context, gateway.handshakes, ForeignLog(time.monotonic, port), plain=plain)


def _plain_protocol(settings: Settings, gateway: Gateway) -> type[asyncio.Protocol]:
    context = ConnectionContext(
        gateway.drain,
        gateway.http_counts,
        gateway.access.gate,
        gateway.access.browser_guard,
        Cors(settings.cors_origin_list) if settings.cors_origin_list else None,
        gateway.budgets.shared_buffers,
        PathCache(path for one in served_adapters(settings) for _, path in one.access if "{" not in path),
    )
    protocol = fast_path_protocol(
        gateway.infer,
        settings.request_bytes_max,
        settings.client_connections_max,
        gateway.budgets.receiving,
        gateway.budgets.replies,
        settings.client_stall_s_max,
        context,
    )
    return with_observer(protocol, gateway.recorder.observer)


class _HandedOver(ConnectionError):
    """Why a connection is no longer one of HTTP/1.1. It tells uvicorn not to close the transport."""


class SharedPort(asyncio.Protocol):
    """Mixed into the protocol class of HTTP/1.1: hands connections over that begin with the preface of HTTP/2.

    Over TLS the same bytes decide. ALPN has told the client before which protocol it may speak.
    Source: RFC 9113, section 3.4: no request of HTTP/1.1 begins like the preface.
    """

    http2: ClassVar[Callable[[], asyncio.Protocol]]
    transport: asyncio.Transport

    _unknown: bytes | None = b""  # bytes until the protocol is known; None: it is HTTP/1.1

    def data_received(self, data: bytes) -> None:
        if self._unknown is not None:
            data = self._unknown + data
            if len(data) < len(PREFACE) and PREFACE.startswith(data):
                self._unknown = data  # the timer of the connection bounds how long
                return
            if data.startswith(PREFACE):
                self._hand_over(data)
                return
            self._unknown = None
        super().data_received(data)

    def _hand_over(self, data: bytes) -> None:
        transport, connection = self.transport, type(self).http2()
        super().connection_lost(_HandedOver())
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if not transport.is_closing():
            connection.data_received(data)


def shared_port_protocol(http: type[Any], http2: Callable[[], asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return the protocol class of a port for both protocols.

    Args:
        http: the class of connections of HTTP/1.1.
        http2: makes a connection of HTTP/2.
    """
    return type("SharedPort", (SharedPort, http), {"http2": staticmethod(http2)})
