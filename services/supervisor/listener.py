"""What gateways inherit of the supervisor: ports, and a pipe that tells of the start; the port of workers alone.

HTTP: a listening socket that every gateway inherits, so that a restart loses no connection. gRPC: a reserved port; each
gateway listens on it by itself (SO_REUSEPORT). Pipe: it ends when the models of the start are loaded.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import platform
import socket
from collections.abc import Awaitable, Callable

from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Code, Failure, invalid
from millstream.services.installation import metrics_dir
from millstream.services.process.waits import next_tick
from millstream.services.settings import Settings
from millstream.services.supervisor.own_log import NAME

log = logging.getLogger("millstream.supervisor")

BACKLOG = 2048
#: longest time for which models of the start keep gateways from being ready; the start continues to load them
PRELOADS_S_MAX = 300.0
LOOK_S = 2.0  # between two looks whether the port accepts connections


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and first address of a host name. Raises Failure(INVALID)."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise invalid(f"--host {host}: not an address of this machine ({error})") from error
    family, _, _, _, address = addresses[0]
    return family, str(address[0])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 picks a free one. Raises Failure, which says what to do."""
    family, address = resolve(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_failure(host, port, "--http-port", error) from error
    listener.setblocking(False)
    return listener


async def keep_listening(listener: socket.socket, restart: Callable[[], Awaitable[None]]) -> None:
    """Replace a listening socket that accepts no connections any more, for as long as this is awaited.

    Any process that has it can end it for all (shutdown(2)); clients are refused then, and gateways do not notice. The
    new one gets the same descriptor, and `restart` replaces the gateways, which inherited the old one. It raises
    Failure if that is not possible now.
    """
    host, port = listener.getsockname()[:2]
    deaf = False  # whether gateways have a socket that ended
    while True:
        await next_tick(LOOK_S)
        try:
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                log.error("port %d refuses connections, since its socket was shut down: listening again", port)
                with listen(host, port) as new:
                    os.dup2(new.fileno(), listener.fileno(), inheritable=False)
                deaf = True
            if deaf:
                await restart()
                deaf = False
        except Failure as failure:
            log.warning("%s", failure.message)


def reserve(host: str, port: int) -> socket.socket:
    """Return a bound socket that reserves `port` (0: a free one) for processes that listen on it with SO_REUSEPORT.

    It accepts no connections. Raises Failure, which says what to do, also if another program shares the port.
    """
    family, address = resolve(host)
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            # First without SO_REUSEPORT, which would succeed beside another installation of the same user.
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((address, port))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((address, port))
    except OSError as error:
        kept.close()
        raise _bind_failure(host, port, "--grpc-port", error) from error
    return kept


def _bind_failure(host: str, port: int, option: str, error: OSError) -> Failure:
    if error.errno == errno.EADDRINUSE:
        return Failure(
            Code.CONFLICT, f"port {port} on {host} is in use: stop what uses it, or choose another with {option}"
        )
    return invalid(f"cannot listen on {host} port {port}: {error.strerror}")


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return `http://HOST:PORT`, or with https, with brackets for IPv6."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def address_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return `HOST:PORT` in the form for gRPC clients; with TLS, `grpcs://HOST:PORT`."""
    address = url_of(host, port).removeprefix("http://")
    return f"grpcs://{address}" if tls else address


def local_url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL for clients on this machine: with the loopback address in place of a wildcard address."""
    family, address = resolve(host)
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return url_of("::1" if family is socket.AF_INET6 else "127.0.0.1", port, tls=tls)
    return url_of(host, port, tls=tls)


class PreloadPipe:
    """A pipe that ends with `end_loading`, or `limit_s` after its creation. Create it inside a running event loop.

    Gateways inherit `read_fd`, which does not block.
    """

    def __init__(self, limit_s: float) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._limit_s = limit_s
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up)

    def end_loading(self) -> None:
        """Let gateways be ready."""
        self._timer.cancel()
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def close(self) -> None:
        """Close both ends, when no further gateway is to be started."""
        self.end_loading()
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def _give_up(self) -> None:
        log.warning("models are still being loaded after %g s: gateways become ready without them", self._limit_s)
        self.end_loading()


class MetricsPort:
    """The port of the metrics of a host's workers without gateways. Raises Failure(CONFLICT) if it is taken.

    Args:
        ready: returns whether the workers are ready.
    """

    def __init__(self, settings: Settings, ready: Callable[[], bool]) -> None:
        from millstream.services.metrics.page import serve  # few need it
        from millstream.services.metrics.registry import MetricsRegistry

        port = settings.metrics_port
        self._registry = MetricsRegistry(metrics_dir(settings), NAME, models_max=settings.metrics_models_max)
        hosts = AllowedHosts(settings.allowed_host_list, (platform.node(),))
        try:
            self._server, self._thread = serve(port, self._registry, hosts, ready=ready)
        except OSError as error:
            raise Failure(
                Code.CONFLICT,
                f"port {port} for metrics: {error.strerror}: choose another with MILLSTREAM_METRICS_PORT",
            ) from error

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._registry.close()
