"""grpc_export: OTLP/gRPC. Source: opentelemetry-proto, trace_service.proto; the statuses that may be tried again."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import grpc

from millstream.plugins.tracing.export import ExportError
from millstream.plugins.tracing.otel_variables import OtlpTarget

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_AGAIN = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class GrpcExporter:
    """Sends requests on one channel."""

    def __init__(self, target: OtlpTarget) -> None:
        parts = urlsplit(target.url)
        address = parts.netloc.rpartition("@")[2]
        if parts.port is None:
            address += ":4317"
        if target.insecure:
            self._channel: Any = grpc.insecure_channel(address)
        else:
            files = (target.ca_file, target.client_key, target.client_certificate)
            self._channel = grpc.secure_channel(
                address, grpc.ssl_channel_credentials(*(None if file is None else file.read_bytes() for file in files))
            )
        self._export = self._channel.unary_unary(_METHOD)  # bytes in, bytes out
        self._metadata = target.headers
        self._timeout_s = target.timeout_s
        self._compression = grpc.Compression.Gzip if target.gzip else None

    def send(self, body: bytes) -> bytes:
        """Send an encoded request, and return the reply. Raises ExportError."""
        try:
            reply: bytes = self._export(
                body, timeout=self._timeout_s, metadata=self._metadata, compression=self._compression
            )
        except grpc.RpcError as error:
            code = error.code()
            raise ExportError(f"status {code.name}: {error.details()}", again=code in _AGAIN) from error
        return reply

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
