"""The v2 codec against the reference client, and against malformed bytes.

tritonclient's request builder ──> Decoder       Encoder ──> tritonclient's result reader
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tritonclient.http import InferInput, InferRequestedOutput, InferResult
from tritonclient.http._utils import _get_inference_request

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import Column, Outputs, OutputTensor
from millstream.gateway.v2.decode import V2Decoder
from millstream.gateway.v2.options import InferCall, Options
from millstream.gateway.v2.responder import V2Encoder
from millstream.services.errors import Failure
from millstream.services.model.datatypes import BINARY_ONLY, BYTES, ITEM_BYTES, NUMPY, encode_elements
from millstream.services.model.signature import Signature, TensorSpec

Array = np.ndarray[Any, Any]
JSON_BYTES_MAX = 1 << 20
ROWS_MAX = 4

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def specs(draw: st.DrawFn, batching: bool, taken: list[str]) -> TensorSpec:
    """A tensor of any datatype and up to three dimensions; the first is the rows when batching."""
    name = draw(names.filter(lambda name: name not in taken))
    taken.append(name)
    shape = tuple(draw(st.lists(st.integers(-1, 3), max_size=2)))
    datatype = draw(st.sampled_from([*NUMPY, BYTES]))
    return TensorSpec(name=name, datatype=datatype, shape=(-1, *shape) if batching else shape)


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    batching = draw(st.booleans())
    taken: list[str] = []
    tensors = st.lists(specs(batching, taken), min_size=1, max_size=3)
    return Signature(inputs=tuple(draw(tensors)), outputs=tuple(draw(tensors)), batching=batching)


@st.composite
def arrays(draw: st.DrawFn, spec: TensorSpec, rows: int | None, json: bool) -> Array:
    """A tensor of `spec`. `json`: only what has a JSON form."""
    shape = tuple(draw(st.integers(0, 3)) if dim == -1 else dim for dim in spec.shape)
    if rows is not None:
        shape = (rows, *shape[1:])
    if spec.datatype == BYTES:
        elements = texts.map(str.encode) if json else st.binary(max_size=8)
        # NumPy drops zero bytes at the end of a bytes object that it is given as an array's fill
        return draw(npst.arrays(np.object_, shape, elements=elements, fill=st.nothing()))
    array = draw(npst.arrays(NUMPY[spec.datatype], shape))
    if json and array.dtype.kind == "f":
        array[np.isnan(array)] = np.nan  # JSON has no sign and no payload for it
    return array


def raw(array: Array) -> bytes:
    return encode_elements(list(array.ravel())) if array.dtype == np.object_ else array.tobytes()


def infer_input(spec: TensorSpec, array: Array, binary: bool) -> InferInput:
    tensor = InferInput(spec.name, list(array.shape), spec.datatype)
    tensor.set_data_from_numpy(array.view(ml_dtypes.bfloat16) if spec.datatype == "BF16" else array, binary)
    return tensor


@st.composite
def forms(draw: st.DrawFn, tensors: tuple[TensorSpec, ...]) -> list[bool]:
    """Which of the tensors are in binary form."""
    return [spec.datatype in BINARY_ONLY or draw(st.booleans()) for spec in tensors]


@settings(deadline=None)
@given(st.data())
def test_what_the_reference_client_asks_is_what_is_decoded(data: st.DataObject) -> None:
    signature = data.draw(signatures())
    decoder = V2Decoder(InputPlans("m", signature, ROWS_MAX), JSON_BYTES_MAX)
    rows = data.draw(st.integers(0, ROWS_MAX)) if signature.batching else None
    binary = data.draw(forms(signature.inputs))
    order = data.draw(st.permutations(range(len(signature.inputs))))
    wanted = data.draw(st.lists(st.integers(0, len(signature.outputs) - 1), unique=True))
    binary_outputs = data.draw(st.booleans())
    request_id = data.draw(st.just("") | texts)
    timeout, priority = data.draw(st.none() | st.integers(0, 2**40)), data.draw(st.integers(0, 2**32))
    for _ in range(3):  # other values in the same envelope
        values = [data.draw(arrays(spec, rows, not form)) for spec, form in zip(signature.inputs, binary, strict=True)]
        body, header_bytes = _get_inference_request(
            [infer_input(signature.inputs[i], values[i], binary[i]) for i in order],
            request_id,
            [InferRequestedOutput(signature.outputs[i].name, binary_data=binary_outputs) for i in wanted],
            *(0, False, False, priority, timeout, {"note": "n"}),
        )
        call = decoder.decode(body, header_bytes)
        assert [bytes(tensor.data) for tensor in call.inputs] == [raw(value) for value in values]
        assert [tensor.shape for tensor in call.inputs] == [value.shape for value in values]
        assert [tensor.size_bytes for tensor in call.inputs] == [len(raw(value)) for value in values]
        assert call.options.rows == (1 if rows is None else rows)
        assert call.options.outputs == ([(index, binary_outputs) for index in wanted] or None)
        assert (call.options.id, call.options.priority, call.options.binary_default) == (
            request_id,
            priority,
            not wanted,
        )
        assert call.options.timeout_s == (timeout / 1e6 if timeout else None)


@settings(deadline=None)
@given(st.data())
def test_what_is_encoded_is_what_the_reference_client_reads(data: st.DataObject) -> None:
    signature = data.draw(signatures())
    writer = V2Encoder("m", 1, signature)
    binary = data.draw(forms(signature.outputs))
    listed = data.draw(st.booleans()) or len(set(binary)) > 1
    wanted = list(enumerate(binary)) if listed else None
    options = Options(1, id=data.draw(texts), outputs=wanted, binary_default=binary[0])
    for _ in range(2):
        values = [
            data.draw(arrays(spec, 2 if signature.batching else None, not form))
            for spec, form in zip(signature.outputs, binary, strict=True)
        ]
        body, header_bytes = writer.encode(
            options, [reply(*pair) for pair in zip(signature.outputs, values, strict=True)]
        )
        result = InferResult.from_response_body(body, header_length=header_bytes)
        assert result.get_response().get("id", "") == options.id
        for spec, value, form in zip(signature.outputs, values, binary, strict=True):
            expect_equal(result.as_numpy(spec.name), value, spec, form)


@settings(deadline=None)
@given(st.data())
def test_replies_written_at_once_are_those_written_one_by_one(data: st.DataObject) -> None:
    batching = data.draw(st.booleans())
    spec = data.draw(specs(batching, []))
    signature = Signature(inputs=(), outputs=(spec,), batching=batching)
    binary = spec.datatype in BINARY_ONLY or data.draw(st.booleans())
    writer, options = V2Encoder("m", 1, signature), Options(data.draw(st.integers(0, 3)), binary_default=binary)
    count = data.draw(st.integers(1, 4)) if batching else 1
    value = data.draw(arrays(spec, count * options.rows if batching else None, not binary))
    whole = reply(spec, value)
    if isinstance(whole.array, list):
        sizes = len(whole.array) // count
        array: Any = [whole.array[at * sizes : (at + 1) * sizes] for at in range(count)]
    else:
        array = np.ascontiguousarray(whole.array)
    inner = value.shape[1:] if batching else value.shape
    outputs = Outputs([Column(spec.datatype, inner, array)], batching)
    alone = [writer.encode(options, one) for one in outputs.replies([options.rows] * count)]
    written = writer.encode_all(options, outputs, count)
    if written is not None:
        assert [(body, written[1]) for body in written[0]] == alone
    elif spec.datatype != BYTES:
        assert not np.isfinite(value).all() or not value.size  # what is plain is always written at once


def reply(spec: TensorSpec, value: Array) -> OutputTensor:
    if spec.datatype == BYTES:
        return OutputTensor(BYTES, value.shape, list(value.ravel()))
    return OutputTensor(spec.datatype, value.shape, value)


def expect_equal(got: Array, value: Array, spec: TensorSpec, binary: bool) -> None:
    assert got.shape == value.shape
    if spec.datatype == BYTES:
        assert [as_bytes(element) for element in got.ravel()] == list(value.ravel())
    elif binary:
        assert got.tobytes() == value.tobytes()
    else:
        np.testing.assert_array_equal(got, value)


def as_bytes(element: str | bytes) -> bytes:
    return element.encode() if isinstance(element, str) else element


X = TensorSpec(name="x", datatype="FP32", shape=(-1, 2))
Y = TensorSpec(name="y", datatype="FP32", shape=(-1, 2))
SMALL = Signature(inputs=(X,), outputs=(Y,), batching=True)

keys = st.sampled_from(
    [
        *("inputs", "outputs", "parameters", "id", "name", "shape", "datatype", "data", "binary_data_size"),
        *("binary_data", "binary_data_output", "timeout", "priority", "classification", "sequence_id"),
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(["x", "FP32", "BYTES"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | keys, inner, max_size=4),
    max_leaves=12,
)


def write_json(value: Any) -> bytes:
    """Also with NaN and integers beyond 64 bits, which orjson does not write."""
    with contextlib.suppress(orjson.JSONEncodeError):
        return orjson.dumps(value)
    return repr(value).encode("utf-8", "surrogatepass")


def expect_sound(decoder: V2Decoder, body: bytes, header_bytes: int | None) -> None:
    """Whatever `body` is: a Failure, or a call whose tensors have the bytes that their shapes say."""
    try:
        call = decoder.decode(body, header_bytes)
    except Failure as failure:
        assert failure.http_status in {400, 413, 501}
        return
    for spec, tensor in zip(SMALL.inputs, call.inputs, strict=True):
        assert len(bytes(tensor.data)) == tensor.size_bytes
        assert tensor.size_bytes == np.prod(tensor.shape) * ITEM_BYTES[spec.datatype]
    assert call.options.rows == call.inputs[0].shape[0] <= ROWS_MAX


@settings(deadline=None)
@given(st.binary(max_size=64), st.none() | st.integers(-4, 70))
def test_any_bytes(body: bytes, header_bytes: int | None) -> None:
    expect_sound(V2Decoder(InputPlans("m", SMALL, ROWS_MAX), JSON_BYTES_MAX), body, header_bytes)


@settings(deadline=None)
@given(json_values)
def test_any_json(value: Any) -> None:
    expect_sound(V2Decoder(InputPlans("m", SMALL, ROWS_MAX), JSON_BYTES_MAX), write_json(value), None)


@settings(deadline=None)
@given(json_values, st.sampled_from(["document", "input", "output", "parameters"]), keys)
@example(value=[[1, 2], [3, 4]], place="input", key="data")
def test_any_json_in_the_place_of_a_member(value: Any, place: str, key: str) -> None:
    tensor: dict[str, Any] = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    output: dict[str, Any] = {"name": "y", "parameters": {"binary_data": True}}
    parameters: dict[str, Any] = {}
    document: dict[str, Any] = {"inputs": [tensor], "outputs": [output], "parameters": parameters}
    {"document": document, "input": tensor, "output": output, "parameters": parameters}[place][key] = value
    expect_sound(V2Decoder(InputPlans("m", SMALL, ROWS_MAX), JSON_BYTES_MAX), write_json(document), None)


# Known envelopes are a second way to read a request. It must never lead elsewhere than the first.

HEAD = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":['
TAILS = (b"]}]}", b']}],"parameters":{"priority":1}}', b'],"parameters":{"a":"["}}]}')
PIECES = (
    *(
        b"1",
        b"-2.5",
        b"1e-3",
        b"true",
        b"false",
        b"null",
        b"NaN",
        b"1e999",
        b'"a"',
        b'"~"',
        b"[",
        b"]",
        b",",
        b"{",
        b"}",
    ),
    *(b" ", b"1,2", b"[1,2]", b"],[", b'"data":[', b'],"data":[1,2', b'"', b"\\", b":", b"]}]}", b'],"shape":[1,2'),
)
middles = st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join)


def outcome(decode: Callable[[], InferCall]) -> object:
    try:
        call = decode()
    except Failure as failure:
        return failure.code, failure.message
    return [(tensor.shape, bytes(tensor.data), tensor.size_bytes) for tensor in call.inputs], call.options


@settings(deadline=None)
@given(st.sampled_from(["1,2", "[1,2]"]), st.lists(middles, max_size=3), st.sampled_from(TAILS))
@example(good="1,2", middles=[b"true,2"], tail=TAILS[0])
@example(good="1,2", middles=[b"1,2,3"], tail=TAILS[0])
def test_a_known_json_envelope_changes_nothing(good: str, middles: list[bytes], tail: bytes) -> None:
    decoder = V2Decoder(InputPlans("m", SMALL, ROWS_MAX), JSON_BYTES_MAX)
    for middle in (good.encode(), *middles, good.encode()):
        body = HEAD + middle + tail
        fresh = V2Decoder(InputPlans("m", SMALL, ROWS_MAX), JSON_BYTES_MAX)
        assert outcome(lambda: decoder.decode(body, None)) == outcome(lambda: fresh.decode(body, None))  # noqa: B023


@settings(deadline=None)
@given(st.integers(-3, 3), st.binary(max_size=12), st.integers(0, 200), st.binary(max_size=3))
def test_a_known_binary_envelope_changes_nothing(shift: int, blob: bytes, at: int, splice: bytes) -> None:
    head = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}'
    decoder = V2Decoder(InputPlans("m", SMALL, ROWS_MAX), JSON_BYTES_MAX)
    decoder.decode(head + bytes(8), len(head))
    spliced = head[:at] + splice + head[at + len(splice) :]
    for body, header_bytes in ((head + blob, len(head) + shift), (spliced + bytes(8), len(spliced)), (head, shift)):
        fresh = V2Decoder(InputPlans("m", SMALL, ROWS_MAX), JSON_BYTES_MAX)
        assert outcome(lambda: decoder.decode(body, header_bytes)) == outcome(lambda: fresh.decode(body, header_bytes))  # noqa: B023
