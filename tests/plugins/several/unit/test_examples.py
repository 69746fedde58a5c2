"""Every example that an error document offers is read without an error, whatever the signature, in every protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.codec.decode import GrpcDecoder
from millstream.gateway.grpc.methods.infer import MESSAGE_BYTES_MAX, advice_text, with_advice
from millstream.gateway.tensors import forms
from millstream.gateway.tensors.examples import BodyWriter, generate_body, infer_body, rows_body, samples, value_body
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.tensors.output_options import Extensions
from millstream.gateway.v2.decode import V2Decoder, parse_header_length
from millstream.plugins.compat.tfserving.predict import classify_body, read_document, read_examples, regress_body
from millstream.plugins.compat.torchserve.predictions import read as read_prediction
from millstream.plugins.compat.triton.generate import read as read_generate
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import DATATYPES
from millstream.services.model.manifest import TrialInputs
from millstream.services.model.signature import Signature, TensorSpec

LIMIT = 1 << 26
DOCUMENT_BYTES_MAX = 12_000


class Sent(NamedTuple):
    """A request that an example describes."""

    body: bytes
    headers: dict[str, str]


class _Requests:
    """Stands in for the package `requests` while an `example_python` is evaluated."""

    def post(self, _: str, json: Any = None, data: bytes | None = None, headers: dict[str, str] | None = None) -> Sent:
        return Sent(orjson.dumps(json) if data is None else data, headers or {})


def sent(advice: Any) -> Sent | None:
    """Return the request of the example, if there is one."""
    assert not {"example", "example_python"} <= advice.keys()
    if "example" in advice:
        return Sent(orjson.dumps(advice["example"]), {})
    if "example_python" in advice:
        made: Sent = eval(advice["example_python"], {"requests": _Requests(), "url": ""})
        return made
    return None


def v2(plans: InputPlans, request: Sent) -> list[InputTensor]:
    length = request.headers.get("Inference-Header-Content-Length")
    header_bytes = parse_header_length(None if length is None else length.encode())
    return V2Decoder(plans, LIMIT).decode(request.body, header_bytes).inputs


def generate(plans: InputPlans, request: Sent) -> list[InputTensor]:
    return read_generate(plans, request.body).inputs.tensors


def rows(plans: InputPlans, request: Sent) -> list[InputTensor]:
    return forms.from_json(plans, forms.parse_json(request.body, plans.json_limits)).inputs.tensors


def value(plans: InputPlans, request: Sent) -> list[InputTensor]:
    return read_prediction(plans, "application/json", request.body).inputs.tensors


def listed(plans: InputPlans, request: Sent) -> list[InputTensor]:
    return read_examples(plans, read_document(request.body, plans.json_limits)).tensors


Read = Callable[[InputPlans, Sent], list[InputTensor]]
FORMS: list[tuple[BodyWriter, Read]] = [
    (infer_body, v2),
    (generate_body, generate),
    (rows_body, rows),
    (value_body, value),
    (classify_body, listed),
    (regress_body, listed),
]

names = st.one_of(
    st.sampled_from(
        ["x", "image", "input_ids", "id", "parameters", "data", "body", "instances", "inputs", "b64", "a'b"]
    ),
    st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()),
)
dims = st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 224])


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    batching = draw(st.booleans())

    def spec(name: str, optional: bool) -> TensorSpec:
        shape = draw(st.lists(dims, max_size=3))
        while math.prod(max(dim, 1) for dim in shape) > 20_000:
            shape.pop()
        shape = [-1, *shape] if batching else shape
        return TensorSpec(
            name=name, datatype=draw(st.sampled_from(sorted(DATATYPES))), shape=tuple(shape), optional=optional
        )

    inputs = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    outputs = draw(st.lists(names, min_size=1, max_size=2, unique=True))
    return Signature(
        inputs=tuple(spec(name, draw(st.booleans())) for name in inputs),
        outputs=tuple(spec(name, False) for name in outputs),
        batching=batching,
    )


trials = st.builds(TrialInputs, size=st.sampled_from([1, 2, 16, 256]), fill=st.sampled_from([0, 1]))


@pytest.mark.parametrize(("write", "read"), FORMS, ids=[read.__name__ + write.__name__ for write, read in FORMS])
@settings(deadline=None, derandomize=True)
@given(signatures(), trials)
def test_the_example_is_read_as_the_inputs_it_stands_for(
    write: BodyWriter, read: Read, signature: Signature, trial: TrialInputs
) -> None:
    plans = InputPlans("m", signature, 8, trial=trial)
    failure = invalid("it does not fit")
    plans.advise(failure, write)
    assert failure.advice is not None
    assert len(orjson.dumps(failure.advice)) <= DOCUMENT_BYTES_MAX
    assert failure.advice["signature"]["inputs"][0]["name"] == signature.inputs[0].name
    request = sent(failure.advice)
    if request is not None:
        expect_samples(signature, trial, read(plans, request))


@settings(deadline=None, derandomize=True)
@given(signatures(), trials, st.text(max_size=500))
def test_the_example_of_a_status_message_is_read(signature: Signature, trial: TrialInputs, message: str) -> None:
    plans = InputPlans("m", signature, 8, trial=trial)
    advice = advice_text(plans)
    assert len(with_advice(message, advice).encode("utf-8", "backslashreplace")) <= max(
        MESSAGE_BYTES_MAX, len(message.encode("utf-8", "backslashreplace"))
    )
    _, json_found, text = advice.partition("; a request that works: ")
    _, python_found, python = advice.partition("; a request that works, in Python: ")
    if not json_found and not python_found:
        return
    document = orjson.loads(text) if json_found else eval(python)
    request = json_format.ParseDict(document, pb.ModelInferRequest())
    call = GrpcDecoder(plans, Extensions(signature, {}, None, LIMIT)).decode(request)
    expect_samples(signature, trial, call.inputs)


def expect_samples(signature: Signature, trial: TrialInputs, tensors: list[InputTensor]) -> None:
    expected = {sample.name: sample.shape for sample in samples(signature, trial)}
    found = {
        spec.name: tuple(tensor.shape)
        for spec, tensor in zip(signature.inputs, tensors, strict=True)
        if tensor is not ABSENT
    }
    assert found == expected


def test_an_image_is_described_and_not_printed() -> None:
    image = TensorSpec(name="image", datatype="FP32", shape=(-1, 3, 224, 224))
    plans = InputPlans(
        "m", Signature(inputs=(image,), outputs=(image,), batching=True), 8, trial=TrialInputs(size=1, fill=0)
    )
    failure = invalid("no")
    plans.advise(failure, infer_body)
    assert failure.advice is not None
    assert failure.advice["example_python"] == (
        "requests.post(url, json={'inputs': [{'name': 'image', 'datatype': 'FP32', 'shape': [1, 3, 224, 224], "
        "'data': [0.0] * 150528}]})"
    )
    rows_failure = invalid("no")
    plans.advise(rows_failure, rows_body)
    assert rows_failure.advice is not None
    assert "[[[[0.0] * 224] * 224] * 3]" in rows_failure.advice["example_python"]


def test_many_and_long_names_are_left_out() -> None:
    specs = tuple(TensorSpec(name=f"{number}" * 100, datatype="FP32", shape=(-1, 1)) for number in range(200))
    plans = InputPlans("m", Signature(inputs=specs, outputs=(), batching=True), 8, trial=TrialInputs(size=1, fill=0))
    failure = invalid("no")
    plans.advise(failure, infer_body)
    assert failure.advice == {}
    assert advice_text(plans) == "; inputs: 200, which ModelMetadata lists"


def test_only_requests_that_do_not_fit_get_advice() -> None:
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 1))
    plans = InputPlans("m", Signature(inputs=(spec,), outputs=(), batching=True), 8)
    for code in set(Code) - {Code.INVALID}:
        failure = Failure(code, "no")
        plans.advise(failure, infer_body)
        assert failure.advice is None
    unknown = invalid("no")
    plans.advise(unknown, infer_body)  # no input is known to run: the signature alone
    assert unknown.advice is not None
    assert unknown.advice.keys() == {"signature"}
