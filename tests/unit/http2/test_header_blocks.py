"""Header blocks are remembered only while they mean the same; what is written is read by another implementation."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.gateway.http2.events import ConnectionFault, ErrorCode
from millstream.gateway.http2.header_blocks import (
    BLOCK_BYTES_MAX,
    NO_TABLE,
    HeaderReader,
    Headers,
    changes_table,
    encode,
)

names = st.from_regex(r"\A[a-z][a-z0-9-]{0,10}\Z")
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=200)
fields = st.tuples(names, values, st.booleans())


class Interpreter:
    """Returns what it gets, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, headers: Headers) -> Headers:
        self.calls += 1
        return headers


def reader(interpret: Interpreter, list_bytes_max: int = 1 << 16) -> HeaderReader[Headers]:
    return HeaderReader(interpret, list_bytes_max, 1 << 17)


def test_block_of_known_fields_is_decoded_once():
    interpret, encoder = Interpreter(), Encoder()
    read = reader(interpret).read
    read(encoder.encode([("a", "1")]))

    again = encoder.encode([("a", "1")])
    assert [read(again) for _ in range(3)] == [[(b"a", b"1")]] * 3

    assert interpret.calls == 2


def test_block_is_forgotten_when_the_table_changes():
    """The same byte stands for the entry inserted last."""
    interpret, encoder = Interpreter(), Encoder()
    read = reader(interpret).read
    read(encoder.encode([("a", "1")]))
    assert read(b"\xbe") == [(b"a", b"1")]

    read(encoder.encode([("b", "2")]))

    assert read(b"\xbe") == [(b"b", b"2")]


def test_block_is_forgotten_also_if_the_changing_block_is_malformed():
    encoder = Encoder()

    def interpret(headers: Headers) -> Headers:
        if (b"bad", b"1") in headers:
            raise ValueError
        return headers

    read = HeaderReader(interpret, 1 << 16, 1 << 17).read
    read(encoder.encode([("a", "1")]))
    assert read(b"\xbe") == [(b"a", b"1")]
    with pytest.raises(ValueError):
        read(encoder.encode([("bad", "1")]))
    with pytest.raises(ValueError):
        read(b"\xbe")


def test_long_block_is_decoded_each_time():
    interpret = Interpreter()
    read = reader(interpret).read
    block = encode([(b"a", bytes(BLOCK_BYTES_MAX))])
    read(block)
    read(block)
    assert interpret.calls == 2


def test_list_over_the_limit_is_dropped_and_the_table_kept():
    interpret, encoder = Interpreter(), Encoder()
    read = reader(interpret, 200).read
    assert read(encoder.encode([("long", "x" * 300)])) is None
    assert read(encoder.encode([("a", "1")])) == [(b"a", b"1")]


def test_header_bomb_ends_the_connection():
    """RFC 7541, section 7.3: an entry of 4 KiB, and one byte for each time that it is meant."""
    encoder = Encoder()
    read = reader(Interpreter()).read
    read(encoder.encode([("a", "x" * 4000)]))
    with pytest.raises(ConnectionFault) as caught:
        read(b"\xbe" * 1000)
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


@settings(deadline=None)
@given(st.lists(st.lists(fields, max_size=8), max_size=12))
def test_remembered_blocks_mean_what_the_decoder_says(lists):
    """Any sequence of blocks of another encoder, each sent twice, the second time as it is encoded then."""
    encoder, decoder = Encoder(), Decoder()
    read = reader(Interpreter()).read
    for headers in lists:
        for _ in range(2):
            block = encoder.encode(headers)
            assert read(block) == [(bytes(n), bytes(v)) for n, v in decoder.decode(block, raw=True)]


@settings(deadline=None)
@given(st.lists(fields, max_size=8))
def test_a_block_changes_the_table_if_the_table_is_another_behind_it(headers):
    encoder, decoder = Encoder(), Decoder()
    for _ in range(2):
        before = list(decoder.header_table.dynamic_entries)
        block = encoder.encode(headers)
        decoder.decode(block)
        if list(decoder.header_table.dynamic_entries) != before:
            assert changes_table(block)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_list_or_a_connection_fault(block):
    try:
        reader(Interpreter()).read(block)
    except ConnectionFault as fault:
        assert fault.code in {ErrorCode.COMPRESSION_ERROR, ErrorCode.ENHANCE_YOUR_CALM}


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=9000)), max_size=4))
def test_written_block_is_read_by_another_decoder(headers):
    block = NO_TABLE + encode(headers)
    assert [tuple(field) for field in Decoder(1 << 20).decode(block, raw=True)] == headers
    assert changes_table(block)
    assert not changes_table(block[1:])
