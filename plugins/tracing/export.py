"""export: sends encoded spans to a collector: OTLP over HTTP, or over gRPC.

Source: OpenTelemetry Protocol Specification, sections OTLP/HTTP and OTLP/gRPC: which answers may be tried again.
"""

from __future__ import annotations

import gzip
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from urllib.parse import urlsplit

from millstream.plugins.tracing.otel_variables import GRPC, OtlpTarget
from millstream.services.version import VERSION

_AGAIN = frozenset({429, 502, 503, 504})
_REPLY_BYTES_MAX = 64 << 10
_USER_AGENT = f"millstream/{VERSION}"


class ExportError(Exception):
    """An export failed. `again`: another attempt may succeed; `after_s`: not before so many seconds."""

    def __init__(self, message: str, *, again: bool, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        self.after_s = after_s


class Exporter(Protocol):
    """Sends one request at a time. It blocks: call it in a thread."""

    def send(self, body: bytes) -> bytes:
        """Send an encoded ExportTraceServiceRequest, and return the reply. Raises ExportError."""

    def close(self) -> None:
        """Close the connection."""


def exporter(target: OtlpTarget) -> Exporter:
    """Return the exporter for a target. Raises OSError if its certificates cannot be read."""
    if target.protocol == GRPC:
        from millstream.plugins.tracing.grpc_export import GrpcExporter

        return GrpcExporter(target)
    return HttpExporter(target)


class HttpExporter:
    """OTLP/HTTP with protobuf, on one connection that is kept alive."""

    def __init__(self, target: OtlpTarget) -> None:
        parts = urlsplit(target.url)
        self._host, self._port, self._timeout_s = str(parts.hostname), parts.port, target.timeout_s
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._gzip = target.gzip
        self._headers = {"User-Agent": _USER_AGENT, **dict(target.headers), "Content-Type": "application/x-protobuf"}
        if target.gzip:
            self._headers["Content-Encoding"] = "gzip"
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=target.ca_file)
            if target.client_certificate is not None:
                self._tls.load_cert_chain(target.client_certificate, target.client_key)
        self._connection: http.client.HTTPConnection | None = None

    def send(self, body: bytes) -> bytes:
        """Send an encoded request, and return the reply. Raises ExportError."""
        if self._gzip:
            body = gzip.compress(body, 1)
        reused = self._connection is not None
        try:
            return self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not reused:
                raise ExportError(f"{type(error).__name__}: {error}", again=True) from error
        return self._again(body)  # the collector closed the idle connection

    def _again(self, body: bytes) -> bytes:
        try:
            return self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ExportError(f"{type(error).__name__}: {error}", again=True) from error

    def _post(self, body: bytes) -> bytes:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connect()
        if connection.sock is None:
            connection.connect()
        with _within(self._timeout_s, connection.sock):
            connection.request("POST", self._path, body, self._headers)
            reply = connection.getresponse()
            content = reply.read(_REPLY_BYTES_MAX)
            if reply.read(1):
                self.close()
        if reply.status // 100 == 2:
            return content
        # A redirect is not followed: the body, and headers with keys, would go elsewhere.
        after_s = 0.0
        with suppress(ValueError):
            after_s = float(reply.getheader("Retry-After") or 0)
        raise ExportError(f"status {reply.status}", again=reply.status in _AGAIN, after_s=after_s)

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
def _within(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Shut a connection down when the block takes longer: a collector that sends a byte now and then never times out.

    Raises TimeoutError.
    """
    late = threading.Event()

    def stop() -> None:
        late.set()
        with suppress(OSError):  # of the class of all sockets: that of TLS would unwrap it under its reader
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():
            raise TimeoutError(f"no whole answer within {seconds:g} s")
