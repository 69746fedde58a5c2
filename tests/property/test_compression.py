"""ISA-L reads what zlib reads, refuses what zlib refuses, and stays within the same bounds."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.gateway.http.compression import compress, decompress
from millstream.services.errors import Code, Failure
from tests.fuzz.decoding import ONLY_ZLIB_REFUSES

STEADY = settings(deadline=None, derandomize=True)
WBITS = {b"gzip": 31, b"deflate": 15}
encodings = st.sampled_from(sorted(WBITS))
contents = st.one_of(
    st.binary(max_size=2000),
    st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=40), st.integers(0, 5000)),
    st.lists(st.floats(), max_size=200).map(lambda numbers: repr(numbers).encode()),
)


class Written(NamedTuple):
    """How zlib writes a content: its parameters, and the flush in the middle."""

    level: int
    memory: int
    strategy: int
    flush: int | None


writing = st.builds(
    Written,
    st.integers(-1, 9),
    st.integers(1, 9),
    st.integers(0, 4),
    st.sampled_from([None, zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH]),
)
#: (position as a share of the body, bytes to remove there, bytes to insert there)
damages = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=9)).filter(lambda it: bool(it[1] or it[2])),
    min_size=1,
    max_size=3,
)


def written(content: bytes, encoding: bytes, how: Written) -> bytes:
    engine = zlib.compressobj(how.level, zlib.DEFLATED, WBITS[encoding], how.memory, how.strategy)
    half = len(content) // 2
    parts = [engine.compress(content[:half])]
    if how.flush is not None:
        parts.append(engine.flush(how.flush))
    return b"".join((*parts, engine.compress(content[half:]), engine.flush()))


def damaged(body: bytes, damage: list[tuple[float, int, bytes]]) -> bytes:
    for share, removed, inserted in damage:
        at = int(share * len(body))
        body = body[:at] + inserted + body[at + removed :]
    return body


def by_zlib(body: bytes, encoding: bytes, bytes_max: int) -> bytes:
    """Return the content as the standard library reads it. Raises zlib.error, EOFError, Failure(TOO_LARGE)."""
    content = b""
    rest = body
    while rest or not content:
        engine = zlib.decompressobj(WBITS[encoding])
        content += engine.decompress(rest, bytes_max + 1 - len(content))
        if len(content) > bytes_max:
            raise Failure(Code.TOO_LARGE, "")
        if not engine.eof:
            raise EOFError
        rest = engine.unused_data
        if rest and encoding == b"deflate":
            raise zlib.error("continues")
        if not rest:
            break
    return content


@STEADY
@given(contents, encodings, writing, st.integers(-1, 1))
def test_what_zlib_writes_is_read_up_to_the_exact_limit(
    content: bytes, encoding: bytes, how: Written, above: int
) -> None:
    bytes_max = max(0, len(content) + above)
    body = written(content, encoding, how)
    if bytes_max < len(content):
        with pytest.raises(Failure) as caught:
            decompress(body, encoding, bytes_max)
        assert caught.value.code is Code.TOO_LARGE
    else:
        assert decompress(body, encoding, bytes_max) == content


@STEADY
@given(contents, encodings)
def test_what_is_written_is_read_by_zlib(content: bytes, encoding: bytes) -> None:
    body = compress(content, encoding)
    assert zlib.decompress(body, WBITS[encoding]) == content
    assert len(body) <= len(content) + 40 + len(content) // 1000


@STEADY
@given(contents, encodings, writing, damages, st.integers(0, 1 << 16))
def test_a_damaged_body_is_read_or_refused_as_zlib_does(
    content: bytes, encoding: bytes, how: Written, damage: list[tuple[float, int, bytes]], bytes_max: int
) -> None:
    body = damaged(written(content, encoding, how), damage)
    said = ""
    expected: bytes | None = None
    try:
        expected = by_zlib(body, encoding, bytes_max)
    except (zlib.error, EOFError, Failure) as error:
        said = str(error)
    try:
        read = decompress(body, encoding, bytes_max)
    except Failure as failure:
        assert expected is None
        assert failure.code in {Code.INVALID, Code.TOO_LARGE}
        return
    assert len(read) <= bytes_max
    assert read == expected or any(words in said for words in ONLY_ZLIB_REFUSES)


@STEADY
@given(st.binary(max_size=200), encodings)
def test_any_bytes_are_read_or_refused(body: bytes, encoding: bytes) -> None:
    for head in (b"", b"\x1f\x8b\x08", b"\x1f\x8b\x08\x00\0\0\0\0\0\3", b"\x78\x9c"):
        try:
            decompress(head + body, encoding, 1 << 16)
        except Failure as failure:
            assert failure.code in {Code.INVALID, Code.TOO_LARGE}


X = gzip.compress(b"x", mtime=0)
REFUSED = {
    "a reserved flag": (b"gzip", X[:3] + b"\x20" + X[4:]),
    "a reserved flag in the second member": (b"gzip", X + X[:3] + b"\x80" + X[4:]),
    "a wrong checksum of the head": (b"gzip", X[:3] + b"\2" + X[4:10] + b"??" + X[10:]),
    "a wrong length": (b"gzip", X[:-4] + b"\2\0\0\0"),
    "a window of 64 KiB": (b"deflate", b"\x88\x1c" + zlib.compress(b"x")[2:]),
    "it needs a dictionary": (b"deflate", b"\x78\x20\0\0\0\1"),
    "a wrong checksum": (b"deflate", zlib.compress(b"x")[:-1] + b"?"),
}


@pytest.mark.parametrize(("encoding", "body"), REFUSED.values(), ids=REFUSED)
def test_a_head_or_end_that_zlib_refuses_is_refused(encoding: bytes, body: bytes) -> None:
    with pytest.raises(Failure, match=f"the body is not valid {encoding.decode()}: ") as caught:
        decompress(body, encoding, 1 << 16)
    assert caught.value.code is Code.INVALID


@pytest.mark.parametrize("encoding", sorted(WBITS))
def test_a_bomb_takes_no_memory_beyond_the_limit(encoding: bytes) -> None:
    bomb = zlib.compress(bytes(64 << 20), 9, WBITS[encoding])
    tracemalloc.start()
    try:
        with pytest.raises(Failure) as caught:
            decompress(bomb, encoding, 1 << 20)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is Code.TOO_LARGE
    assert peak_bytes < 3 << 20
