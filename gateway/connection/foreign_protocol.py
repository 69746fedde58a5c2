"""Recognises clients of another protocol on a port by their first bytes, and logs them.

Such a client gets a plain HTTP answer, also from a port that speaks TLS. By it TLS clients recognise a plain port
("wrong version number"; Go: "server gave HTTP response to HTTPS client"), and gRPC clients an HTTP/1 server ("Trying to
connect an http1.x server"). A GOAWAY instead would make gRPC clients reconnect without a pause.
Sources: RFC 8446 5.1 (TLS records); RFC 9113 3.4 (HTTP/2 preface).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from millstream.gateway.connection.error_reply import error_reply
from millstream.gateway.connection.infer_handler import head
from millstream.services.errors import Code, Failure
from millstream.services.process.request_id import new_request_id

log = logging.getLogger("millstream.http")

#: seconds between two log lines about clients of one protocol
LOG_EVERY_S = 60.0


class ForeignProtocol(NamedTuple):
    """A protocol that the HTTP port does not speak. `message`: what a client of it should do."""

    name: str
    start: bytes
    message: str


_PROTOCOLS = (
    ForeignProtocol(
        "TLS",
        b"\x16",
        "this port speaks plain HTTP, and the client began with TLS: call http://, or set MILLSTREAM_TLS_CERT_FILE",
    ),
    ForeignProtocol(
        "HTTP/2",
        b"PRI * HTTP/2.0\r\n",
        "this port speaks HTTP/1.1, and the client began with HTTP/2: gRPC has a port of its own "
        "(MILLSTREAM_GRPC_PORT, 8001 by default)",
    ),
)

#: on the HTTP port, and on the gRPC port, if they speak TLS
PLAIN_HTTP = ForeignProtocol(
    "plain HTTP", b"", "this port speaks HTTPS, and the client began with plain HTTP: call https://"
)
PLAIN_GRPC = ForeignProtocol(
    "a client without TLS",
    b"",
    "this port speaks gRPC over TLS, and the client began without TLS: use a secure channel",
)


def looks_like_http(data: bytes) -> bool:
    """Whether a connection that starts with `data` may be of an HTTP client: a method has capital letters."""
    return b"A" <= data[:1] <= b"Z"


def plain_refusal(foreign: ForeignProtocol) -> bytes:
    """Return the HTTP reply to a client that began with `foreign`, to be sent as it is."""
    reply = error_reply(Failure(Code.INVALID, foreign.message))
    return head(reply, [], new_request_id(), keep_alive=False) + reply.body


def recognise(data: bytes) -> ForeignProtocol | None:
    """Return the protocol of a connection that starts with `data`, which is not HTTP/1; None if it is not known."""
    return next((foreign for foreign in _PROTOCOLS if data.startswith(foreign.start)), None)


class ForeignLog:
    """Logs clients of other protocols: the first one at once, then their number at most once a minute.

    Args:
        clock: a monotonic clock, in seconds.
        port: the port, for people.
    """

    def __init__(self, clock: Callable[[], float], port: str = "HTTP") -> None:
        self._clock = clock
        self._port = port
        self._logged: dict[str, float] = {}  # protocol -> instant of the last line
        self._unlogged: dict[str, int] = {}  # protocol -> connections since then

    def count(self, foreign: ForeignProtocol, client: str) -> None:
        """Count a connection of `client`, an address."""
        name = foreign.name
        count = self._unlogged[name] = self._unlogged.get(name, 0) + 1
        now = self._clock()
        if now - self._logged.get(name, float("-inf")) >= LOG_EVERY_S:
            self._logged[name] = now
            self._unlogged[name] = 0
            log.warning("%d x %s on the %s port, last from %s: %s", count, name, self._port, client, foreign.message)
