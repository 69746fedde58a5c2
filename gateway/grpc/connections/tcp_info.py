"""tcp_info: reads the kernel's counters of this process's TCP connections, which the gRPC library does not expose.

Source: tcp(7), struct tcp_info of linux/tcp.h.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

_BYTES_AT, _BYTES = 120, struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_INFO_BYTES = _BYTES_AT + _BYTES.size
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, for no seconds
#: after a scan of all descriptors, none is made for this many times its duration
_PAUSE_SHARE = 20

Address = tuple[str, int]


class Traffic(NamedTuple):
    """Bytes of a connection that the peer acknowledged, and bytes received from it."""

    acknowledged: int
    received: int


def address_of(peer: str) -> Address:
    """Return the address in gRPC's name of a peer: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


class TcpConnections:
    """Finds connections by their peer.

    Args:
        port: the local port of the connections.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._descriptors: dict[Address, int] = {}
        self._scan_again = 0.0

    def bytes_of(self, peer: Address) -> Traffic | None:
        """Return the traffic of the connection with `peer` since it was opened; None: no such connection."""
        for _ in range(2):
            descriptor = self._descriptors.get(peer)
            if descriptor is not None:
                info = self._info(descriptor, peer)
                if info is not None:
                    return info
                del self._descriptors[peer]
            if not self._scan():
                break
        return None

    def reset(self, peer: Address) -> bool:
        """Reset the connection with `peer`: all its calls fail. Returns False if there is no such connection."""
        self._scan_again = 0.0
        if self.bytes_of(peer) is None:
            return False
        with suppress(OSError), socket.socket(fileno=os.dup(self._descriptors.pop(peer))) as connection:
            if _peer_of(connection) == peer:  # its descriptor may have been reused
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _info(self, descriptor: int, peer: Address) -> Traffic | None:
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return None
        try:
            if _peer_of(connection) != peer:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            return Traffic(*_BYTES.unpack_from(info, _BYTES_AT))
        except (OSError, struct.error):
            return None
        finally:
            connection.detach()  # the gRPC library owns the descriptor

    def _scan(self) -> bool:
        """Find the connections again. Returns False, without a scan, if the last scan was recent."""
        began = time.monotonic()
        if began < self._scan_again:
            return False
        self._descriptors = {}
        for entry in Path("/proc/self/fd").iterdir():
            try:
                connection = socket.socket(fileno=int(entry.name))
            except OSError:  # not a socket, or closed in the meantime
                continue
            try:
                if connection.family in {socket.AF_INET, socket.AF_INET6} and connection.getsockname()[1] == self._port:
                    self._descriptors[_peer_of(connection)] = int(entry.name)
            except OSError:  # not connected
                pass
            finally:
                connection.detach()
        now = time.monotonic()
        self._scan_again = now + _PAUSE_SHARE * (now - began)
        return True


def _peer_of(connection: socket.socket) -> Address:
    host, port = connection.getpeername()[:2]
    return _plain(host), port


def _plain(host: str) -> str:
    """Return an address without the prefix of IPv4 addresses on IPv6 sockets."""
    return host.removeprefix("::ffff:")
