"""Finds out what a port speaks that gave no HTTP/1.1 reply: HTTP/2, as gRPC does, or TLS.

Sources: RFC 9113 3.4 (a server begins with a SETTINGS frame), RFC 8446 (a server answers a ClientHello).
"""

from __future__ import annotations

import socket
import ssl
from typing import Literal

PROBE_S_MAX = 1.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and an empty SETTINGS frame
_FRAME_HEAD_BYTES = 9
_SETTINGS = 4


def identify(host: str, port: int) -> Literal["tls", "http2"] | None:
    """Return what the port speaks; None if it is neither, or does not answer in PROBE_S_MAX seconds."""
    if _speaks_http2(host, port):
        return "http2"
    return "tls" if _speaks_tls(host, port) else None


def _speaks_http2(host: str, port: int) -> bool:
    head = b""
    try:
        with socket.create_connection((host, port), PROBE_S_MAX) as connection:
            connection.sendall(_PREFACE)
            while len(head) < _FRAME_HEAD_BYTES and (more := connection.recv(_FRAME_HEAD_BYTES - len(head))):
                head += more
    except OSError:
        return False
    return len(head) == _FRAME_HEAD_BYTES and head[0] == 0 and head[3] == _SETTINGS


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only the kind of the answer counts
    try:
        with socket.create_connection((host, port), PROBE_S_MAX) as connection, context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error)  # a TLS server that refuses this handshake
    except OSError:
        return False
