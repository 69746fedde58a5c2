"""Batches, replies and BYTES tensors on the wire: what goes in comes out, and any other bytes are a ValueError."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from millstream.services.model.datatypes import decode_elements, encode_elements
from millstream.services.wire.batch import (
    ALIGN_BYTES,
    BATCH_FORMATS,
    KIND_GIVEN_UP,
    REPLY_FORMATS,
    BatchHeader,
    BatchInput,
    ReplyHeader,
    ReplyOutput,
    ShmSlice,
    Unreadable,
    agreed_format,
    decode_batch,
    decode_reply,
    encode_batch,
    encode_reply,
    read_item,
)

pack = msgspec.msgpack.encode

STEADY = settings(deadline=None, derandomize=True)

SIZES = st.integers(0, 2**63 - 1)
NAMES = st.text(max_size=20)
TIMES = st.floats(allow_nan=False)
PLACES = st.none() | st.builds(ShmSlice, NAMES, SIZES, SIZES)
INNER = st.lists(SIZES, max_size=4).map(tuple)
TENSOR = (INNER, SIZES, st.none() | st.lists(SIZES, max_size=4), PLACES)
PARTS = st.lists(st.binary(max_size=40), max_size=4)

BATCHES = st.builds(
    BatchHeader,
    NAMES,
    st.binary(max_size=40),
    TIMES,
    st.lists(SIZES, max_size=4),
    st.lists(TIMES, max_size=4),
    st.lists(st.builds(BatchInput, *TENSOR), max_size=3),
    st.lists(PLACES, max_size=3),
    NAMES,
    st.booleans(),
    st.lists(SIZES, max_size=3).map(tuple),
)
REPLIES = st.builds(
    ReplyHeader,
    NAMES,
    NAMES,
    TIMES,
    TIMES,
    TIMES,
    TIMES,
    SIZES,
    st.lists(SIZES, max_size=3),
    st.dictionaries(st.integers(0, 100), st.lists(NAMES, min_size=2, max_size=2), max_size=3),
    st.lists(st.builds(ReplyOutput, *TENSOR), max_size=3),
    NAMES,
    st.integers(1, 10),
)


@given(BATCHES, PARTS)
@STEADY
def test_a_batch_comes_back_as_it_was(header: BatchHeader, parts: list[bytes]) -> None:
    data = encode_batch(header, parts)
    decoded, inline = decode_batch(data)
    assert decoded == header
    assert all(isinstance(tensor.inner, tuple) for tensor in decoded.inputs)
    assert bytes(inline) == b"".join(parts)
    assert (len(data) - len(inline)) % ALIGN_BYTES == 0


@given(REPLIES, PARTS)
@STEADY
def test_a_reply_comes_back_as_it_was(header: ReplyHeader, parts: list[bytes]) -> None:
    data = encode_reply(header, parts)
    decoded = decode_reply(data)
    assert not isinstance(decoded, str)
    assert decoded[0] == header
    assert bytes(decoded[1]) == b"".join(parts)
    assert (len(data) - len(decoded[1])) % ALIGN_BYTES == 0


@given(BATCHES, REPLIES)
@STEADY
def test_headers_are_messagepack_to_another_implementation(batch: BatchHeader, reply: ReplyHeader) -> None:
    for data, start, read in (
        (encode_batch(batch, []), 5, lambda head: decode_batch(as_batch(head))[0] == batch),
        (encode_reply(reply, []), 6, lambda head: decode_reply(as_reply(head))[0] == reply),
    ):
        [length] = struct.unpack_from("<I", data, start - 5)
        fields = msgpack.unpackb(data[start : start + length], strict_map_key=False)
        assert isinstance(fields, list)
        assert read(msgpack.packb(fields))


@given(NAMES)
@STEADY
def test_a_batch_that_was_given_up_has_its_name(name: str) -> None:
    assert decode_reply(bytes([KIND_GIVEN_UP]) + name.encode()) == name


def as_batch(head: bytes, number: int = BATCH_FORMATS[-1]) -> bytes:
    return struct.pack("<IB", len(head), number) + head


def as_reply(head: bytes, number: int = REPLY_FORMATS[-1]) -> bytes:
    return struct.pack("<BIB", 0, len(head), number) + head


def refused(decode: Any, data: bytes) -> bool:
    """Whether `data` is refused, in the only way that is allowed."""
    try:
        decode(data)
    except ValueError:
        return True
    return False


@given(st.binary(max_size=200))
@STEADY
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_batch, decode_reply, decode_elements, read_item):
        refused(decode, data)


NESTED: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


@given(NESTED, st.lists(NESTED, min_size=8, max_size=14))
@STEADY
def test_any_header_of_another_form_is_read_or_refused(header: Any, fields: list[Any]) -> None:
    for content in (header, fields, [fields]):
        head = pack(content)
        refused(decode_batch, as_batch(head))
        refused(decode_batch, as_batch(head[:-1] + b"\xc1"))
        refused(decode_reply, as_reply(head))
        refused(read_item, head)


@given(BATCHES, REPLIES, st.data())
@STEADY
def test_a_message_that_is_cut_off_in_its_header_is_refused(
    batch: BatchHeader, reply: ReplyHeader, data: st.DataObject
) -> None:
    for encoded, start, decode in (
        (encode_batch(batch, []), 5, decode_batch),
        (encode_reply(reply, []), 6, decode_reply),
    ):
        header_bytes = struct.unpack_from("<I", encoded, start - 5)[0]
        cut = data.draw(st.integers(0, start + header_bytes - 1))
        assert refused(decode, encoded[:cut])


@given(BATCHES, st.integers(0, 100).filter(lambda other: other not in {*BATCH_FORMATS, *REPLY_FORMATS}))
@STEADY
def test_another_format_is_refused(batch: BatchHeader, other: int) -> None:
    for head in (pack(batch), pack(["another", "form"]), b""):
        with pytest.raises(ValueError, match=f"its format is {other}, and this release reads {BATCH_FORMATS[-1]}"):
            decode_batch(as_batch(head, other))
        with pytest.raises(ValueError, match=f"its format is {other}, and this release reads {REPLY_FORMATS[-1]}"):
            decode_reply(as_reply(head, other))


@given(BATCHES, REPLIES, st.lists(NESTED, max_size=3))
@STEADY
def test_what_a_newer_release_appends_is_not_read(batch: BatchHeader, reply: ReplyHeader, appended: list[Any]) -> None:
    head = pack((*astuple(batch), *appended))
    assert decode_batch(as_batch(head))[0] == batch
    head = pack((*astuple(reply), *appended))
    decoded = decode_reply(as_reply(head))
    assert not isinstance(decoded, str)
    assert decoded[0] == reply


@given(
    st.sets(st.integers(1, 6), min_size=1).map(sorted),
    st.lists(st.sets(st.integers(1, 6), min_size=1), min_size=1, max_size=5),
)
@STEADY
def test_what_is_written_is_the_newest_that_all_read_else_that_most_read(
    formats: list[int], readers: list[set[int]]
) -> None:
    agreed = agreed_format(formats, readers)
    read_by = {number: sum(number in reader for reader in readers) for number in formats}
    if agreed is None:
        assert not any(read_by.values())
    else:
        assert read_by[agreed] == max(read_by.values())
        assert all(read_by[number] < read_by[agreed] for number in formats if number > agreed)
    assert agreed_format(formats, []) == formats[-1]


@given(st.binary(max_size=20).filter(lambda name: name.isascii()), st.sampled_from([1, 2]))
@STEADY
def test_what_the_queue_says_of_a_batch_is_its_name(name: bytes, kind: int) -> None:
    decoded = decode_reply(bytes([kind]) + name)
    assert decoded == name.decode()
    assert isinstance(decoded, Unreadable) is (kind == 2)


@given(st.integers(3, 255), REPLIES)
@STEADY
def test_another_kind_of_reply_is_refused(kind: int, reply: ReplyHeader) -> None:
    with pytest.raises(ValueError, match="kind"):
        decode_reply(bytes([kind]) + encode_reply(reply, [])[1:])


@given(st.lists(st.binary(max_size=20), max_size=20))
@STEADY
def test_elements_come_back_as_they_were(elements: list[bytes]) -> None:
    raw = encode_elements(elements)
    assert len(raw) == sum(4 + len(element) for element in elements)
    for form in (raw, bytearray(raw), memoryview(raw)):
        assert decode_elements(form) == elements


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=20), st.data())
@STEADY
def test_elements_that_are_cut_off_are_refused_unless_between_two(elements: list[bytes], data: st.DataObject) -> None:
    raw = encode_elements(elements)
    cut = data.draw(st.integers(0, len(raw) - 1))
    ends = [len(encode_elements(elements[:count])) for count in range(len(elements))]
    if cut in ends:
        assert decode_elements(raw[:cut]) == elements[: ends.index(cut)]
    else:
        assert refused(decode_elements, raw[:cut])


@pytest.mark.parametrize("size", [1, 2**16, 2**31, 2**32 - 1])
def test_an_element_that_claims_more_than_is_there_costs_nothing(size: int) -> None:
    with pytest.raises(ValueError, match="longer than"):
        decode_elements(struct.pack("<I", size))


HOSTILE = {
    "a list of 4 billion": b"\xdd\xff\xff\xff\xff",
    "rows, 4 billion": b"\x98\xa1b\xc4\x01r\x00\xdd\xff\xff\xff\xff",
    "a name of 4 GB": b"\x98\xdb\xff\xff\xff\xff",
    "a name that is no UTF-8": b"\x98\xa2\xff\xff\xc4\x01r\x00\x90\x90\x90\x90\xa0",
    "100,000 lists in lists": b"\x9f\xa1b\xc4\x01r\x00\x90\x90\x90\x90\xa0\xc2\x90" + b"\x91" * 100_000,
    "a timestamp that is none": b"\x98\xc7\x02\xffab",
    "an extension": b"\x98\xd4\x05a",
    "a map": b"\x81\xa1a\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("head", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused_and_costs_nothing(head: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch: "):
        decode_batch(as_batch(head))
    with pytest.raises(ValueError, match="not a reply: "):
        decode_reply(as_reply(head))
    for length in (len(head) + 1, 2**32 - 1):  # more than is there
        with pytest.raises(ValueError, match="not a batch: "):
            decode_batch(struct.pack("<IB", length, BATCH_FORMATS[-1]) + head)
