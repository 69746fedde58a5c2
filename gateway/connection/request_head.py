"""What the head of an HTTP/1 request says, beyond the parser. Pure.

The model that the URL of an infer post names; checks that the parser does not make; the form without an upgrade; and
heads by their bytes: a client sends the same bytes up to the empty line with each request of one size, so that the
result of the parser holds for the next request with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.connection.infer_handler import InferHeaders

InferPath = tuple[str, str | None]
"""(model, version); version None: the URL names none."""

PATHS_MAX = 4096  # cached URLs of one server; a full cache is emptied
URL_BYTES_MAX = 512  # longer URLs are never cached, which bounds the cache in bytes, too
_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


def infer_path(url: bytes) -> InferPath | None:
    """Return (model, version) of the URL of an infer post, percent-decoded; None for any other URL.

    None, too, for a path with an encoded slash, which the ASGI app refuses.
    """
    try:
        raw_path = parse_url(url).path
        path = unquote(raw_path.decode("ascii"))
    except Exception:
        return None  # uvicorn reports the error
    if has_encoded_slash(raw_path):
        return None
    match = _PATH.fullmatch(path)
    return None if match is None else (match[1], match[2])


def has_encoded_slash(raw_path: bytes) -> bool:
    """Whether a path, as sent, has a slash that separates for those who decode it, and not for those who do not."""
    return b"%2f" in raw_path.lower()


class PathCache(dict[bytes, InferPath | None]):
    """Returns `infer_path` of a URL, and keeps it, since clients repeat their URLs.

    Args:
        routed: paths that the ASGI app answers, also those that are of infer posts: a plug-in may have such a route.
    """

    def __init__(self, routed: Iterable[str] = ()) -> None:
        super().__init__()
        self._routed = {infer_path(path.encode()) for path in routed}

    def __missing__(self, url: bytes) -> InferPath | None:
        path = infer_path(url)
        if path in self._routed:
            path = None
        if len(url) <= URL_BYTES_MAX:
            if len(self) >= PATHS_MAX:
                self.clear()
            self[url] = path
        return path


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
    headers = InferHeaders.read(reader.headers)
    return CachedHead(head, len(head) + body_bytes, path, headers, guard.host_fault(sent) is None)


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
