"""Inference requests that are wrong: each is refused by a Failure that says what to mend, and by nothing else."""

from __future__ import annotations

import json
import struct
from typing import Any

import orjson
import pytest

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.v2.decode import V2Decoder, parse_header_length
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import encode_elements
from millstream.services.model.signature import Signature, TensorSpec
from tests.unit.test_v2_decode import MLP, binary, body, floats, mlp, one

GOOD = [1, 2, 3, 4]
X = {"name": "x", "datatype": "FP32"}


def compact(document: Any) -> bytes:
    """JSON with integers of any size, which orjson does not write."""
    return json.dumps(document, separators=(",", ":")).encode()


def refusal(decoder: V2Decoder, text: bytes, header_bytes: int | None = None, code: Code = Code.INVALID) -> str:
    """The message that `text` is refused with; the same by a decoder that has seen good requests."""
    messages = []
    for _ in range(2):
        with pytest.raises(Failure) as caught:
            decoder.decode(text, header_bytes)
        assert caught.value.code is code
        messages.append(caught.value.message)
        if decoder._model == "m" and next(iter(decoder._plans)).shape == (-1, 4):
            decoder.decode(body(GOOD, [1, 4]), None)
            decoder.decode(*binary(floats(*GOOD), [1, 4]))
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize(
    "text",
    [
        b"x",
        b"{",
        b"[]",
        b"3",
        b"null",
        b'"a"',
        b"\xff\xfe{\x00",
        b'{"inputs":NaN',
        b"NaN",
        b'{"inputs":"\xed\xa0\x80"}',
    ],
)
def test_not_a_json_object(text: bytes) -> None:
    assert refusal(mlp(), text).startswith("failed to parse the request JSON buffer: ")


@pytest.mark.parametrize("token", [b"1", b"NaN", b'{"a":NaN}'])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_bombs(opening: bytes, token: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    depth = 50_000
    bomb = opening * depth + token + closing * depth
    refusal(mlp(), bomb)
    refusal(mlp(), b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":' + bomb + b"}]}")


@pytest.mark.parametrize("innermost", [[1.0], [1.0, [2.0]], ["a"], [True]])
def test_data_deeper_than_a_hundred_levels(innermost: list[Any]) -> None:
    data = innermost
    for _ in range(100):
        data = [data]
    assert "nested deeper than 100 levels" in refusal(one("FP32", (-1,)), body(data, [len(innermost)]))


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ({}, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, "Unable to parse 'inputs'"),
        ({"inputs": [[]]}, "Unable to parse 'inputs'"),
        ({"inputs": [{}]}, "Unable to parse 'name'"),
        ({"inputs": [{"name": []}]}, "Unable to parse 'name'"),
        (
            {"inputs": []},
            (
                "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], "
                "but missing required input(s) ['x']. Please provide all required input(s)."
            ),
        ),
        ({"inputs": [{"name": "Q"}]}, "unexpected inference input 'Q' for model 'm'"),
        ({"inputs": [{"name": "x"}]}, "Unable to parse 'datatype'"),
        ({"inputs": [{"name": "x", "datatype": 3}]}, "Unable to parse 'datatype'"),
        ({"inputs": [{"name": "x", "datatype": "FP33"}]}, "invalid datatype for input x"),
        (
            {"inputs": [{"name": "x", "datatype": "INT32"}]},
            "inference input 'x' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        ({"inputs": [{"name": "x", "datatype": "FP32"}]}, "Unable to parse 'shape'"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": "ab"}]}, "Unable to parse 'shape'"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]}, "But no field was set for input 'x'"),
        (
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": []}]},
            "Unable to parse 'parameters'",
        ),
    ],
)
def test_documents_that_lack_something(document: dict[str, Any], part: str) -> None:
    assert part in refusal(mlp(), orjson.dumps(document))


@pytest.mark.parametrize("shape", [[True, 4], [1.0, 4], [-1, 4], ["1", 4], [None, 4], [[1], 4], [{}, 4]])
def test_dimensions_are_whole_numbers(shape: list[Any]) -> None:
    assert refusal(mlp(), body(GOOD, shape)).startswith(
        "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
    )


@pytest.mark.parametrize("shape", [[4], [1, 3], [1, 4, 1], []])
def test_shapes_that_the_signature_does_not_have(shape: list[int]) -> None:
    got = str(shape).replace(" ", "")
    expected = f"unexpected shape for input 'x' for model 'm'. Expected [-1,4], got {got}."
    assert refusal(mlp(), body(GOOD, shape)) == expected


def test_sizes_that_overflow() -> None:
    for shape in ([2**32, 2**32], [2**63 - 1, 2], [0, 2**63], [0, 2**62, 2**62]):
        message = refusal(one("FP32", (-1,) * len(shape)), body([], shape))
        assert "causes total element count to exceed maximum size of 9223372036854775807" in message
    assert "unsigned-integer" in refusal(one("FP32", (-1,)), compact({"inputs": [{**X, "shape": [2**70]}]}))
    assert "byte size overflow" in refusal(one("FP64", (-1,)), body([1], [2**61], "FP64"))
    assert "got 1" in refusal(one("FP64", (-1,)), body([1], [2**59], "FP64"))


def test_rows_beyond_the_limit() -> None:
    assert refusal(mlp(), body([0] * 36, [9, 4])) == "inference request batch-size must be <= 8 for 'm'"


def test_inputs_must_agree_on_rows_and_come_once() -> None:
    specs = tuple(TensorSpec(name=name, datatype="INT8", shape=(-1,)) for name in "ab")
    decoder = V2Decoder(InputPlans("two", Signature(inputs=specs, outputs=(), batching=True), 8), 1 << 20)
    items = [
        {"name": "a", "datatype": "INT8", "shape": [1], "data": [1]},
        {"name": "b", "datatype": "INT8", "shape": [2], "data": [1, 2]},
    ]
    message = refusal(decoder, orjson.dumps({"inputs": items}))
    assert message == "input 'b' batch size does not match other inputs for 'two'"
    message = refusal(decoder, orjson.dumps({"inputs": [items[0], items[0]]}))
    assert message == "input 'a' already exists in request"


WRONG_ELEMENTS: dict[str, list[Any]] = {
    "FP32": [True, False, "1", {}, {"e": 1}],
    "FP64": [True, "NaN"],
    "INT32": [True, 1.0, 1.5, "1", None, 2**31, -(2**31) - 1, 2**70],
    "UINT8": [-1, 256, False],
    "INT64": [2**63, 1e3],
    "BOOL": [0, 1, "true", None],
    "BYTES": [1, None, True, {}],
}


@pytest.mark.parametrize(
    ("datatype", "element"), [(kind, element) for kind, elements in WRONG_ELEMENTS.items() for element in elements]
)
@pytest.mark.parametrize("place", [0, 1])
def test_elements_of_another_type_or_out_of_range(datatype: str, element: Any, place: int) -> None:
    good: dict[str, Any] = {"BOOL": True, "BYTES": "a"}
    data = [good.get(datatype, 7)] * 2
    decoder = one(datatype, (-1,))
    decoder.decode(body(data, [2], datatype), None)
    data[place] = element
    document = {"inputs": [{"name": "x", "shape": [2], "datatype": datatype, "data": data}]}
    for text in (compact(document), compact({"id": "no known envelope", **document})):
        message = refusal(decoder, text)
        assert message.startswith("Unable to parse 'data': ")
        assert "'x'" in message
        assert "out of the range" in message or f"element {place}" in message


@pytest.mark.parametrize("data", [[1, 2, 3], [1, 2, 3, 4, 5], [], [[]], [[1, 2], [3]]])
def test_more_or_fewer_elements_than_the_shape(data: list[Any]) -> None:
    message = refusal(mlp(), body(data, [1, 4]))
    assert message.startswith("Unable to parse 'data': Shape does not match true shape of 'data' field for input 'x'")


@pytest.mark.parametrize("data", [1, "1234", None, {"0": 1}, True])
def test_data_must_be_an_array(data: Any) -> None:
    assert refusal(mlp(), body(data, [1, 4])).startswith("Unable to parse 'data'")


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_json_form(datatype: str) -> None:
    assert refusal(one(datatype, (-1,)), body([1], [1], datatype)) == (
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input x"
    )


def test_lone_surrogates() -> None:
    text = b'{"n":NaN,"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}'
    assert "not valid Unicode" in refusal(one("BYTES", (-1,)), text)
    text = b'{"n":NaN,"id":"\\ud800","inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["a"]}]}'
    assert "not valid Unicode" in refusal(one("BYTES", (-1,)), text)
    assert "unexpected inference input" in refusal(mlp(), b'{"n":NaN,"inputs":[{"name":"\\udfff"}]}')


def item(**how: Any) -> bytes:
    return orjson.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", **how}]})


def test_exactly_one_form_of_data() -> None:
    both = item(data=GOOD, parameters={"binary_data_size": 16})
    assert "But multiple fields were set for input 'x'" in refusal(mlp(), both)
    assert "But no field was set for input 'x'" in refusal(mlp(), item(parameters={"other": 1}))


REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 16}


def test_shared_memory_of_clients_is_not_offered() -> None:
    assert "shared memory" in refusal(mlp(), item(parameters=REGION), code=Code.UNSUPPORTED)


def asking(**parameters: Any) -> bytes:
    return body(GOOD, [1, 4], outputs=[{"name": "y", "parameters": parameters}])


def test_shared_memory_for_outputs_is_not_offered() -> None:
    assert "shared memory" in refusal(mlp(), asking(**REGION), code=Code.UNSUPPORTED)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"classification": -1}, "'classification'"),
        ({"classification": "2"}, "'classification'"),
        ({"classification": 2, **REGION}, "can't be used with classification"),
        ({"shared_memory_region": 5}, "'shared_memory_region'"),
        ({"shared_memory_region": "r"}, "'shared_memory_byte_size'"),
        ({**REGION, "shared_memory_offset": -1}, "'shared_memory_offset'"),
        ({**REGION, "shared_memory_offset": 2**63}, "Invalid offset + byte size"),
    ],
)
def test_what_is_asked_of_an_output_is_checked(parameters: dict[str, Any], words: str) -> None:
    assert words in refusal(mlp(), asking(**parameters))


@pytest.mark.parametrize("parameters", [{"sequence_id": 5}, {"sequence_id": "a"}, {"sequence_start": True}])
def test_sequences_are_not_offered(parameters: dict[str, Any]) -> None:
    assert "sequence" in refusal(mlp(), body(GOOD, [1, 4], parameters=parameters), code=Code.UNSUPPORTED)


@pytest.mark.parametrize("size", [-1, True, 1.5, "16", None, [], 2**64])
def test_binary_sizes_are_whole_numbers(size: Any) -> None:
    text = compact({"inputs": [{**X, "shape": [1, 4], "parameters": {"binary_data_size": size}}]})
    assert "Unable to parse 'binary_data_size'" in refusal(mlp(), text + bytes(16), len(text))


def test_binary_parts_that_are_short_long_or_of_another_size() -> None:
    text, header_bytes = binary(floats(*GOOD), [1, 4])
    decoder = mlp()
    decoder.decode(text, header_bytes)
    expected = "unexpected size for input 'x', expecting 12 additional bytes for model 'm'"
    assert refusal(decoder, text[:-12], header_bytes) == expected
    assert refusal(decoder, text + b"!", header_bytes) == "unexpected additional input data for model 'm'"
    short, header_bytes = binary(bytes(4), [1, 4])
    expected = "input byte size mismatch for input 'x' for model 'm'. Expected 16, got 4"
    assert refusal(decoder, short, header_bytes) == expected
    assert "expecting 16 additional bytes" in refusal(decoder, text[: len(text) - 16])


@pytest.mark.parametrize(
    "blob",
    [b"", b"\x01\x00\x00", encode_elements([b"a"]), encode_elements([b"a", b"b", b"c"]), b"\xff" * 8, bytes(9)],
)
def test_binary_strings_whose_lengths_lead_elsewhere(blob: bytes) -> None:
    text, header_bytes = binary(blob, [2], "BYTES")
    assert "for input 'x'" in refusal(one("BYTES", (-1,)), text, header_bytes)


def test_a_huge_count_of_binary_strings_is_refused_at_once() -> None:
    text, header_bytes = binary(b"", [2**60], "BYTES")
    refusal(one("BYTES", (-1,)), text, header_bytes)


@pytest.mark.parametrize("value", [b"", b"x", b"1.5", b"1_0", b"+1", b"--1", b"0x10", b"1" * 30, b"1" * 5000, b"\xff"])
def test_header_lengths_that_are_not_numbers(value: bytes) -> None:
    with pytest.raises(Failure) as caught:
        parse_header_length(value)
    assert caught.value.code is Code.INVALID


def test_header_lengths_out_of_range() -> None:
    text, header_bytes = binary(floats(*GOOD), [1, 4])
    for wrong in (-5, len(text) + 1, 10**18):
        expected = f"inference header size should be in range (0, {len(text)}), got: {wrong}"
        assert refusal(mlp(), text, wrong) == expected
    assert parse_header_length(b"-5") == -5
    for wrong in (header_bytes - 1, header_bytes + 1, 1, len(text)):
        refusal(mlp(), text, wrong)


def test_a_negative_header_length_does_not_find_a_known_envelope() -> None:
    text, header_bytes = binary(b"", [0])
    decoder = one("FP32", (-1,))
    decoder.decode(text, header_bytes)
    assert "should be in range" in refusal(decoder, text, header_bytes + 1)
    text, header_bytes = binary(bytes(8), [2])
    decoder.decode(text, header_bytes)
    assert "should be in range" in refusal(decoder, text, -8)


def test_raw_requests_that_cannot_be_deduced() -> None:
    specs = tuple(TensorSpec(name=name, datatype="INT8", shape=(-1,)) for name in "abc")
    three = V2Decoder(InputPlans("three", Signature(inputs=specs, outputs=(), batching=True), 8), 1 << 20)
    assert "Raw request must only have 1 input (found 1) to be deduced but got 3 inputs in" in refusal(three, b"", None)
    message = refusal(one("BYTES", (-1, 2), batching=True), b"a", 0)
    assert message.startswith("For BYTE datatype raw input 'x', the model must have input shape [1]")
    message = refusal(one("FP32", (-1, -1)), b"abcd", 0)
    assert "can not be deduced because there are more than one variable-sized dimension" in message
    assert "input byte size mismatch" in refusal(one("FP32", (-1, -1), batching=True), b"abcde", 0)
    assert "input byte size mismatch" in refusal(mlp(), b"abcd", 0)
    assert "input byte size mismatch" in refusal(one("FP32", (-1, 0)), b"abcd", 0)


def test_the_json_part_has_a_limit() -> None:
    decoder = V2Decoder(InputPlans("small", MLP, 8), 100)
    text, header_bytes = binary(floats(*GOOD), [1, 4], note="n" * 100)
    assert "100 bytes" in refusal(decoder, text, header_bytes, Code.TOO_LARGE)
    assert "100 bytes" in refusal(decoder, body(GOOD, [1, 4], note="n" * 100), code=Code.TOO_LARGE)


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"id": 5}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"id": "n" * 5000}, "longer than"),
        ({"parameters": []}, "Unable to parse 'parameters'"),
        ({"parameters": {"timeout": -1}}, "Unable to parse 'timeout'"),
        ({"parameters": {"timeout": True}}, "Unable to parse 'timeout'"),
        ({"parameters": {"timeout": 1.5}}, "Unable to parse 'timeout'"),
        ({"parameters": {"priority": "1"}}, "Unable to parse 'priority'"),
        ({"parameters": {"binary_data_output": 1}}, "Unable to parse 'binary_data_output'"),
        ({"parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_' are reserved"),
        ({"parameters": {"a": []}}, "parameter 'a' must be"),
        ({"parameters": {"a": {}}}, "parameter 'a' must be"),
        ({"outputs": {}}, "Unable to parse 'outputs'"),
        ({"outputs": 0}, "Unable to parse 'outputs'"),
        ({"outputs": ["y"]}, "Unable to parse 'outputs'"),
        ({"outputs": [{}]}, "Unable to parse 'name'"),
        ({"outputs": [{"name": 1}]}, "Unable to parse 'name'"),
        ({"outputs": [{"name": "ZZ"}]}, "unexpected inference output 'ZZ' for model 'm'"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "output 'y' already exists in request"),
        ({"outputs": [{"name": "y", "parameters": 1}]}, "Unable to parse 'parameters'"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "Unable to parse 'binary_data'"),
    ],
)
def test_options_of_the_wrong_type(extra: dict[str, Any], part: str) -> None:
    assert part in refusal(mlp(), body(GOOD, [1, 4], **extra))


def test_a_timeout_beyond_any_number() -> None:
    text = body(GOOD, [1, 4])[:-1] + b',"n":NaN,"parameters":{"timeout":1' + b"0" * 400 + b"}}"
    assert "Unable to parse 'timeout'" in refusal(mlp(), text)


def test_messages_do_not_repeat_a_request_at_length() -> None:
    text = orjson.dumps({"inputs": [{"name": "n" * 100_000}]})
    assert len(refusal(mlp(), text)) < 500
    assert len(refusal(mlp(), body(GOOD, [1] * 10_000))) < 500


def test_of_a_repeated_key_the_last_counts() -> None:
    prefix = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":["no"],"data":['
    assert bytes(mlp().decode(prefix + b"1,2,3,4]}]}", None).inputs[0].data) == struct.pack("<4f", *GOOD)
    assert "non-number" in refusal(mlp(), prefix + b'1,2,3,4],"data":[1,2,3,true]}]}')
