"""request_head: checks of a request's head that the parser does not make, and its form without an upgrade. Pure."""

from __future__ import annotations

import re
from typing import Any

Headers = list[tuple[bytes, bytes]]

HEAD_BYTES_MAX = 64 * 1024  # of a head, or of chunk lines and trailers together; more are answered 400
CHUNK_LINE_BYTES = 16  # of each chunk, that its size needs and that are not counted: 16 digits would do for any
HEADERS_MAX = 1000  # of one head: 64 KiB would hold 13,000, and a head that comes in one segment even more

#: RFC 3986 section 3.2: a name or an address, and a port; empty if the target has no authority
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_VERSIONS = frozenset({"1.1", "1.0"})
#: headers of which a second one would change who calls, or how the body is read; a proxy may have checked the other one
_SINGLE = frozenset({b"host", b"authorization", b"x-api-key", b"inference-header-content-length"})


def head_fault(version: str, headers: Headers) -> str | None:
    """Return why a server must refuse a well-formed head; None if it may accept it.

    Source: RFC 9112 section 3.2 (Host), RFC 9110 sections 2.5 (versions) and 5.3 (repeated fields).

    Args:
        version: "1.1", for example.
        headers: Names in lower case.
    """
    if version not in _VERSIONS:
        return f"HTTP/{version[:8]} is not supported: send HTTP/1.1"
    if len(headers) > HEADERS_MAX:
        return f"the request has more than {HEADERS_MAX} headers"
    single = [header for header in headers if header[0] in _SINGLE]
    sent = dict(single)
    host = sent.get(b"host")
    if len(single) > len(sent):
        repeated = next(name for name in sent if sum(name == other for other, _ in single) > 1)
        name = repeated.decode().title()
        return f"a request has one {name} header"
    if host is None:
        return "a request has one Host header" if version == "1.1" else None
    return None if _HOST.fullmatch(host.strip()) else "the Host header is not a valid host"


class _Discarded(Headers):
    """The list that trailers are appended to. It stays empty: they are not used, and may be many."""

    def append(self, _: tuple[bytes, bytes]) -> None:
        return


DISCARDED = _Discarded()


def strip_upgrade(parser: Any, url: bytes, headers: Headers) -> bytes:
    """Return the head that httptools' `parser` just read, without its offer to switch to another protocol."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    version = parser.get_http_version().encode()
    return b"%b %b HTTP/%b\r\n%b\r\n" % (parser.get_method(), url, version, b"".join(lines))
