"""A TLS 1.2 client that asks for a new handshake again and again, also while it reads nothing (RFC 5246 7.4.1.1).

Python's `ssl` has no function for that, and OpenSSL's client ends with the first refusal. So `ssl` shakes hands, and
then this client writes and reads the records itself, with the keys that it derives as `ssl` does.

Tests that use this are marked `@pytest.mark.needs("openssl")`: the program brings the library.
Sources: RFC 5246 5 (PRF), 6.3 (keys), 7.2 (alerts); RFC 5288 3 (AES-GCM).
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import hmac
import socket
import ssl
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.kit.tls import CERTIFICATES
from tests.kit.wire import PATIENCE_S

ALERT, HANDSHAKE, DATA = 21, 22, 23  # types of records
NO_RENEGOTIATION = b"\x01\x64"  # an alert: a warning, no_renegotiation
_VERSION = b"\x03\x03"
_HEADER_BYTES, _NONCE_BYTES, _TAG_BYTES = 5, 8, 16
_GET_TAG = 0x10  # EVP_CTRL_AEAD_GET_TAG
#: a ClientHello without extensions: version, random, no session, one cipher suite, no compression
_HELLO_BODY = _VERSION + bytes(32) + b"\x00" + b"\x00\x02\xc0\x2f" + b"\x01\x00"
HELLO = b"\x01" + len(_HELLO_BODY).to_bytes(3) + _HELLO_BODY


class Record(NamedTuple):
    """A decrypted record."""

    kind: int
    content: bytes


@cache
def _libcrypto() -> ctypes.CDLL:
    library = ctypes.CDLL("libcrypto.so.3")
    pointer, number, data = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    for name, result, arguments in (
        ("EVP_CIPHER_CTX_new", pointer, ()),
        ("EVP_CIPHER_CTX_free", None, (pointer,)),
        ("EVP_aes_128_gcm", pointer, ()),
        ("EVP_CipherInit_ex", number, (pointer, pointer, pointer, data, data, number)),
        ("EVP_CipherUpdate", number, (pointer, data, ctypes.POINTER(number), data, number)),
        ("EVP_CipherFinal_ex", number, (pointer, data, ctypes.POINTER(number))),
        ("EVP_CIPHER_CTX_ctrl", number, (pointer, number, number, data)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _aes_gcm(key: bytes, nonce: bytes, extra: bytes, data: bytes, *, encrypt: bool) -> tuple[bytes, bytes]:
    """Return the other form of `data`, and for one that was encrypted its tag. Tags that come are not checked."""
    library, size = _libcrypto(), ctypes.c_int()
    context = library.EVP_CIPHER_CTX_new()
    out, tag = ctypes.create_string_buffer(len(data) + _TAG_BYTES), ctypes.create_string_buffer(_TAG_BYTES)
    try:
        assert library.EVP_CipherInit_ex(context, library.EVP_aes_128_gcm(), None, key, nonce, int(encrypt)) == 1
        assert library.EVP_CipherUpdate(context, None, size, extra, len(extra)) == 1
        assert library.EVP_CipherUpdate(context, out, size, data, len(data)) == 1
        if encrypt:
            assert library.EVP_CipherFinal_ex(context, tag, size) == 1
            assert library.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, _TAG_BYTES, tag) == 1
    finally:
        library.EVP_CIPHER_CTX_free(context)
    return out.raw[: len(data)], tag.raw


def _prf(secret: bytes, label: bytes, seed: bytes, size: int) -> bytes:
    made, last = b"", label + seed
    while len(made) < size:
        last = hmac.digest(secret, last, hashlib.sha256)
        made += hmac.digest(secret, last + label + seed, hashlib.sha256)
    return made[:size]


class _Direction:
    """The records of one direction, from the first one after its Finished."""

    def __init__(self, key: bytes, salt: bytes) -> None:
        self._key, self._salt = key, salt
        self._number = 1  # Finished was 0

    def seal(self, kind: int, content: bytes) -> bytes:
        explicit = self._number.to_bytes(_NONCE_BYTES)
        extra = explicit + bytes((kind,)) + _VERSION + len(content).to_bytes(2)
        sealed, tag = _aes_gcm(self._key, self._salt + explicit, extra, content, encrypt=True)
        self._number += 1
        body = explicit + sealed + tag
        return bytes((kind,)) + _VERSION + len(body).to_bytes(2) + body

    def open(self, kind: int, body: bytes) -> Record:
        sealed = body[_NONCE_BYTES:-_TAG_BYTES]
        content, _ = _aes_gcm(self._key, self._salt + body[:_NONCE_BYTES], b"", sealed, encrypt=False)
        return Record(kind, content)


class Renegotiator:
    """A connected client whose handshake is complete. `connect` makes it."""

    def __init__(self, sock: socket.socket, sending: _Direction, receiving: _Direction) -> None:
        self.sock = sock
        self._sending, self._receiving = sending, receiving
        self._received = b""
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, port: int, folder: Path, *, receive_bytes: int) -> Renegotiator:
        """Connect with TLS 1.2. `folder`: for the secret that `ssl` writes; `receive_bytes`: its receive buffer."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            return await cls._begun(sock, folder / "secret")
        except BaseException:
            sock.close()
            raise

    @classmethod
    async def _begun(cls, sock: socket.socket, log: Path) -> Renegotiator:
        context = ssl.create_default_context(cafile=CERTIFICATES / "ca.pem")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE+AES128+AESGCM")
        context.keylog_filename = str(log)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        received = await _shake_hands(sock, tls, incoming, outgoing)
        _, client_random, master = log.read_text().splitlines()[-1].split()  # after a comment
        server_random = received[11:43]  # of ServerHello, which comes first
        block = _prf(bytes.fromhex(master), b"key expansion", server_random + bytes.fromhex(client_random), 40)
        return cls(sock, _Direction(block[:16], block[32:36]), _Direction(block[16:32], block[36:40]))

    def hellos(self, count: int) -> bytes:
        """Return the records of requests for a new handshake."""
        return b"".join([self._sending.seal(HANDSHAKE, HELLO) for _ in range(count)])

    async def send(self, records: bytes) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._loop.sock_sendall(self.sock, records)

    async def write(self, data: bytes) -> None:
        """Send data in one record."""
        await self.send(self._sending.seal(DATA, data))

    async def record(self) -> Record:
        """Return the next record of the server."""
        while len(self._received) < _HEADER_BYTES or len(self._received) < self._record_bytes:
            async with asyncio.timeout(PATIENCE_S):
                more = await self._loop.sock_recv(self.sock, 65536)
            if not more:
                raise EOFError
            self._received += more
        size = self._record_bytes
        kind, body = self._received[0], self._received[_HEADER_BYTES:size]
        self._received = self._received[size:]
        return self._receiving.open(kind, body)

    @property
    def _record_bytes(self) -> int:
        return _HEADER_BYTES + int.from_bytes(self._received[3:5])

    def close(self) -> None:
        self.sock.close()


async def _shake_hands(
    sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
) -> bytes:
    """Complete a handshake, and return what the server sent."""
    loop, received = asyncio.get_running_loop(), b""
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await loop.sock_sendall(sock, outgoing.read())
            async with asyncio.timeout(PATIENCE_S):
                more = await loop.sock_recv(sock, 65536)
            if not more:
                raise EOFError from None
            received += more
            incoming.write(more)
        else:
            await loop.sock_sendall(sock, outgoing.read())
            return received
