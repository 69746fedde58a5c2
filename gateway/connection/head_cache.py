"""head_cache: heads of infer posts that were read once and need not be parsed again. Pure.

A client sends the same bytes up to the empty line with each request of one size. The parser is a function of those
bytes, so what it made of them once holds for the next time.
"""

from __future__ import annotations

from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.connection.path_cache import InferPath, infer_path
from millstream.gateway.connection.request_cycle import RequestCycle
from millstream.gateway.connection.request_head import head_fault

HEADS_MAX = 1024
KNOWN_BYTES_MAX = 1024  # longer heads are parsed each time: what is kept is bounded in bytes too
_NOT_PLAIN = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})


class CachedHead(NamedTuple):
    """A plain infer post of HTTP/1.1 on a connection that stays, whose length it tells."""

    head: bytes
    total_bytes: int  # of the head and the body
    path: InferPath
    headers: InferHeaders


class _Reader:
    """Collects what a parser of its own, fed with one head and nothing else, says about it."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.heads = 0

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.heads += 1


def read_head(head: bytes, body_bytes_max: int) -> CachedHead | None:
    """What `head`, empty line included, asks for; None unless it is plain enough to be known by its bytes."""
    reader = _Reader()
    parser = HttpRequestParser(reader)
    try:
        parser.feed_data(head)
    except (HttpParserError, HttpParserUpgrade):
        return None
    names = [name for name, _ in reader.headers]
    plain = reader.heads == 1 and names.count(b"content-length") == 1 and _NOT_PLAIN.isdisjoint(names)
    version = parser.get_http_version()
    if not plain or parser.get_method() != b"POST" or version != "1.1" or head_fault(version, reader.headers):
        return None
    path, body_bytes = infer_path(reader.url), int(dict(reader.headers)[b"content-length"])
    if path is None or not 0 < body_bytes <= body_bytes_max:
        return None
    cycle = RequestCycle(path, [], lambda *_: None)
    cycle.read(reader.headers, body_bytes_max)
    return CachedHead(head, len(head) + body_bytes, path, cycle.headers)


def learn_head(heads: dict[bytes, CachedHead | None], head: bytes, body_bytes_max: int) -> CachedHead | None:
    """`read_head`, remembered in `heads`."""
    known = read_head(head, body_bytes_max)
    if len(heads) >= HEADS_MAX:
        heads.clear()
    heads[head] = known
    return known
