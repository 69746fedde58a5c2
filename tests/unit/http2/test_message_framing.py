"""gRPC messages in the data of a stream, cut anywhere. Source: gRPC over HTTP2, "Length-Prefixed-Message"."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.grpc.connections.message_framing import Message, MessageReader, prefix
from millstream.services.errors import Code, Failure

messages = st.lists(st.tuples(st.booleans(), st.binary(max_size=40)), max_size=6)


@given(messages, st.lists(st.integers(0, 250), max_size=10))
def test_messages_are_the_same_wherever_the_data_is_cut(sent, cuts):
    data = b"".join(prefix(len(body), compressed=compressed) + body for compressed, body in sent)
    edges = sorted(min(cut, len(data)) for cut in cuts)
    reader = MessageReader(100)
    received: list[Message] = []
    for begin, end in zip([0, *edges], [*edges, len(data)], strict=True):
        received += reader.read(data[begin:end])
    assert received == sent
    assert not reader.held_bytes


@given(messages, st.lists(st.integers(0, 250), max_size=10), st.sets(st.integers(0, 40)))
def test_messages_are_the_same_in_memory_that_is_given_for_some(sent, cuts, given_for):
    data = b"".join(prefix(len(body), compressed=compressed) + body for compressed, body in sent)
    edges = sorted(min(cut, len(data)) for cut in cuts)
    reader = MessageReader(100)
    given: list[memoryview] = []

    def allocate(size_bytes: int, first: bytes) -> memoryview | None:
        assert 0 < len(first) < size_bytes
        assert (size_bytes, first) in {(len(body), body[: len(first)]) for _, body in sent}
        if size_bytes not in given_for:
            return None
        given.append(memoryview(bytearray(size_bytes)))
        return given[-1]

    reader.allocate = allocate
    received: list[Message] = []
    for begin, end in zip([0, *edges], [*edges, len(data)], strict=True):
        received += reader.read(data[begin:end])
    assert [(compressed, bytes(body)) for compressed, body in received] == sent
    assert [body for _, body in received if isinstance(body, memoryview)] == given
    assert not reader.held_bytes


def test_a_message_of_the_limit_is_read():
    assert MessageReader(3).read(prefix(3) + b"abc") == [(False, b"abc")]


@pytest.mark.parametrize("rest", [b"", b"abcd"], ids=["the prefix alone", "the whole message"])
def test_a_message_over_the_limit_is_refused_by_its_prefix(rest):
    with pytest.raises(Failure, match=r"larger than max \(4 vs. 3\)") as caught:
        MessageReader(3).read(prefix(4) + rest)
    assert caught.value.code is Code.TOO_LARGE


def test_unknown_flags_are_refused():
    with pytest.raises(Failure) as caught:
        MessageReader(3).read(b"\x02\0\0\0\x01a")
    assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize("step", [1, 3, 1000, 5000, 70_000])
def test_a_large_message_is_the_same_whatever_its_parts(step):
    body = bytes(range(256)) * 400
    data = (prefix(len(body)) + body + prefix(0)) * 2
    reader = MessageReader(len(body))
    received: list[Message] = []
    for at in range(0, len(data), step):
        received += reader.read(data[at : at + step])
    assert received == [(False, body), (False, b"")] * 2
    assert not reader.held_bytes


def test_bytes_held_are_those_of_the_incomplete_message():
    reader = MessageReader(1 << 20)
    reader.read(prefix(10) + b"1234567890" + prefix(100_000)[:3])
    assert reader.held_bytes == 3
    reader.read(prefix(100_000)[3:] + bytes(99_999))
    assert reader.held_bytes == 5 + 99_999
    assert [len(body) for _, body in reader.read(bytes(1))] == [100_000]
    assert not reader.held_bytes
