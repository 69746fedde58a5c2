"""TLS clients that do what Python's `ssl` has no function for: they change keys again and again (RFC 8446 4.6.3).

Tests that use this are marked `@pytest.mark.needs("openssl")`: the program brings the library.
"""

from __future__ import annotations

import ctypes
import ssl
from functools import cache

_READ_BYTES = 65536
_UPDATE_REQUESTED = 1  # SSL_KEY_UPDATE_REQUESTED: the server has to change its keys, too
_WANT_READ = 2  # SSL_ERROR_WANT_READ
_CLOSED = 6  # SSL_ERROR_ZERO_RETURN: close_notify

_POINTER, _INT, _BYTES = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
#: name: (type of the result, types of the arguments)
_FUNCTIONS = {
    "TLS_client_method": (_POINTER, ()),
    "SSL_CTX_new": (_POINTER, (_POINTER,)),
    "SSL_CTX_free": (None, (_POINTER,)),
    "SSL_new": (_POINTER, (_POINTER,)),
    "SSL_free": (None, (_POINTER,)),
    "SSL_set_bio": (None, (_POINTER, _POINTER, _POINTER)),
    "SSL_set_connect_state": (None, (_POINTER,)),
    "SSL_do_handshake": (_INT, (_POINTER,)),
    "SSL_key_update": (_INT, (_POINTER, _INT)),
    "SSL_read": (_INT, (_POINTER, _BYTES, _INT)),
    "SSL_write": (_INT, (_POINTER, _BYTES, _INT)),
    "SSL_get_error": (_INT, (_POINTER, _INT)),
    "BIO_s_mem": (_POINTER, ()),
    "BIO_new": (_POINTER, (_POINTER,)),
    "BIO_read": (_INT, (_POINTER, _BYTES, _INT)),
    "BIO_write": (_INT, (_POINTER, _BYTES, _INT)),
}


@cache
def _libssl() -> ctypes.CDLL:
    library = ctypes.CDLL("libssl.so.3")  # finds the functions of libcrypto, too, which it links to
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class KeyChangingClient:
    """A client without checks of certificates. Its methods are those of `ssl.SSLObject`, and `update_keys`.

    Args:
        incoming: Gets what the server sends.
        outgoing: Gets what is to be sent.
    """

    def __init__(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._library = library = _libssl()
        context = library.SSL_CTX_new(library.TLS_client_method())
        self._tls = library.SSL_new(context)
        library.SSL_CTX_free(context)  # the connection has a reference
        self._received, self._sent = (library.BIO_new(library.BIO_s_mem()) for _ in range(2))
        library.SSL_set_bio(self._tls, self._received, self._sent)
        library.SSL_set_connect_state(self._tls)

    def __del__(self) -> None:
        self._library.SSL_free(self._tls)

    def do_handshake(self) -> None:
        self._result(self._library.SSL_do_handshake(self._pulled()))

    def update_keys(self, count: int) -> None:
        """Change the keys `count` times, and ask the server each time to change its own."""
        for _ in range(count):
            assert self._library.SSL_key_update(self._tls, _UPDATE_REQUESTED) == 1
            assert self._library.SSL_do_handshake(self._tls) == 1
        self._push()

    def write(self, data: bytes) -> int:
        return self._result(self._library.SSL_write(self._pulled(), data, len(data)))

    def read(self, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        read_bytes = self._result(self._library.SSL_read(self._pulled(), data, size))
        return data.raw[:read_bytes]

    def _pulled(self) -> int:
        """Pass on what was received, and return the connection."""
        if records := self._incoming.read():
            self._library.BIO_write(self._received, records, len(records))
        return self._tls  # type: ignore[no-any-return]

    def _push(self) -> None:
        records = ctypes.create_string_buffer(_READ_BYTES)
        while (size := self._library.BIO_read(self._sent, records, _READ_BYTES)) > 0:
            self._outgoing.write(records.raw[:size])

    def _result(self, result: int) -> int:
        error = self._library.SSL_get_error(self._tls, result) if result <= 0 else 0
        self._push()
        if error == _WANT_READ:
            raise ssl.SSLWantReadError
        if error not in (0, _CLOSED):
            raise ssl.SSLError(f"libssl failed with error {error}")
        return max(result, 0)
