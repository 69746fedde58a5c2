"""The same gRPC methods on the server of grpc.aio: the oracle of the tests that compare our own server with it.

`python -m tests.kit.grpc_library` is a whole gateway with this server. It prints its gRPC port.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc import server
from millstream.gateway.grpc.codec.messages import Messages
from millstream.gateway.grpc.handlers import MethodTable
from millstream.gateway.http.deps import Deps
from millstream.services.environment import child_environment
from tests.kit.stack import ROOT, Stack

INDEX = 7  # of the second gateway of a stack
REFUSING_S = 1.0  # time for sending refusals


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, table: MethodTable) -> None:
        self._table = table

    def service(self, handler_call_details: Any) -> Any:
        return self._table.find(handler_call_details.method)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for a client that disconnects while its reply is written: the library logs a traceback for it."""
    return "ExecuteBatchError" not in record.getMessage()


class LibraryServer:
    """grpc.aio's server with the methods of a gateway, without TLS. The arguments are those of GrpcServer."""

    def __init__(self, deps: Deps, drain: Drain, *, shared: bool = False, tls: None = None) -> None:
        settings = deps.settings
        self._address = f"{settings.host}:{settings.grpc_port}"
        messages = Messages(deps.receive_budget, deps.reply_budget, settings.request_bytes_max)
        self._table = MethodTable(deps, drain, messages)
        self._options = [
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_receive_message_length", settings.request_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.per_message_decompression", 0),  # `Messages` does it
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server: Any = None
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_logging)
        self._server = grpc.aio.server(options=self._options)
        self._server.add_generic_rpc_handlers((_Handlers(self._table),))
        self.port = self._server.add_insecure_port(self._address)
        await self._server.start()

    def stop_accepting(self) -> None:
        """Go on: no other process has the port."""

    async def drain(self, _give_up: float) -> None:
        """Answer the calls in flight."""
        await self._server.stop(REFUSING_S)

    async def close(self) -> None:
        """Stop the server and end all calls."""
        await self._server.stop(0)
        await self._table.close()


@contextmanager
def library_gateway(stack: Stack) -> Iterator[str]:
    """Run a second gateway of a stack, with the library's server; yields HOST:PORT for gRPC clients."""
    settings = {
        "HOME": stack.named_home,
        "REDIS_URL": f"unix://{stack.socket}",
        "ADMIN_KEY": stack.key,
        "HTTP_PORT": 0,
        "GRPC_PORT": 0,
    }
    environment = child_environment({f"MILLSTREAM_{name}": str(value) for name, value in settings.items()})
    command = [sys.executable, "-m", "tests.kit.grpc_library", "--index", str(INDEX)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            assert process.wait(60) == 0


class _Announced(LibraryServer):
    async def start(self) -> None:
        await super().start()
        print(self.port, flush=True)


if __name__ == "__main__":
    from millstream.gateway.__main__ import main

    server.GrpcServer = _Announced  # type: ignore[assignment,misc]
    sys.exit(main())
