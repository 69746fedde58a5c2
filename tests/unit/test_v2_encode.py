"""Replies as v2 inference responses, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest

from millstream.gateway.tensors.outputs import OutputTensor, dump_numbers
from millstream.gateway.v2.options import Options
from millstream.gateway.v2.responder import V2Encoder
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.signature import Signature, TensorSpec

START = b'{"model_name":"m","model_version":"7","outputs":['


def encoder(*datatypes: str) -> V2Encoder:
    """Outputs y0, y1, … of the datatypes."""
    specs = tuple(TensorSpec(name=f"y{index}", datatype=kind, shape=(-1,)) for index, kind in enumerate(datatypes))
    return V2Encoder("m", 7, Signature(inputs=(), outputs=specs, batching=False))


def tensor(datatype: str, values: Any, shape: tuple[int, ...] | None = None) -> OutputTensor:
    array = np.array(values, NUMPY[datatype])
    return OutputTensor(datatype, array.shape if shape is None else shape, array)


def strings(*elements: bytes) -> OutputTensor:
    return OutputTensor("BYTES", (len(elements),), list(elements))


def call(**how: Any) -> Options:
    return Options(1, **how)


@pytest.mark.parametrize(
    ("datatype", "values", "data"),
    [
        ("FP32", [[0.1, 1.0], [1e-5, 3e20]], b"[0.1,1.0,0.00001,3e+20]"),
        ("FP64", [[0.1, -0.0]], b"[0.1,-0.0]"),
        ("INT64", [[2**63 - 1]], b"[9223372036854775807]"),
        ("UINT8", [0, 255], b"[0,255]"),
        ("BOOL", [True, False], b"[true,false]"),
        ("FP32", 2.5, b"[2.5]"),
        ("INT32", np.zeros((0, 3)), b"[]"),
    ],
)
def test_json(datatype: str, values: Any, data: bytes) -> None:
    writer = encoder(datatype)
    output = tensor(datatype, values)
    shape = json.dumps(output.shape, separators=(",", ":")).encode().replace(b"(", b"[")
    expected = START + b'{"name":"y0","datatype":"%s","shape":%s,"data":%s}]}' % (datatype.encode(), shape, data)
    for _ in range(2):  # the second time from memory
        assert writer.encode(call(), [output]) == (expected, None)


def test_views_of_every_layout() -> None:
    writer = encoder("FP32")
    plain = np.arange(6, dtype="<f4").reshape(2, 3)
    unaligned = np.frombuffer(b"\0" + plain.tobytes(), "<f4", offset=1).reshape(2, 3)
    readonly = plain.copy()
    readonly.flags.writeable = False
    expected = [writer.encode(call(binary_default=binary), [tensor("FP32", plain)]) for binary in (False, True)]
    for array in (plain.T.copy().T, unaligned, readonly, np.repeat(plain, 2, axis=1)[:, ::2]):
        output = OutputTensor("FP32", (2, 3), array)
        for _ in range(2):
            assert [writer.encode(call(binary_default=binary), [output]) for binary in (False, True)] == expected


def test_nan_and_infinities_are_bare_tokens() -> None:
    writer = encoder("FP32", "FP64")
    odd = [np.nan, 1.0, np.inf, -np.inf, np.nan]
    for _ in range(2):
        body, _ = writer.encode(call(), [tensor("FP32", odd), tensor("FP64", [1.0])])
        assert b'"data":[NaN,1.0,Infinity,-Infinity,NaN]}' in body
        assert b'"data":[1.0]}' in body
        body, _ = writer.encode(call(outputs=[(0, False)]), [tensor("FP32", odd)])
        assert body.endswith(b'"data":[NaN,1.0,Infinity,-Infinity,NaN]}]}')
        body, _ = writer.encode(call(outputs=[(0, False)]), [tensor("FP32", odd[1:2] * 5)])
        assert body.endswith(b'"data":[1.0,1.0,1.0,1.0,1.0]}]}')


def test_an_id_comes_first() -> None:
    body, _ = encoder("INT8").encode(call(id='a"é'), [tensor("INT8", [1])])
    assert body.startswith('{"id":"a\\"é","model_name":"m",'.encode())
    assert list(orjson.loads(body)) == ["id", "model_name", "model_version", "outputs"]


def test_binary() -> None:
    writer = encoder("FP32")
    output = tensor("FP32", [[1.0, 2.0]])
    head = START + b'{"name":"y0","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}]}'
    for _ in range(2):
        assert writer.encode(call(binary_default=True), [output]) == (head + output.array.tobytes(), len(head))  # type: ignore[union-attr]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "BOOL"])
def test_large_binary_outputs_are_copied(datatype: str) -> None:
    output = tensor(datatype, np.arange(40_000).reshape(2, -1))
    assert isinstance(output.array, np.ndarray)
    raw = output.array.tobytes()
    writer = encoder(datatype)
    for asked in (call(binary_default=True), call(binary_default=True), call(binary_default=True, id="1")):
        body, header_bytes = writer.encode(asked, [output])
        assert type(body) is bytes
        assert body[header_bytes:] == raw
    output.array[...] = 0
    assert body[header_bytes:] == raw


def test_outputs_as_asked_json_and_binary_mixed() -> None:
    writer = encoder("FP32", "BYTES", "BF16")
    reply = [tensor("FP32", [1.0]), strings(b"a", b"\xff"), tensor("BF16", [1])]
    body, header_bytes = writer.encode(call(outputs=[(2, True), (0, False), (1, True)]), reply)
    outputs = orjson.loads(body[:header_bytes])["outputs"]
    assert [output["name"] for output in outputs] == ["y2", "y0", "y1"]
    assert [output.get("parameters") for output in outputs] == [
        {"binary_data_size": 2},
        None,
        {"binary_data_size": 11 - 1},
    ]
    assert body[header_bytes:] == b"\x01\x00" + b"\x01\x00\x00\x00a\x01\x00\x00\x00\xff"


def test_binary_outputs_of_no_bytes_make_a_plain_json_response() -> None:
    writer = encoder("FP32", "BYTES")
    for asked in (call(binary_default=True), call(outputs=[(0, True)])):
        for _ in range(2):
            body, header_bytes = writer.encode(asked, [tensor("FP32", np.zeros((0, 2))), strings()])
            assert header_bytes is None
            assert orjson.loads(body)["outputs"][0] == {
                "name": "y0",
                "datatype": "FP32",
                "shape": [0, 2],
                "parameters": {"binary_data_size": 0},
            }
    body, header_bytes = writer.encode(call(binary_default=True), [tensor("FP32", []), strings(b"a")])
    assert body[header_bytes:] == b"\x01\x00\x00\x00a"


def test_strings_as_json_are_utf8() -> None:
    writer = encoder("BYTES")
    body, _ = writer.encode(call(), [strings("é".encode(), b"", b'"')])
    assert orjson.loads(body)["outputs"][0]["data"] == ["é", "", '"']
    with pytest.raises(Failure, match="binary_data") as caught:
        writer.encode(call(), [strings(b"\xff")])
    assert caught.value.code is Code.INVALID


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_json_form(datatype: str) -> None:
    for _ in range(2):
        with pytest.raises(Failure, match=f"sending {datatype} data via JSON is not supported") as caught:
            encoder(datatype).encode(call(), [tensor(datatype, [1])])
        assert caught.value.code is Code.INVALID


def test_many_shapes_do_not_add_up() -> None:
    writer = encoder("INT8")
    for count in range(1, 600):
        for binary in (False, True):
            writer.encode(call(binary_default=binary), [tensor("INT8", [1] * count)])
    assert max(len(writer._json[0]), len(writer._binary[0])) <= 256


@pytest.mark.parametrize("shape", [(100_000,), (3, 50_000), (1, 2, 40_000), (40_000, 3), (5, 1, 1, 70_000)])
def test_large_arrays_are_written_in_pieces_as_in_one(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).random(shape, np.float32)
    assert dump_numbers(array) == orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    array.reshape(-1)[[0, 40_000, -1]] = np.nan, np.inf, -np.inf
    text = dump_numbers(array)
    assert text.count(b"NaN") == text.count(b"-Infinity") == 1
    np.testing.assert_array_equal(np.array(json.loads(text), np.float32), array)


def test_many_texts_are_written_in_pieces_as_in_one() -> None:
    texts = [b"t%d" % number for number in range(100_000)]
    body, _ = encoder("BYTES").encode(call(), [strings(*texts)])
    assert json.loads(body)["outputs"][0]["data"] == [text.decode() for text in texts]
