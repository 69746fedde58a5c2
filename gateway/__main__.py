"""python -m millstream.gateway: runs one gateway process."""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from millstream.services.extras import exit_unfit, exit_without
from millstream.services.process.gc_tuning import collect_rarely, exit_without_gc

if __name__ == "__main__":
    collect_rarely()
    exit_without_gc()
    exit_without("gateway", "cpu")
    exit_unfit("millstream.gateway.connection.uvicorn_hooks", "millstream.services.queue.redis_parts")

from millstream.gateway.connection.server import Server, connections_within_limit
from millstream.gateway.connection.tls_connection import HANDSHAKES_MAX
from millstream.gateway.gateway import Gateway
from millstream.gateway.listeners import grpc_server, http_config, http_protocol
from millstream.gateway.scheduling.readiness import Preloads
from millstream.services.errors import Failure
from millstream.services.process.inheritance import keep_from_children
from millstream.services.process.logs import configure_logs, exit_message
from millstream.services.process.private_files import create_files_private
from millstream.services.process.sign_of_life import SignOfLife
from millstream.services.settings import check_platform_port, read_settings
from millstream.services.start_log import log_start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m millstream.gateway", description="Run one gateway process.")
    parser.add_argument("--fd", type=int, help="a listening socket to serve, inherited from a supervisor")
    parser.add_argument("--index", type=int, default=0, help="number of the gateway on this machine")
    parser.add_argument("--ready-fd", type=int, help="a pipe to a supervisor, written to when the gateway is ready")
    parser.add_argument("--life-fd", type=int, help="a pipe to a supervisor, written to every two seconds")
    parser.add_argument("--preload-fd", type=int, help="a pipe of a supervisor that ends when the models are loaded")
    return parser.parse_args()


def main() -> int:
    """Return the exit status: 0 after a drain that SIGTERM or SIGINT began; 1 if the gateway could not start."""
    arguments = _arguments()
    name = f"gateway-{arguments.index}"
    configure_logs("text", name)
    create_files_private()
    keep_from_children()
    try:
        settings = read_settings()
        configure_logs(settings.log_format, name)
        check_platform_port()
        connections_max = connections_within_limit(
            settings.client_connections_max,
            grpc=settings.serves_grpc,
            handshakes=0 if settings.tls_cert_file is None else HANDSHAKES_MAX,
        )
        settings = settings.model_copy(update={"client_connections_max": connections_max})
        gateway = Gateway(settings, arguments.index, Preloads(arguments.preload_fd))
        shared = arguments.fd is not None
        deps = gateway.deps()
        grpc = grpc_server(settings, gateway, deps, shared=shared)
        protocol = http_protocol(settings, gateway, grpc)
    except (Failure, OSError) as error:
        exit_message(error.message if isinstance(error, Failure) else str(error))
        return 1
    log_start(settings, name, supervised=shared)
    server = Server(
        http_config(settings, deps, protocol),
        gateway,
        settings.drain_s,
        shared_port=shared,
        ready_fd=arguments.ready_fd,
        side_server=grpc,
        handshakes=gateway.handshakes,
    )
    server.delay_s = settings.drain_delay_s
    # The supervisor stops all processes that accept on this port, and waits before it does.
    signal.signal(signal.SIGUSR1, lambda *_: server.leave_ready())
    server.life = SignOfLife(arguments.life_fd)
    # Not as `fd`: uvicorn would take it for a unix socket, and replies would wait 40 ms for Nagle's algorithm.
    server.run([socket.socket(fileno=arguments.fd)] if shared else None)
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
