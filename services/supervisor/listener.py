"""The ports: held by the supervisor for as long as the installation runs.

HTTP: a listening socket that every gateway inherits, so that a restart loses no caller. gRPC: a reservation; each gateway
listens by itself beside it (SO_REUSEPORT), since the library takes no socket.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

from millstream.services.errors import Code, Failure, invalid

BACKLOG = 2048


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The first address of a host name. Raises Failure(INVALID)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise invalid(f"--host {host}: not an address of this machine ({error})") from error
    family, _, _, _, address = found[0]
    return family, str(address[0])


def binds_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket that is bound to `host`. Raises Failure(INVALID) for a name that does not resolve."""
    return ipaddress.ip_address(resolve(host)[1].partition("%")[0]).is_loopback


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises Failure with what to do, in one line."""
    family, address = resolve(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(host, port, "--http-port", error) from error
    listener.setblocking(False)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """A socket that keeps `port` (0: a free one) for processes that listen there with SO_REUSEPORT; it takes no connections.

    Raises Failure with what to do, in one line, also where somebody else shares the port.
    """
    family, address = resolve(host)
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            # Alone: with SO_REUSEPORT one would not notice another installation of the same user.
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((address, port))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((address, port))
    except OSError as error:
        kept.close()
        raise _refused(host, port, "--grpc-port", error) from error
    return kept


def _refused(host: str, port: int, option: str, error: OSError) -> Failure:
    if error.errno == errno.EADDRINUSE:
        return Failure(
            Code.CONFLICT, f"port {port} on {host} is in use: stop what uses it, or choose another with {option}"
        )
    return invalid(f"cannot listen on {host} port {port}: {error.strerror}")


def url_of(host: str, port: int) -> str:
    """`http://HOST:PORT` as it is shown."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def address_of(host: str, port: int) -> str:
    """`HOST:PORT` as gRPC clients are given it."""
    return url_of(host, port).removeprefix("http://")


def local_url_of(host: str, port: int) -> str:
    """The same, for use on this machine: a wildcard address is one to listen on, not one to connect to."""
    family, address = resolve(host)
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return url_of("::1" if family is socket.AF_INET6 else "127.0.0.1", port)
    return url_of(host, port)
