"""Arrays to v2 tensors and back, and the input formats of `predict`."""

from __future__ import annotations

import io
import json
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.cli.inputs import Content
from millstream.client.cli.inputs import request_from as request_from_content
from millstream.client.inference import decode_reply, random_request
from millstream.client.tensors import decode, encode
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import DATATYPES

ADDER: Any = {
    "name": "adder",
    "inputs": [
        {"name": "a", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "b", "datatype": "INT32", "shape": [-1, 3]},
    ],
}
ONE: Any = {"name": "one", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}
WORDS: Any = {"name": "words", "inputs": [{"name": "w", "datatype": "BYTES", "shape": [-1]}]}


def request_from(content, metadata, *, binary_outputs, suffix=""):
    return request_from_content(Content(content, suffix), metadata, binary_outputs=binary_outputs)


def sent(call):
    """What a call carries: arrays by name, decoded again."""
    end = call.header_bytes
    header = json.loads(call.body[:end])
    arrays = {}
    for tensor in header["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        arrays[tensor["name"]] = decode(call.body[end : end + size], tensor["datatype"], tensor["shape"])
        end += size
    assert end == len(call.body)
    return arrays


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_every_datatype_round_trips(datatype):
    array = np.array([[0, 1], [1, 0], [1, 1]])
    if datatype == "BYTES":
        array = np.array([[b"", b"\x00a"], [b"b", b"c" * 300], ["é".encode(), b"f"]], dtype=object)
    if datatype == "BOOL":
        array = array.astype(bool)
    np.testing.assert_array_equal(decode(encode(array, datatype), datatype, [3, 2]), array)
    assert decode(encode(array[:0], datatype), datatype, [0, 2]).shape == (0, 2)


@pytest.mark.parametrize(("datatype", "value"), [("FP16", 1e6), ("FP32", 1e39), ("BF16", -1e39)])
def test_a_number_beyond_the_datatype_is_refused_and_an_infinity_is_not(datatype, value):
    with pytest.raises(Failure, match=f"do not fit into {datatype}"):
        encode(np.array([1.0, value]), datatype)
    array = np.array([1.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(decode(encode(array, datatype), datatype, [4]), array)


@given(st.lists(st.floats(width=32), max_size=20))
def test_bf16_rounds_as_ml_dtypes_does(values):
    array = np.array(values, dtype=np.float32)
    with np.errstate(all="ignore"):
        expected = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(decode(encode(array, "BF16"), "BF16", [len(values)]), expected)


@pytest.mark.parametrize(
    ("values", "datatype", "says"),
    [
        ([300], "UINT8", "do not fit"),
        ([-1], "UINT64", "do not fit"),
        ([1.5], "INT32", "fractions"),
        (["a"], "FP32", "cannot be sent"),
        ([2], "BOOL", "do not fit"),
    ],
)
def test_values_that_the_datatype_cannot_represent_are_rejected(values, datatype, says):
    with pytest.raises(Failure, match=says) as failure:
        encode(np.array(values), datatype)
    assert failure.value.code is Code.INVALID


def test_a_v2_body_is_sent_unchanged():
    body = b'{"inputs": [], "id": "7"}'
    call = request_from(body, ONE, binary_outputs=True)
    assert (call.body, call.header_bytes) == (body, None)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: np.ndarray):
    file = io.BytesIO()
    np.savez(file, **cast("Any", arrays))  # typed as if an array could be named allow_pickle
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"[[1, 2, 3]]", b"[1, 2, 3]", b'{"x": [1, 2.0, 3]}', npy(np.array([1, 2, 3])), npz(x=np.array([[1.0, 2, 3]]))],
)
def test_accepted_forms_of_one_row(content):
    np.testing.assert_array_equal(
        sent(request_from(content, ONE, binary_outputs=True))["x"], np.array([[1, 2, 3]], np.float32)
    )


def test_inputs_by_name():
    arrays = sent(request_from(b'{"b": [[4, 5, 6]], "a": [[1, 2, 3]]}', ADDER, binary_outputs=False))
    assert list(arrays) == ["a", "b"]
    assert arrays["b"].dtype == np.int32


def test_missing_inputs_are_left_to_the_server():
    assert list(sent(request_from(b'{"a": [[1, 2, 3]]}', ADDER, binary_outputs=False))) == ["a"]


def test_strings():
    arrays = sent(request_from('["é", "b"]'.encode(), WORDS, binary_outputs=True))
    assert arrays["w"].tolist() == ["é".encode(), b"b"]


@pytest.mark.parametrize(
    ("content", "metadata", "says"),
    [
        (b"[[1, 2]]", ONE, r"shape \[1, 2\], but the model expects \[-1, 3\]"),
        (
            b"[[1, 2, 3], [1]]",
            ONE,
            r"lists differ in length, \[0\] is a list of 3 and \[1\] is a list of 1",
        ),
        (b'["a", "b", "c"]', ONE, r"input 'x' takes FP32 \[-1, 3\], not text"),
        (b"nonsense", ONE, "neither JSON nor"),
        (b"\x93NUMPY broken", ONE, "usable .npy"),
        (b"PK\x03\x04 broken", ONE, "usable .npy"),
        (b"[[1, 2, 3]]", ADDER, r"2 inputs: give each by its name \(a, b\)"),
        (b'{"x": [[1, 2, 3]], "y": 1}', ONE, "there is no input 'y'"),
        (npy(np.array([{"a": 1}], dtype=object)), ONE, "usable .npy"),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_rejected(content, metadata, says):
    with pytest.raises(Failure, match=says) as failure:
        request_from(content, metadata, binary_outputs=True)
    assert failure.value.code is Code.INVALID


def test_random_inputs_have_the_requested_rows():
    metadata: Any = {
        "name": "m",
        "inputs": [{"name": name, "datatype": name, "shape": [-1, 2, -1]} for name in sorted(DATATYPES)],
    }
    arrays = sent(random_request(metadata, 5, np.random.default_rng(0)))
    assert {array.shape for array in arrays.values()} == {(5, 2, 16)}
    assert set(arrays["INT64"].ravel().tolist()) == {0, 1}


def test_replies_with_json_and_binary_outputs_are_decoded():
    header = json.dumps(
        {
            "model_name": "m",
            "outputs": [
                {"name": "j", "datatype": "INT64", "shape": [2], "data": [1, 2]},
                {"name": "b", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
                {"name": "w", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
            ],
        }
    ).encode()
    content = header + np.array([0.5, 1], np.float32).tobytes() + b"\x02\x00\x00\x00hi"
    outputs = decode_reply(content, str(len(header))).outputs
    assert [array.tolist() for array in outputs.values()] == [[1, 2], [[0.5, 1.0]], [b"hi"]]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"outputs": [{"name": "a"}]}'])
def test_malformed_replies_are_rejected(content):
    with pytest.raises(Failure, match="not an inference response"):
        decode_reply(content, None)
