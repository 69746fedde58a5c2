"""Compressed bodies, both ways."""

from __future__ import annotations

import gzip
import zlib

import pytest

from millstream.gateway.http.compression import choose_encoding, compress, decompress
from millstream.services.errors import Code, Failure

CONTENT = b"some content, some content, " * 1000


def refused(body: bytes, encoding: bytes, bytes_max: int = 1 << 20) -> Code:
    with pytest.raises(Failure) as caught:
        decompress(body, encoding, bytes_max)
    return caught.value.code


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_there_and_back(encoding: bytes) -> None:
    body = compress(CONTENT, encoding)
    assert len(body) < len(CONTENT) / 10
    assert decompress(body, encoding, len(CONTENT)) == CONTENT
    assert decompress(compress(b"", encoding), encoding, 0) == b""


def test_what_the_standard_library_writes_and_reads() -> None:
    assert decompress(gzip.compress(CONTENT), b" GZIP ", 1 << 20) == CONTENT
    assert decompress(gzip.compress(CONTENT), b"x-gzip", 1 << 20) == CONTENT
    assert decompress(zlib.compress(CONTENT), b"Deflate", 1 << 20) == CONTENT
    assert gzip.decompress(compress(CONTENT, b"gzip")) == CONTENT
    assert zlib.decompress(compress(CONTENT, b"deflate")) == CONTENT


def test_identity() -> None:
    assert decompress(memoryview(CONTENT), b"identity", len(CONTENT)) == CONTENT
    assert refused(CONTENT, b"identity", len(CONTENT) - 1) is Code.TOO_LARGE


def test_members_of_a_gzip_body_follow_each_other() -> None:
    large = bytes(range(256)) * 2000
    members = gzip.compress(CONTENT) + gzip.compress(b"") + gzip.compress(large, 0)
    assert decompress(members, b"gzip", 1 << 20) == CONTENT + large
    assert refused(members, b"gzip", len(CONTENT) + len(large) - 1) is Code.TOO_LARGE


def test_empty_members_without_end_are_refused() -> None:
    assert refused(gzip.compress(b"") * 10_001, b"gzip") is Code.INVALID


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_bodies_that_are_not_what_they_say(encoding: bytes) -> None:
    body = compress(CONTENT, encoding)
    for cut in (0, 1, 5, len(body) // 2, len(body) - 1):
        assert refused(body[:cut], encoding) is Code.INVALID
    assert refused(body + b"x", encoding) is Code.INVALID
    assert refused(b"not compressed at all", encoding) is Code.INVALID
    assert refused(body[:20] + bytes(10) + body[30:], encoding) is Code.INVALID
    assert refused(zlib.compress(CONTENT)[2:-4], encoding) is Code.INVALID
    assert refused(zlib.compress(CONTENT) * 2, b"deflate") is Code.INVALID


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_bomb_is_refused_at_the_limit(encoding: bytes) -> None:
    bomb = compress(bytes(1 << 22), encoding)
    assert refused(bomb, encoding, 1 << 16) is Code.TOO_LARGE
    assert refused(bomb, encoding, (1 << 22) - 1) is Code.TOO_LARGE
    assert len(decompress(bomb, encoding, 1 << 22)) == 1 << 22


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_bomb_is_refused_for_what_it_would_become_of_how_little(encoding: bytes) -> None:
    bomb = compress(bytes(1 << 26), encoding)
    assert len(bomb) < 1 << 19
    assert refused(bomb, encoding, 1 << 26) is Code.TOO_LARGE
    members = compress(bytes(1 << 20), encoding) * 64
    assert refused(members, encoding, 1 << 26) in {
        Code.TOO_LARGE,
        Code.INVALID,
    }  # zlib streams do not follow each other
    digits = b",".join(b"%d" % (number % 1000) for number in range(2_000_000))
    assert decompress(compress(digits, encoding), encoding, 1 << 26) == digits


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"gzip, gzip", b"gzip;q=1", b"\xff"])
def test_encodings_that_are_not_spoken(encoding: bytes) -> None:
    assert refused(b"", encoding) is Code.ENCODING


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        (None, None),
        (b"", None),
        (b"*", None),
        (b"br, zstd", None),
        (b"gzip, deflate", b"gzip"),
        (b"deflate, gzip", b"gzip"),
        (b"GZIP", b"gzip"),
        (b"x-gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"gzip;q=0.5, deflate;q=0.8", b"deflate"),
        (b"gzip ; q = 0.5 , deflate;q=0.4", b"gzip"),
        (b"gzip;q=0", None),
        (b"gzip;q=0, deflate", b"deflate"),
        (b"identity, gzip;q=0.5", None),
        (b"identity;q=0.5, gzip", b"gzip"),
        (b"gzip;q=many", None),
        (b"gzip;q=nan", None),
        (b"gzip;q=7", None),
        (b",;=,\xff", None),
    ],
)
def test_choose_encoding(header: bytes | None, chosen: bytes | None) -> None:
    assert choose_encoding(header) == chosen
