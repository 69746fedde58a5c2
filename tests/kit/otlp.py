"""A collector of traces: an HTTP server, or a gRPC server, that parses what arrives as OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.kit.wait import wait_until


@dataclass
class Seen:
    """A span as a collector stores it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: list[tuple[str, str]]


@dataclass
class Collector:
    """What arrived. `statuses`: answers of the next requests, instead of 200. `location`: where a redirect goes."""

    url: str = ""
    spans: list[Seen] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    location: str = ""
    connections: list[socket.socket] = field(default_factory=list)

    def take(self, body: bytes) -> bytes:
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [_seen(span, resource) for span in scope.spans]
        reply: bytes = ExportTraceServiceResponse().SerializeToString()
        return reply

    def close_connections(self) -> None:
        """Close the connections of all clients."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def of(self, trace_id: str) -> dict[str, Seen]:
        """Wait for the trace of a request, and return its spans by name."""

        def whole() -> dict[str, Seen] | None:
            found = {span.name: span for span in list(self.spans) if span.trace_id == trace_id}
            return found if any(span.kind == 2 for span in found.values()) else None

        return wait_until(whole, what=f"trace {trace_id}")

    def of_batch(self, trace_id: str) -> dict[str, Seen]:
        """Return the spans of a batch by name. They arrive with the request that links to it, or before."""
        return {span.name: span for span in list(self.spans) if span.trace_id == trace_id}


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.kind,
        span.status.code == 2,
        _attributes(span.attributes),
        resource,
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # a client that does not trust it, or is gone


@contextmanager
def http_collector(port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Collector]:
    """Run a collector for OTLP/HTTP on loopback. `tls`: for https."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            collector.connections.append(self.connection)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            status = collector.statuses.pop(0) if collector.statuses else 200
            known = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            reply = collector.take(body) if status == 200 and known else b""
            self.send_response(status if known else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            if collector.location:
                self.send_header("Location", collector.location)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the signature is given
            return

    server = _Server(("127.0.0.1", port), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    collector.url = f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        collector.close_connections()
        thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Run a collector for OTLP/gRPC on loopback."""
    collector = Collector()

    def export(body: bytes, context: Any) -> bytes:
        collector.headers.append(dict(context.invocation_metadata()))
        return collector.take(body)

    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(None).wait()
