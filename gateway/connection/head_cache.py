"""head_cache: heads of infer posts by their bytes, so that a repeated head is not parsed again. Pure.

A client sends the same bytes up to the empty line with each request of one size. The result of the parser depends on
these bytes alone, so it holds for the next request with them.
"""

from __future__ import annotations

from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.connection.path_cache import InferPath, PathCache
from millstream.gateway.connection.request_cycle import RequestCycle
from millstream.gateway.connection.request_head import head_fault

#: cached heads of one server, a few for each of a thousand models; a full cache is emptied
HEADS_MAX = 4096
ONCE_MAX = 4 * HEADS_MAX  # heads that are remembered by their hash after they were sent once; likewise emptied
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


def read_head(head: bytes, paths: PathCache, body_bytes_max: int, guard: BrowserGuard) -> CachedHead | None:
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
    path, body_bytes = paths[reader.url], int(sent[b"content-length"])
    if path is None or not 0 < body_bytes <= body_bytes_max or guard.page_fault("POST", sent) is not None:
        return None
    cycle = RequestCycle(path, [], lambda *_: None)
    cycle.read(reader.headers, body_bytes_max)
    return CachedHead(head, len(head) + body_bytes, path, cycle.headers, guard.host_fault(sent) is None)


class HeadCache:
    """The heads of one server that were sent more than once. A head that is never repeated costs only a look-up."""

    def __init__(self) -> None:
        self._heads: dict[bytes, CachedHead | None] = {}
        self._once: set[int] = set()  # hashes of heads that were sent once, and are read again the next time

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, head: bytes, paths: PathCache, body_bytes_max: int, guard: BrowserGuard) -> CachedHead | None:
        """Return what `read_head` returns, or None if `head` was not sent before."""
        try:
            return self._heads[head]
        except KeyError:
            return self._read_repeated(head, paths, body_bytes_max, guard)

    def _read_repeated(
        self, head: bytes, paths: PathCache, body_bytes_max: int, guard: BrowserGuard
    ) -> CachedHead | None:
        key = hash(head)
        if key not in self._once:
            if len(self._once) >= ONCE_MAX:
                self._once.clear()
            self._once.add(key)
            return None
        self._once.remove(key)
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        cached = self._heads[head] = read_head(head, paths, body_bytes_max, guard)
        return cached
