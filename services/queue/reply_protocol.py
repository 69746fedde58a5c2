"""What both ends of the reply channel agree on: the address of a gateway, the login between hosts, and the messages.

on one host    connect to the gateway's socket file <─ WELCOME      then messages ─>
between hosts  connect to its reply port <─ HELLO, nonce      login(nonce, proof, pool) ─> <─ proof
               then frames, each a length and a message ─> <─ receipts
On one host messages keep their boundaries, and one that does not fit into the socket's buffer is not sent at all
(SOCK_SEQPACKET, unix(7)); over another connection of this kind a worker gets batches (`wire/batch.py`). Between hosts,
both ends prove that they know a secret that the gateway writes into the pool's keys in Redis; neither sends it. What
follows the login is neither authenticated nor encrypted, as in a Redis without TLS: an attacker on the network path can
read and forge it.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

#: Larger replies take the reply list: the time of a trip through Redis does not matter for them.
MESSAGE_BYTES_MAX = 64 * 1024

SOCKET_TYPE = socket.SOCK_SEQPACKET
SUFFIX = ".replies"
#: The gateway's only message, to each connection that it reads from now on until the worker closes it. Nothing is sent
#: before: a connection that a gateway refuses has no reply in it.
WELCOME = b"+"
#: The same from a gateway that dispatches batches to workers directly. It begins with WELCOME, and an earlier release
#: reads no more of it.
WELCOME_DIRECT = b"+d"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred

#: Replies without a receipt on one connection. Beyond that replies take the reply list. It fits into the buffer of a
#: socket with the kernel's default limits (net.core.wmem_max), so a reply is sent as a whole.
UNCONFIRMED_BYTES_MAX = 128 * 1024
LOGIN_S_MAX = 5.0  # for connecting and logging in
HELLO = b"msr1"
NONCE_BYTES = 32
PROOF_BYTES = 32
POOL_BYTES_MAX = 256
FRAME_HEAD = struct.Struct(">I")  # bytes of the message that follows
RECEIPT = struct.Struct(">Q")  # replies that the gateway has taken from this connection so far
_LOGIN_HEAD = struct.Struct(f">{NONCE_BYTES}s{PROOF_BYTES}sH")


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


class ReplyAddress(NamedTuple):
    """Where a gateway takes replies, and the secret by which it knows workers of one pool."""

    host: str  # an IP address
    port: int
    secret: bytes

    def encode(self) -> bytes:
        """Return the value of the gateway's key in Redis."""
        return f"{self.secret.hex()} {self.port} {self.host}".encode()

    @classmethod
    def decode(cls, value: bytes) -> ReplyAddress:
        """Read what `encode` returns. Raises ValueError."""
        secret, port, host = value.decode().split(" ")
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"{port} is no port")
        ip_address(host)  # no name, which would have to be resolved
        return cls(host, int(port), bytes.fromhex(secret))


def pool_secret(secret: bytes, pool: str) -> bytes:
    """Return the secret of one pool, from which those of other pools cannot be found."""
    return hmac.digest(secret, b"pool " + pool.encode(), "sha256")


def encode_login(secret: bytes, pool: str, gateway_nonce: bytes, nonce: bytes) -> bytes:
    """Return the worker's first message. `secret` is the pool's."""
    name = pool.encode()
    return _LOGIN_HEAD.pack(nonce, _worker_proof(secret, name, gateway_nonce, nonce), len(name)) + name


class Login(NamedTuple):
    """A worker's first message."""

    nonce: bytes
    proof: bytes
    pool: bytes

    @classmethod
    def read(cls, received: bytearray) -> Login | None:
        """Take a login off what was received; None: it is not there as a whole. Raises ValueError."""
        if len(received) < _LOGIN_HEAD.size:
            return None
        nonce, proof, size = _LOGIN_HEAD.unpack_from(received)
        if not 0 < size <= POOL_BYTES_MAX:
            raise ValueError("the pool of a login has no usable name")
        end = _LOGIN_HEAD.size + size
        if len(received) < end:
            return None
        name = bytes(received[_LOGIN_HEAD.size : end])
        del received[:end]
        return cls(nonce, proof, name)

    def is_valid(self, secret: bytes, gateway_nonce: bytes) -> bool:
        """Return whether its sender knows the pool's secret."""
        return hmac.compare_digest(self.proof, _worker_proof(secret, self.pool, gateway_nonce, self.nonce))


def gateway_proof(secret: bytes, gateway_nonce: bytes, nonce: bytes) -> bytes:
    """Return the gateway's answer to a valid login."""
    return hmac.digest(secret, b"gateway" + nonce + gateway_nonce, "sha256")


def _worker_proof(secret: bytes, pool: bytes, gateway_nonce: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"worker" + gateway_nonce + nonce + pool, "sha256")
