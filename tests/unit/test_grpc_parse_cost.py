"""What a message would cost to parse, told by its framing alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.codec import parse_cost
from millstream.gateway.grpc.codec.encode import varint
from millstream.gateway.grpc.codec.messages import parse, parse_infer
from millstream.services.errors import Code, Failure

MIB = 1 << 20


def message(count: int, raw: int = 100_000) -> Any:
    """An ordinary request of `count` inputs, each with a parameter, and as many outputs."""
    request = pb.ModelInferRequest(model_name="m", model_version="1", id="mine")
    request.parameters["timeout"].int64_param = 5
    for index in range(count):
        tensor = request.inputs.add(name=f"x{index}", datatype="FP32", shape=[1, raw // 4])
        tensor.parameters["a"].bool_param = True
        request.outputs.add(name=f"y{index}").parameters["classification"].int64_param = 3
        request.raw_input_contents.append(bytes(raw))
    return request


def nested(tag: int, inner: bytes) -> bytes:
    return varint(tag << 3 | 2) + varint(len(inner)) + inner


BOMBS = {
    "inputs": b"\x2a\x00" * MIB,
    "outputs": b"\x32\x00" * MIB,
    "parameters": b"\x22\x00" * MIB,
    "raw contents": b"\x3a\x00" * MIB,
    "parameters of an input": nested(5, b"\x22\x00" * MIB),
    "strings": nested(5, nested(5, b"\x42\x00" * MIB)),
    "dimensions": nested(5, b"\x18\x01" * MIB),
    "dimensions in one piece": nested(5, nested(3, b"\x01" * 2 * MIB)),
    "numbers one by one": nested(5, nested(5, b"\x10\x01" * MIB)),
    "unknown fields": b"\xa0\x06\x01" * MIB,
    "groups": b"\xa3\x06\xa4\x06" * MIB,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_of_millions_of_fields_is_not_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pb.ModelInferRequest.FromString(BOMBS[name])  # it is one
    monkeypatch.setattr("millstream.gateway.grpc.codec.messages._parsed", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(Failure) as refusal:
        asyncio.run(parse_infer(BOMBS[name]))
    assert refusal.value.code is Code.TOO_LARGE


@pytest.mark.parametrize(("count", "raw"), [(1, 100_000), (2, 100_000), (100, 20_000)])
def test_ordinary_messages_are(count: int, raw: int) -> None:
    body = message(count, raw).SerializeToString()
    assert parse_cost.within(body, parse_cost.COUNTED_INLINE_MAX)
    assert asyncio.run(parse_infer(body)) == message(count, raw)


def test_long_ordinary_messages_are() -> None:
    strings = pb.ModelInferRequest(model_name="m")
    strings.inputs.add(name="x", shape=[100_000]).contents.bytes_contents.extend([b"abc"] * 100_000)
    strings.inputs.add(name="y", shape=[MIB]).contents.int_contents.extend([3] * MIB)
    body = strings.SerializeToString()
    assert not parse_cost.within(body, parse_cost.COUNTED_INLINE_MAX)
    assert asyncio.run(parse_infer(body)) == strings


def test_other_messages_have_few_fields() -> None:
    load = pb.RepositoryModelLoadRequest(model_name="m")
    load.parameters["file:1/model.onnx"].bytes_param = bytes(MIB)
    assert parse(pb.RepositoryModelLoadRequest, load.SerializeToString()) == load
    with pytest.raises(Failure) as refusal:
        parse(pb.RepositoryModelLoadRequest, b"\x1a\x00" * MIB)
    assert refusal.value.code is Code.TOO_LARGE


def test_any_bytes_are_counted_to_their_end() -> None:
    state = random.Random(4)
    good = message(2, raw=8).SerializeToString()
    for _ in range(5000):
        body = bytearray(good)
        for _ in range(state.randrange(4)):
            body[state.randrange(len(body))] = state.randrange(256)
        text = bytes(body[: state.randrange(len(body) + 1)])
        assert isinstance(parse_cost.within(text, 1000), bool)
        try:
            parsed = pb.ModelInferRequest.FromString(text)
        except DecodeError:
            continue
        least = parse_cost.MESSAGE_UNITS * (len(parsed.inputs) + len(parsed.outputs)) + len(parsed.raw_input_contents)
        assert not least or not parse_cost.within(text, least - 1), "every part of a message that is one was counted"
