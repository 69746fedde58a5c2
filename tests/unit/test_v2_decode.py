"""Inference requests that are right: what they decode to."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import orjson
import pytest

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import VIEW_BYTES_MIN
from millstream.gateway.v2.decode import V2Decoder, parse_header_length
from millstream.gateway.v2.options import InferCall
from millstream.services.model.signature import Signature, TensorSpec

MLP = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(
        TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),
        TensorSpec(name="label", datatype="INT64", shape=(-1,)),
    ),
    batching=True,
)


def one(datatype: str, shape: tuple[int, ...], *, batching: bool = False) -> V2Decoder:
    """A decoder of a version with one input, x."""
    spec = TensorSpec(name="x", datatype=datatype, shape=shape)
    return V2Decoder(InputPlans("m", Signature(inputs=(spec,), outputs=MLP.outputs, batching=batching), 8), 1 << 20)


def mlp() -> V2Decoder:
    return V2Decoder(InputPlans("m", MLP, 8), 1 << 20)


def body(data: Any, shape: list[int], datatype: str = "FP32", **extra: Any) -> bytes:
    return orjson.dumps({"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "data": data}], **extra})


def binary(blob: bytes, shape: list[int], datatype: str = "FP32", **extra: Any) -> tuple[bytes, int]:
    parameters = {"binary_data_size": len(blob)}
    head = orjson.dumps(
        {"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "parameters": parameters}], **extra}
    )
    return head + blob, len(head)


def raw(call: InferCall, index: int = 0) -> bytes:
    return bytes(call.inputs[index].data)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize("data", [[1.5, 2, -3, 0.25], [[1.5, 2, -3, 0.25]], [[[1.5], [2]], [[-3], [0.25]]]])
def test_flat_and_nested_data_give_the_same_tensor(data: list[Any]) -> None:
    decoder = mlp()
    for _ in range(2):  # the second time its envelope is known
        call = decoder.decode(body(data, [1, 4]), None)
        assert raw(call) == floats(1.5, 2, -3, 0.25)
        assert call.inputs[0].shape == (1, 4)
        assert call.inputs[0].size_bytes == 16
        assert (call.options.rows, call.options.id, call.options.outputs, call.options.binary_default) == (
            1,
            "",
            None,
            False,
        )
        assert (call.options.timeout_s, call.options.priority) == (None, 0)


def test_unevenly_nested_data_is_read_in_order() -> None:
    assert raw(mlp().decode(body([1, [2, [3]], [[[4]]]], [1, 4]), None)) == floats(1, 2, 3, 4)


def test_a_known_envelope_takes_other_numbers() -> None:
    decoder = mlp()
    decoder.decode(body([1, 2, 3, 4], [1, 4]), None)
    assert raw(decoder.decode(body([5, 6, 7.5, -1e-9], [1, 4]), None)) == floats(5, 6, 7.5, -1e-9)


def test_rows_are_the_first_dimension_when_the_version_batches() -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    call = mlp().decode(body(rows, [3, 4]), None)
    assert call.options.rows == 3
    assert raw(call) == floats(*range(1, 13))
    assert one("FP32", (3, 4)).decode(body(rows, [3, 4]), None).options.rows == 1


def test_a_large_binary_tensor_is_a_view_on_the_body() -> None:
    blob = floats(*range(VIEW_BYTES_MIN // 4))
    text, header_bytes = binary(blob, [VIEW_BYTES_MIN // 4])
    decoder = one("FP32", (-1,))
    for _ in range(2):
        call = decoder.decode(text, header_bytes)
        data = call.inputs[0].data
        assert isinstance(data, memoryview)
        assert data.obj is text
        assert bytes(data) == blob


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_like_body(kind: type) -> None:
    decoder = mlp()
    text, header_bytes = binary(floats(1, 2, 3, 4), [1, 4])
    for _ in range(2):
        assert raw(decoder.decode(kind(text), header_bytes)) == floats(1, 2, 3, 4)
        assert raw(decoder.decode(kind(body([1, 2, 3, 4], [1, 4])), None)) == floats(1, 2, 3, 4)


def test_inputs_come_in_the_signatures_order_json_and_binary_mixed() -> None:
    names = ("a", "b", "c")
    specs = tuple(TensorSpec(name=name, datatype="INT32", shape=(-1,)) for name in names)
    decoder = V2Decoder(InputPlans("m", Signature(inputs=specs, outputs=(), batching=True), 8), 1 << 20)

    def item(name: str, **how: Any) -> dict[str, Any]:
        return {"name": name, "shape": [2], "datatype": "INT32", **how}

    sized = {"parameters": {"binary_data_size": 8}}
    mixed = orjson.dumps({"inputs": [item("c", **sized), item("b", data=[3, 4]), item("a", **sized)]})
    call = decoder.decode(mixed + struct.pack("<4i", 5, 6, 1, 2), len(mixed))
    assert [struct.unpack("<2i", raw(call, index)) for index in range(3)] == [(1, 2), (3, 4), (5, 6)]

    all_binary = orjson.dumps({"inputs": [item("c", **sized), item("a", **sized), item("b", **sized)]})
    for _ in range(2):
        call = decoder.decode(all_binary + struct.pack("<6i", 5, 6, 1, 2, 3, 4), len(all_binary))
        assert [struct.unpack("<2i", raw(call, index)) for index in range(3)] == [(1, 2), (3, 4), (5, 6)]


def test_options() -> None:
    parameters = {
        "timeout": 2_500_000,
        "priority": 3,
        "binary_data_output": True,
        "note": "x",
        "n": 1,
        "sequence_id": 0,
    }
    call = mlp().decode(body([1, 2, 3, 4], [1, 4], id="é-1", parameters=parameters, outputs=[]), None)
    assert (call.options.id, call.options.timeout_s, call.options.priority, call.options.binary_default) == (
        "é-1",
        2.5,
        3,
        True,
    )
    assert call.options.outputs is None


def test_outputs_in_the_asked_order_are_json_unless_they_say_so() -> None:
    asked = [{"name": "label", "parameters": {"binary_data": True}}, {"name": "y"}]
    call = mlp().decode(body([1, 2, 3, 4], [1, 4], outputs=asked, parameters={"binary_data_output": True}), None)
    assert call.options.outputs == [(1, True), (0, False)]


def test_null_members_count_as_not_given() -> None:
    call = mlp().decode(body([1, 2, 3, 4], [1, 4], id=None, parameters=None, outputs=None), None)
    assert (call.options.id, call.options.outputs) == ("", None)


@pytest.mark.parametrize("prefix", [b'{"n":NaN,', b"{"])
def test_nan_infinities_and_what_is_beyond_a_double(prefix: bytes) -> None:
    numbers = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e300", b"1" + b"0" * 400, b"-1" + b"0" * 400]
    text = prefix + b'"inputs":[{"name":"x","shape":[7],"datatype":"FP32","data":[' + b",".join(numbers) + b"]}]}"
    values = struct.unpack("<7f", raw(one("FP32", (-1,)).decode(text, None)))
    np.testing.assert_array_equal(values, [np.nan, np.inf, -np.inf, np.inf, -np.inf, np.inf, -np.inf])


@pytest.mark.parametrize(
    ("datatype", "data", "expected"),
    [
        ("BOOL", [True, False], b"\x01\x00"),
        ("UINT8", [0, 255], b"\x00\xff"),
        ("INT8", [-128, 127], b"\x80\x7f"),
        ("UINT64", [0, 2**64 - 1], struct.pack("<2Q", 0, 2**64 - 1)),
        ("INT64", [-(2**63), 2**63 - 1], struct.pack("<2q", -(2**63), 2**63 - 1)),
        ("FP64", [0.1, 3], struct.pack("<2d", 0.1, 3)),
        ("BYTES", ["é", ""], b"\x02\x00\x00\x00\xc3\xa9\x00\x00\x00\x00"),
    ],
)
def test_json_elements_of_each_kind(datatype: str, data: list[Any], expected: bytes) -> None:
    decoder = one(datatype, (-1,))
    for _ in range(2):
        call = decoder.decode(body(data, [2], datatype), None)
        assert raw(call) == expected
        assert call.inputs[0].size_bytes == len(expected)


@pytest.mark.parametrize("datatype", ["FP32", "BOOL", "BYTES", "INT8"])
def test_zero_size_tensors(datatype: str) -> None:
    decoder = one(datatype, (-1, 3))
    for _ in range(2):
        call = decoder.decode(body([], [0, 3], datatype), None)
        assert (call.inputs[0].shape, raw(call)) == ((0, 3), b"")
        text, header_bytes = binary(b"", [0, 3], datatype)
        assert raw(decoder.decode(text, header_bytes)) == b""
        assert raw(decoder.decode(text, None)) == b""


def test_a_scalar_input_has_one_element() -> None:
    assert raw(one("FP32", ()).decode(body([2.5], []), None)) == floats(2.5)


def test_nesting_up_to_a_hundred_levels() -> None:
    data: Any = 1.0
    for _ in range(100):
        data = [data]
    assert raw(one("FP32", (1,)).decode(body(data, [1]), None)) == floats(1)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_in_binary_form(datatype: str) -> None:
    text, header_bytes = binary(b"\x00\x3c\x00\x40", [2], datatype)
    assert raw(one(datatype, (-1,)).decode(text, header_bytes)) == b"\x00\x3c\x00\x40"


def test_binary_strings_and_booleans() -> None:
    strings = b"\x02\x00\x00\x00\xff\x00\x00\x00\x00\x00"
    text, header_bytes = binary(strings, [2], "BYTES")
    assert raw(one("BYTES", (-1,)).decode(text, header_bytes)) == strings
    text, header_bytes = binary(b"\x01\x00", [2], "BOOL")
    assert raw(one("BOOL", (-1,)).decode(text, header_bytes)) == b"\x01\x00"


@pytest.mark.parametrize(("shape", "deduced"), [((-1, 4), (1, 4)), ((-1, -1, 2), (1, 2, 2))])
def test_a_raw_request_is_one_row_of_the_one_input(shape: tuple[int, ...], deduced: tuple[int, ...]) -> None:
    call = one("FP32", shape, batching=True).decode(floats(1, 2, 3, 4), 0)
    assert (call.inputs[0].shape, call.options.rows, raw(call)) == (deduced, 1, floats(1, 2, 3, 4))
    assert call.options.outputs is None
    assert call.options.binary_default


def test_a_raw_string_request_and_an_empty_body() -> None:
    decoder = one("BYTES", (-1, 1), batching=True)
    assert raw(decoder.decode(b"hello", 0)) == b"\x05\x00\x00\x00hello"
    assert raw(decoder.decode(b"", None)) == b"\x00\x00\x00\x00"
    call = one("FP32", (-1, -1), batching=True).decode(b"", None)
    assert (call.inputs[0].shape, raw(call)) == ((1, 0), b"")


def test_many_envelopes_do_not_add_up() -> None:
    decoder = one("FP32", (-1,))
    for count in range(1, 600):
        text, header_bytes = binary(bytes(4 * count), [count])
        assert decoder.decode(body([0.5] * count, [count]), None).inputs[0].shape == (count,)
        assert decoder.decode(text, header_bytes).inputs[0].size_bytes == 4 * count
    assert max(len(decoder._json), len(decoder._binary)) <= 256


def test_parse_header_length() -> None:
    assert parse_header_length(None) is None
    assert parse_header_length(b" 123 ") == 123
    assert parse_header_length(b"0") == 0


@pytest.mark.parametrize("size", [3, 300, 70_000])
def test_binary_booleans_are_true_unless_they_are_zero(size: int) -> None:
    given = bytes(range(256)) * (size // 256 + 1)
    decoder = one("BOOL", (-1,))
    text, header_bytes = binary(given[:size], [size], "BOOL")
    for _ in range(2):
        assert raw(decoder.decode(text, header_bytes)) == bytes(byte != 0 for byte in given[:size])
    assert raw(decoder.decode(given[:size], 0)) == bytes(byte != 0 for byte in given[:size])
