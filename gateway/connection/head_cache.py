"""head_cache: heads of infer posts by their bytes, so that a repeated head is not parsed again. Pure.

A client sends the same bytes up to the empty line with each request of one size. The result of the parser depends on
these bytes alone, so it holds for the next request with them.
"""

from __future__ import annotations

from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.connection.path_cache import InferPath, infer_path
from millstream.gateway.connection.request_cycle import RequestCycle
from millstream.gateway.connection.request_head import head_fault

HEADS_MAX = 1024  # cached heads of one server; a full cache is emptied
CACHED_BYTES_MAX = 1024  # bytes of one head; longer heads are never cached, which bounds the cache in bytes, too
#: headers that decide how the body is framed or what happens to the connection
_SPECIAL_HEADERS = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})


class CachedHead(NamedTuple):
    """The head of a plain infer post: HTTP/1.1, keep-alive, with a Content-Length."""

    head: bytes
    total_bytes: int  # of the head and the body
    path: InferPath
    headers: InferHeaders
    host_known: bool  # else a web page that rebinds its name may have sent it, where calls need no key


class _HeadCallbacks:
    """Collects the URL and the headers that the parser reports for one head."""

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


def read_head(head: bytes, body_bytes_max: int, guard: BrowserGuard) -> CachedHead | None:
    """Return the parsed `head`, empty line included; None unless it begins a plain infer post within the limit.

    None, too, for a post of a web page that `guard` refuses.
    """
    reader = _HeadCallbacks()
    parser = HttpRequestParser(reader)
    try:
        parser.feed_data(head)
    except (HttpParserError, HttpParserUpgrade):
        return None
    names = [name for name, _ in reader.headers]
    plain = reader.heads == 1 and names.count(b"content-length") == 1 and _SPECIAL_HEADERS.isdisjoint(names)
    version = parser.get_http_version()
    if not plain or parser.get_method() != b"POST" or version != "1.1" or head_fault(version, reader.headers):
        return None
    sent = dict(reader.headers)
    path, body_bytes = infer_path(reader.url), int(sent[b"content-length"])
    if path is None or not 0 < body_bytes <= body_bytes_max or guard.page_fault("POST", sent) is not None:
        return None
    cycle = RequestCycle(path, [], lambda *_: None)
    cycle.read(reader.headers, body_bytes_max)
    return CachedHead(head, len(head) + body_bytes, path, cycle.headers, guard.host_fault(sent) is None)


def cache_head(
    heads: dict[bytes, CachedHead | None], head: bytes, body_bytes_max: int, guard: BrowserGuard
) -> CachedHead | None:
    """Return what `read_head` returns, and keep it in `heads`."""
    cached = read_head(head, body_bytes_max, guard)
    if len(heads) >= HEADS_MAX:
        heads.clear()
    heads[head] = cached
    return cached
