"""What both ends of a reply connection between two hosts agree on: its address, its login and its messages.

A gateway listens on its reply port (`remote_listener`). A worker on another host sends replies there (`remote_links`),
and keeps each of them until the gateway's receipt: what is in a socket's buffer is lost with its host.

connect <─ HELLO, nonce      login(nonce, proof, pool) ─> <─ proof      then replies ─> <─ receipts
Both prove that they know a secret that the gateway writes into the pool's keys in Redis; neither sends it. The
login is authenticated. The messages after it are neither authenticated nor encrypted, as those of a Redis without TLS:
an attacker on the network path can read and forge them.
"""

from __future__ import annotations

import hmac
import struct
from ipaddress import ip_address
from typing import NamedTuple

#: Larger replies take the reply list: sending one must not wait until the gateway reads.
MESSAGE_BYTES_MAX = 64 * 1024
#: Replies without a receipt on one connection. Beyond that replies take the reply list. It fits into the buffer of a
#: socket with the kernel's default limits (net.core.wmem_max), so a reply is sent as a whole.
UNCONFIRMED_BYTES_MAX = 128 * 1024
#: Time for connecting and logging in.
LOGIN_S_MAX = 5.0

HELLO = b"msr1"
NONCE_BYTES = 32
PROOF_BYTES = 32
POOL_BYTES_MAX = 256
#: bytes of the reply that follows
FRAME_HEAD = struct.Struct(">I")
#: replies that the gateway has taken from this connection so far
RECEIPT = struct.Struct(">Q")
_LOGIN_HEAD = struct.Struct(f">{NONCE_BYTES}s{PROOF_BYTES}sH")
LOGIN_HEAD_BYTES = _LOGIN_HEAD.size


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
    pool_bytes: int  # of the pool's name, which follows


def decode_login(head: bytes) -> Login:
    """Read the first LOGIN_HEAD_BYTES of a login. Raises ValueError."""
    login = Login(*_LOGIN_HEAD.unpack(head))
    if not 0 < login.pool_bytes <= POOL_BYTES_MAX:
        raise ValueError("the pool of a login has no usable name")
    return login


def is_valid(login: Login, secret: bytes, pool: bytes, gateway_nonce: bytes) -> bool:
    """Return whether the sender of a login knows the pool's secret."""
    return hmac.compare_digest(login.proof, _worker_proof(secret, pool, gateway_nonce, login.nonce))


def gateway_proof(secret: bytes, gateway_nonce: bytes, nonce: bytes) -> bytes:
    """Return the gateway's answer to a valid login."""
    return hmac.digest(secret, b"gateway" + nonce + gateway_nonce, "sha256")


def _worker_proof(secret: bytes, pool: bytes, gateway_nonce: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"worker" + gateway_nonce + nonce + pool, "sha256")
