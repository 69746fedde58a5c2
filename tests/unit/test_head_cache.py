"""Only a plain infer post is known by the bytes of its head."""

import pytest

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.connection.head_cache import HEADS_MAX, CachedHead, cache_head, read_head
from millstream.gateway.connection.infer_handler import InferHeaders

MIB = 1 << 20
GUARD = BrowserGuard()


def head(*lines: str, line: str = "POST /v2/models/m/infer HTTP/1.1") -> bytes:
    return "\r\n".join([line, "Host: x", *lines, "", ""]).encode()


def test_a_plain_post_is_known():
    data = head("Content-Length: 7", "Inference-Header-Content-Length: 3")
    expected = CachedHead(data, len(data) + 7, ("m", None), InferHeaders(None, None, b"3"), host_known=True)
    assert read_head(data, MIB, GUARD) == expected


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 7", line="GET /v2/models/m/infer HTTP/1.1"),
        head("Content-Length: 7", line="POST /v2/models/m/infer HTTP/1.0"),
        head("Content-Length: 7", line="POST /v2/models/m/ready HTTP/1.1"),
        head("Transfer-Encoding: chunked"),
        head("Content-Length: 7", "Connection: close"),
        head("Content-Length: 7", "Expect: 100-continue"),
        head("Content-Length: 7", "Upgrade: h2c", "Connection: Upgrade"),
        head("Content-Length: 0"),
        head("Content-Length: 1048577"),
        head(),
        head("Content-Length: 7", "Content-Length: 7"),
        head("Content-Length: 0") + head("Content-Length: 7"),
        b"garbage\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_anything_else_is_left_to_the_parser(data: bytes):
    assert read_head(data, MIB, GUARD) is None


def test_what_is_remembered_is_bounded():
    heads: dict[bytes, CachedHead | None] = {}
    for number in range(HEADS_MAX + 10):
        known = cache_head(heads, head(f"Content-Length: {number + 1}"), MIB, GUARD)
        assert known is not None
        assert known.total_bytes == len(known.head) + number + 1
    assert len(heads) <= HEADS_MAX
