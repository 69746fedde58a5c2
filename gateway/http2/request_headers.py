"""request_headers: checks the fields of a request and of its trailers. Source: RFC 9113, sections 8.1 to 8.3."""

from __future__ import annotations

import re

from millstream.gateway.http2.header_blocks import Headers

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")  # without upper case
_VALUE = re.compile(rb"[^\x00\r\n]*")
_DIGITS = re.compile(rb"[0-9]{1,19}")
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED = frozenset({b":method", b":scheme", b":path"})
#: fields that are about one connection of HTTP/1.1
_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})


def without_blanks(headers: Headers) -> Headers:
    """Return fields whose values have no blanks at their ends, apart from pseudo-header fields.

    RFC 9113, section 8.2.1 forbids such blanks; gRPC lets clients send them and servers strip them.
    """
    return [(name, value if name.startswith(b":") else value.strip(b" \t")) for name, value in headers]


def check_request(headers: Headers) -> None:
    """Check decoded fields. Raises ValueError if the request is malformed."""
    pseudo: set[bytes] = set()
    regular = False
    for name, value in headers:
        if name.startswith(b":"):
            if regular or name not in _PSEUDO or name in pseudo:
                raise ValueError(f"the field {name!r} is unknown, repeated, or behind regular fields")
            pseudo.add(name)
            if not value and name != b":authority":
                raise ValueError(f"the field {name!r} is empty")
            if value != value.strip(b" \t"):
                raise ValueError(f"the field {name!r} has blanks at its ends")
        else:
            regular = True
            _check_name(name, value)
        _check_value(name, value)
    if not pseudo >= _REQUIRED:
        raise ValueError("a pseudo-header field is missing")


def check_trailers(headers: Headers) -> None:
    """Check decoded fields behind the content of a request. Raises ValueError if they are malformed."""
    for name, value in headers:
        _check_name(name, value)  # refuses pseudo-header fields, too
        _check_value(name, value)


def content_length(headers: Headers) -> int | None:
    """Return the content-length; None: there is none. Raises ValueError for one that is no number, or for two."""
    values = {value for name, value in headers if name == b"content-length"}
    if not values:
        return None
    if len(values) > 1 or not _DIGITS.fullmatch(value := values.pop()):
        raise ValueError("the content-length is malformed")
    return int(value)


def _check_name(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name) or name in _CONNECTION:
        raise ValueError(f"the field {name!r} may not be in HTTP/2")
    if name == b"te" and value != b"trailers":
        raise ValueError("the field 'te' may only be 'trailers'")


def _check_value(name: bytes, value: bytes) -> None:
    if not _VALUE.fullmatch(value):
        raise ValueError(f"the field {name!r} has a malformed value")
