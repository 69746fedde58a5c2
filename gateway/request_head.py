"""request_head: what the fast lane does to the bytes before a request's body, other than to parse them. Pure."""

from __future__ import annotations

from typing import Any

Headers = list[tuple[bytes, bytes]]

HEAD_BYTES_MAX = 64 * 1024


class _Nowhere(Headers):
    """Where trailers go: nobody reads them, and nobody bounds how many there are."""

    def append(self, _: tuple[bytes, bytes]) -> None:
        return


NOWHERE = _Nowhere()


def without_offer(parser: Any, url: bytes, headers: Headers) -> bytes:
    """The head that httptools' `parser` just read, without the offer to go on in another protocol."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    version = parser.get_http_version().encode()
    return b"%b %b HTTP/%b\r\n%b\r\n" % (parser.get_method(), url, version, b"".join(lines))
