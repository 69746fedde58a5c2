"""Only a plain infer post is known by the bytes of its head."""

import tracemalloc

import pytest

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.connection.request_head import HEADS_MAX, ONCE_MAX, CachedHead, HeadCache, PathCache, read_head

MIB = 1 << 20
GUARD = BrowserGuard()


def head(*lines: str, line: str = "POST /v2/models/m/infer HTTP/1.1") -> bytes:
    return "\r\n".join([line, "Host: x", *lines, "", ""]).encode()


def test_a_plain_post_is_known():
    data = head("Content-Length: 7", "Inference-Header-Content-Length: 3")
    expected = CachedHead(data, len(data) + 7, ("m", None), InferHeaders(None, None, b"3"), host_known=True)
    assert read_head(data, PathCache(), MIB, GUARD) == expected


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
    assert read_head(data, PathCache(), MIB, GUARD) is None


def test_a_head_is_known_from_its_second_time_on_whatever_comes_between():
    heads = HeadCache()
    sent = [head("Content-Length: 7", line=f"POST /v2/models/m{number}/infer HTTP/1.1") for number in range(50)]
    assert [heads.find(one, PathCache(), MIB, GUARD) for one in sent] == [None] * 50
    found = [heads.find(one, PathCache(), MIB, GUARD) for one in sent]
    assert [one.path for one in found if one is not None] == [(f"m{number}", None) for number in range(50)]
    assert all(heads.find(one, PathCache(), MIB, GUARD) is known for one, known in zip(sent, found, strict=True))


def test_what_is_remembered_is_bounded():
    heads = HeadCache()
    for number in range(HEADS_MAX + 10):
        sent = head(f"Content-Length: {number + 1}")
        heads.find(sent, PathCache(), MIB, GUARD)
        known = heads.find(sent, PathCache(), MIB, GUARD)
        assert known is not None
        assert known.total_bytes == len(known.head) + number + 1
    assert len(heads) <= HEADS_MAX


def test_heads_that_are_never_repeated_take_no_memory():
    heads = HeadCache()
    tracemalloc.start()
    try:
        for number in range(5 * ONCE_MAX):
            assert heads.find(head(f"traceparent: {number}", "Content-Length: 7"), PathCache(), MIB, GUARD) is None
        assert tracemalloc.get_traced_memory()[0] < 2 * MIB
    finally:
        tracemalloc.stop()
    assert not len(heads)
