"""proc_net: finds this process's sockets on a port in the kernel's tables: the gRPC library does not expose them.

Source: proc(5), /proc/net/tcp.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_LISTEN, _ESTABLISHED = "0A", "01"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def stop_listening(port: int) -> None:
    """Stop listening on `port`. Other processes that listen get new connections; open connections stay open."""
    for descriptor in _descriptors(port, _LISTEN):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.shutdown(socket.SHUT_RDWR)


def connections(port: int) -> int:
    """Return the number of this process's open connections on `port`."""
    return len(_descriptors(port, _ESTABLISHED))


def _descriptors(port: int, state: str) -> list[int]:
    inodes = {inode for table in _TABLES for inode in _inodes(Path(table), port, state)}
    descriptors = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            kind, _, inode = str(entry.readlink()).rstrip("]").partition(":[")
            if kind == "socket" and inode in inodes:
                descriptors.append(int(entry.name))
    return descriptors


def _inodes(table: Path, port: int, state: str) -> list[str]:
    with suppress(OSError):  # this machine has no IPv6
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        return [row[9] for row in rows if row[3] == state and int(row[1].rpartition(":")[2], 16) == port]
    return []
