"""The listening socket: bound once by the supervisor, inherited by every gateway, so that a restart loses no caller."""

from __future__ import annotations

import errno
import ipaddress
import socket

from services.errors import Code, Failure, invalid

BACKLOG = 2048


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The first address of a host name. Raises Failure(INVALID)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise invalid(f"--host {host}: not an address of this machine ({error})") from error
    family, _, _, _, address = found[0]
    return family, str(address[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Raises Failure(INVALID) for a name that does not resolve."""
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
        if error.errno == errno.EADDRINUSE:
            raise Failure(
                Code.CONFLICT, f"port {port} on {host} is in use: stop what uses it, or choose another with --http-port"
            ) from error
        raise invalid(f"cannot listen on {host} port {port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def url_of(host: str, port: int) -> str:
    """`http://HOST:PORT` as it is shown."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_url_of(host: str, port: int) -> str:
    """The same, for use on this machine: a wildcard address is one to listen on, not one to connect to."""
    family, address = resolve(host)
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return url_of("::1" if family is socket.AF_INET6 else "127.0.0.1", port)
    return url_of(host, port)
