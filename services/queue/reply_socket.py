"""What both ends of a reply socket agree on: its name, its address, its user and the largest message.

Each gateway listens on a socket file of its own (`reply_listener`). A worker on its host sends replies there
(`reply_links`), and over another connection to it a worker gets batches (`wire/direct.py`). Messages keep their
boundaries, and one that does not fit into the socket's buffer is not sent at all (SOCK_SEQPACKET, unix(7)).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET_TYPE = socket.SOCK_SEQPACKET
#: Larger replies take the reply list: the time of a trip through Redis does not matter for them.
MESSAGE_BYTES_MAX = 64 * 1024
#: The gateway's only message, to each connection that it reads from now on until the worker closes it. Nothing is sent
#: before: a connection that a gateway refuses has no reply in it.
WELCOME = b"+"
#: The same from a gateway that dispatches batches to workers directly (wire/direct.py). It begins with WELCOME, and an
#: earlier release reads no more of it.
WELCOME_DIRECT = b"+d"
SUFFIX = ".replies"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


def socket_name(installation: str, gateway: str) -> str:
    """Return the name of a gateway's socket file."""
    return f"{installation}.{gateway}{SUFFIX}"


@contextmanager
def socket_address(folder: Path, name: str) -> Iterator[str]:
    """Yield an address of the socket file `name`, which is short however long the path of `folder` is.

    Raises OSError if the folder does not exist.
    """
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def is_of_this_user(link: socket.socket) -> bool:
    """Return whether the process at the other end of a connection ran as our user when it listened or connected."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
