"""A gRPC server with TLS before a server without: it forwards every unary call, and notes the deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from tests.kit.tls import CERTIFICATES


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards to HOST:PORT. `deadlines_s`: name of the method, seconds that its caller gave it, of each call."""

    def __init__(self, server: str) -> None:
        self._channel = grpc.insecure_channel(server)
        self.deadlines_s: list[tuple[str, float]] = []
        self.address = ""

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        forward = self._channel.unary_unary(method)

        def answer(request: bytes, context: Any) -> Any:
            self.deadlines_s.append((method.rpartition("/")[2], context.time_remaining()))
            try:
                return forward(request, timeout=context.time_remaining())
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        return grpc.unary_unary_rpc_method_handler(answer)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def tls_proxy(server: str) -> Iterator[GrpcProxy]:
    """Run a proxy with the certificate of the tests on a free port of 127.0.0.1."""
    proxy = GrpcProxy(server)
    key, certificate = (CERTIFICATES / "server.key").read_bytes(), (CERTIFICATES / "server.pem").read_bytes()
    listening = grpc.server(ThreadPoolExecutor(8), handlers=[proxy])
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    proxy.address = f"127.0.0.1:{listening.add_secure_port('127.0.0.1:0', credentials)}"
    listening.start()
    try:
        yield proxy
    finally:
        listening.stop(None).wait()
        proxy.close()
