"""Messages that repeat are read without parsing them, and give what parsing gives."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.codec.decode import GrpcCall, GrpcDecoder
from millstream.gateway.grpc.codec.envelopes import Envelopes, inputs_of
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.output_options import Extensions
from tests.unit.test_grpc_decode import raw, request, signature

PLANS = InputPlans("m", signature(("a", "FP32"), ("b", "FP32")), 8000)
DECODER = GrpcDecoder(PLANS, Extensions(PLANS.signature, {}, None, 0))


def learnt(built: Any, plans: InputPlans = PLANS, body: bytes | None = None) -> Envelopes:
    envelopes = Envelopes()
    envelopes.learn(
        body or built.SerializeToString(),
        built,
        plans,
        GrpcDecoder(plans, Extensions(plans.signature, {}, None, 0)).decode(built),
    )
    return envelopes


@pytest.mark.parametrize("rows", [1, 20, 4000])
def test_what_is_known_is_read_as_what_is_parsed(rows: int) -> None:
    def built(first: bytes, second: bytes) -> Any:
        made = request(first * 8 * rows, second * 8 * rows, names=("b", "a"), shape=(rows, 2))
        made.outputs.add(name="z")
        made.model_version = "7"
        return made

    envelopes = learnt(built(b"1", b"2"))
    again = built(b"3", b"4")
    envelope = envelopes.find(again.SerializeToString())
    assert envelope is not None
    inputs = inputs_of(again.SerializeToString(), envelope)
    parsed = DECODER.decode(again)
    assert raw(GrpcCall(inputs, rows, parsed.options, None, "")) == raw(parsed)
    assert [(one.shape, one.size_bytes) for one in inputs] == [(one.shape, one.size_bytes) for one in parsed.inputs]
    assert (envelope.model, envelope.version) == ("m", "7")
    assert (envelope.rows, envelope.outputs) == (parsed.rows, parsed.outputs) == (rows, (1,))


def test_what_differs_is_not_known() -> None:
    envelopes = learnt(request(b"1" * 8, b"2" * 8, names=("a", "b")))
    assert envelopes.find(request(b"1" * 8, b"2" * 8, names=("a", "b")).SerializeToString())
    assert not envelopes.find(request(b"1" * 8, b"2" * 8, names=("b", "a")).SerializeToString())
    assert not envelopes.find(request(b"1" * 7, b"2" * 9, names=("a", "b")).SerializeToString())  # as long in all
    assert not envelopes.find(b"")


def test_a_view_is_known_as_its_bytes_are() -> None:
    """Messages that arrived in shared memory are views."""
    envelopes = learnt(request(b"1" * 8, b"2" * 8, names=("a", "b")))
    again = request(b"3" * 8, b"4" * 8, names=("a", "b")).SerializeToString()
    other = request(b"3" * 8, b"4" * 8, names=("b", "a")).SerializeToString()
    view = memoryview(bytearray(again))
    envelope = envelopes.find(view)
    assert envelope is not None
    assert envelope is envelopes.find(again)
    assert envelopes.find(memoryview(bytearray(other))) is None
    assert envelopes.find(memoryview(b"")) is None
    assert [bytes(one.data) for one in inputs_of(view, envelope)] == [b"3" * 8, b"4" * 8]


def test_the_largest_tensor_is_known_from_the_first_bytes() -> None:
    known = request(b"1" * 80, b"2" * 80, names=("a", "b"), shape=(10, 2))
    envelopes, body = learnt(known), known.SerializeToString()
    at, size = envelopes.largest_tensor(len(body), body[:16]) or (0, 0)
    assert (size, bytes(body[at : at + size])) == (80, b"1" * 80)
    assert envelopes.largest_tensor(len(body), body[:15]) is None
    assert envelopes.largest_tensor(len(body) + 1, body) is None


def test_what_is_more_than_tensors_is_parsed_each_time() -> None:
    with_id = request(b"1" * 8, b"2" * 8, names=("a", "b"))
    with_id.id = "1"
    impatient = request(b"1" * 8, b"2" * 8, names=("a", "b"))
    impatient.parameters["timeout"].int64_param = 5
    typed = request(names=("a", "b"))
    for item in typed.inputs:
        item.contents.fp32_contents.extend([1, 2])
    ranked = request(b"1" * 8, b"2" * 8, names=("a", "b"))
    ranked.outputs.add(name="y").parameters["classification"].int64_param = 1
    for built in (with_id, impatient, typed, ranked):
        assert not learnt(built).find(built.SerializeToString())
    truth = InputPlans("m", signature(("a", "BOOL")), 8)
    checked = request(b"\0\1", datatype="BOOL")
    assert not learnt(checked, truth).find(checked.SerializeToString())


def test_bytes_that_only_look_like_tensors() -> None:
    """The tensors come first; the last field is unknown and holds the same bytes."""
    built = request(b"1" * 8, b"2" * 8, names=("a", "b"))
    tail = pb.ModelInferRequest(raw_input_contents=built.raw_input_contents).SerializeToString()
    body = built.SerializeToString() + b"\xfa\x01" + bytes([len(tail)]) + tail
    read = pb.ModelInferRequest.FromString(body)
    assert raw(DECODER.decode(read)) == [b"1" * 8, b"2" * 8]
    assert not learnt(read, body=body).find(body)
