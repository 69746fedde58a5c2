"""Translates errors of httpx2 into errors of the client: each message says what is wrong, and what to do.

A port that gave no HTTP/1.1 reply is asked what it speaks: HTTP/2, as gRPC does, or TLS.
Sources: RFC 9113 3.4 (a server begins with a SETTINGS frame), RFC 8446 (a server answers a ClientHello).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import Literal

import httpx2

from millstream.client.call import Call
from millstream.client.errors import Cause, ConnectionFailed, Timeout
from millstream.services.errors import Code, Failure

#: messages of OpenSSL for a server that answers in plain text
_PLAIN_TEXT = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
#: … for a client without a certificate, or with one of another authority (RFC 8446 6.2; TLS 1.2: handshake_failure)
_NO_CLIENT_CERTIFICATE = ("CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "ALERT_HANDSHAKE_FAILURE")
_UNFINISHED = "without sending complete"


def failure_from(error: Exception, url: str, call: Call) -> Failure:
    """Return the failure that an exception of httpx2 means; opens a connection if the server's protocol is in doubt."""
    if isinstance(error, httpx2.TimeoutException):
        limit_s = _limit_s(error, call)
        return Timeout(f"{url} did not answer {call.method} {call.path} within {limit_s:.3g} s")
    if isinstance(error, httpx2.ConnectError):
        return _connect_failure(error, url)
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.NetworkError):
        return _broken(error, url)
    reason = str(error) or type(error).__name__
    if isinstance(error, UnicodeError):
        return Failure(Code.INVALID, f"the request to {url} cannot be sent: a header has characters beyond ASCII")
    if isinstance(error, httpx2.InvalidURL | httpx2.LocalProtocolError):
        return Failure(Code.INVALID, f"the request to {url} cannot be sent: {reason}")
    return ConnectionFailed(Cause.UNREACHABLE, f"the connection to {url} failed: {reason}")


def _limit_s(error: httpx2.TimeoutException, call: Call) -> float:
    assert call.timeouts is not None
    limits = call.timeouts
    if isinstance(error, httpx2.ConnectTimeout):
        return limits.connect_s
    if isinstance(error, httpx2.WriteTimeout):
        return limits.write_s
    return limits.read_s or 0.0


def _connect_failure(error: httpx2.ConnectError, url: str) -> ConnectionFailed:
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            host = httpx2.URL(url).host
            return ConnectionFailed(Cause.UNKNOWN_HOST, f"{url}: no address is known for the host {host!r}")
        if isinstance(cause, ConnectionRefusedError):
            return ConnectionFailed(
                Cause.REFUSED, f"no server answers at {url}: is `millstream up` running? (connection refused)"
            )
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConnectionFailed(
                Cause.TLS,
                f"the certificate of {url} is not trusted: {cause.verify_message}; "
                "name its authority with MILLSTREAM_CA_FILE, ca_file in config.toml or Client(ca_file=...)",
            )
        if isinstance(cause, ssl.SSLError):
            if any(word in str(cause) for word in _PLAIN_TEXT):
                return ConnectionFailed(
                    Cause.TLS, f"{url} speaks plain HTTP, not TLS: write http:// instead of https://"
                )
            return ConnectionFailed(Cause.TLS, f"no TLS connection to {url} came about: {cause.reason or cause}")
    return ConnectionFailed(Cause.UNREACHABLE, f"{url} cannot be reached: {error or type(error).__name__}")


def _broken(error: Exception, url: str) -> ConnectionFailed:
    """Return the failure for a connection that ended early, or carried no HTTP."""
    reason = str(error) or type(error).__name__
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError) and any(word in str(cause) for word in _NO_CLIENT_CERTIFICATE):
            return ConnectionFailed(
                Cause.TLS,
                f"{url} accepts only clients with a certificate of its authority: set MILLSTREAM_CLIENT_CERT_FILE and "
                f"MILLSTREAM_CLIENT_KEY_FILE ({cause.reason})",
            )
    if _UNFINISHED in reason:
        return ConnectionFailed(Cause.INCOMPLETE, f"{url} closed the connection within its reply: {reason}")
    address = httpx2.URL(url)
    if address.scheme == "http":
        spoken = identify(address.host, address.port or 80)
        if spoken == "tls":
            return ConnectionFailed(Cause.TLS, f"{url} speaks TLS: write https:// instead of http://")
        if spoken == "http2":
            return ConnectionFailed(
                Cause.PROTOCOL, f"{url} is the gRPC port, which speaks HTTP/2 only; HTTP is usually on port 8000"
            )
    if isinstance(error, httpx2.NetworkError) or "disconnected" in reason:
        return ConnectionFailed(Cause.CLOSED, f"{url} closed the connection without a reply: {reason}")
    return ConnectionFailed(Cause.PROTOCOL, f"{url} does not speak HTTP: {reason}; check the endpoint")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


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
