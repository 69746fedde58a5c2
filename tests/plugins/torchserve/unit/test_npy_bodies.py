"""Bodies in numpy's format with whatever a header may say: an array that fits, or a clean refusal."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.gateway.tensors import forms
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.nested_lists import from_array
from millstream.plugins.compat.torchserve.predictions import read as read_prediction
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import ITEM_BYTES
from millstream.services.model.signature import Signature, TensorSpec

DATATYPES = [*ITEM_BYTES, "BYTES"]
DTYPES = [
    "<f4", ">f4", "|b1", "<i8", ">i2", "|u1", "<f2", "<f8", "<f16", "<c8", "|S3", "<U2", ">U2", "|S0", "<U0", "|O",
    "|V4", "<M8[s]", "<m8", "<f3", "", "nope", "x" * 50, "(2,)<f4", "<f4,<i4", "é",
]  # fmt: skip
DIMS = st.one_of(
    st.integers(0, 5),
    st.sampled_from(
        [-1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, True, False, 1.0, "2", None, (1,), 2**4000]
    ),
)
SHAPES = st.one_of(st.lists(DIMS, max_size=5).map(tuple), st.just((1,) * 70), st.just((0,) * 40), DIMS, st.just([2, 2]))


def plans(datatype: str, rank: int) -> InputPlans:
    spec = TensorSpec(name="x", datatype=datatype, shape=(-1,) * rank)
    return InputPlans("m", Signature(inputs=(spec,), outputs=(), batching=rank > 0), 1000)


def file(header: bytes, data: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    length = struct.pack("<H" if version == (1, 0) else "<I", min(len(header), 0xFFFF))
    return b"\x93NUMPY" + bytes(version) + length + header + data


def header(descr: object, order: object, shape: object, more: str = "") -> bytes:
    return f"{{'descr': {descr!r}, 'fortran_order': {order!r}, 'shape': {shape!r}, {more}}}\n".encode(
        "latin-1", "replace"
    )


def check(body: bytes, datatype: str, rank: int) -> None:
    of = plans(datatype, rank)
    for read in (forms.reader(forms.NPY), lambda of, body: read_prediction(of, "text/plain", body)):
        try:
            inputs = read(of, body).inputs
        except Failure as failure:
            assert failure.code is Code.INVALID, failure.message
            assert len(failure.message) < 600
            continue
        tensor = inputs.tensors[0]
        assert len(tensor.shape) == rank
        if datatype in ITEM_BYTES:
            assert tensor.size_bytes == np.prod(tensor.shape, dtype=object) * ITEM_BYTES[datatype]
            data: Any = tensor.data
            assert memoryview(data).nbytes == tensor.size_bytes


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(DTYPES) | st.integers() | st.none() | st.just([("a", "<f4")]),
    st.sampled_from([True, False, 1, 0, None, "True"]),
    SHAPES,
    st.integers(0, 80),
    st.sampled_from(DATATYPES),
    st.integers(0, 4),
    st.sampled_from([(1, 0), (2, 0), (3, 0), (0, 0), (255, 255)]),
)
@example("<f4", False, (2**62, 0, 2**62), 0, "FP32", 3, (1, 0))
@example("<f4", False, (True, 2), 8, "FP32", 2, (1, 0))
@example("|b1", True, (False,), 0, "BOOL", 1, (1, 0))
@example("<f8", False, (2**63, 2**63, 0), 0, "FP64", 3, (2, 0))
@example("<U2", False, (2**62, 4), 0, "BYTES", 2, (1, 0))
@example("<f4", True, (0,) * 40, 0, "FP32", 1, (1, 0))
@example("<f4", False, 4, 16, "FP32", 1, (1, 0))
def test_headers_of_any_kind(
    descr: object, order: object, shape: object, size: int, datatype: str, rank: int, version: tuple[int, int]
) -> None:
    check(file(header(descr, order, shape), bytes(range(size)), version), datatype, rank)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120), st.binary(max_size=20), st.sampled_from([(1, 0), (2, 0)]))
@example(b"{" * 5000, b"", (1, 0))
@example(b"(" * 9000, b"", (1, 0))
@example(b"-" * 9000 + b"1", b"", (2, 0))
@example(b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 9000 + b",), }", b"", (1, 0))
@example(b"{'descr': '<f4', 'descr': '<f4'}", b"", (1, 0))
@example(b"\xff\x00", b"", (1, 0))
def test_headers_that_are_none(text: bytes, data: bytes, version: tuple[int, int]) -> None:
    check(file(text, data, version), "FP32", 2)


@pytest.mark.parametrize("datatype", ["FP32", "BOOL", "INT64", "BYTES"])
def test_any_piece_of_a_good_file(datatype: str) -> None:
    array = np.array([["a", "bc"]]) if datatype == "BYTES" else np.ones((1, 2), bool if datatype == "BOOL" else "<f4")
    stream = io.BytesIO()
    np.save(stream, np.asfortranarray(array))
    whole = stream.getvalue()
    for end in range(len(whole) + 1):
        check(whole[:end], datatype, 2)
    for at in range(min(len(whole), 130)):
        for byte in (0, 0xFF, ord("'"), ord("9")):
            check(whole[:at] + bytes([byte]) + whole[at + 1 :], datatype, 2)


def test_booleans_in_a_file_are_true_unless_they_are_zero() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([[0, 1, 2, 255]], np.uint8).view(bool))
    array = forms.array_of(stream.getvalue())
    data: Any = from_array(next(iter(plans("BOOL", 2))), array).tensor.data
    assert data.view(np.uint8).tolist() == [[0, 1, 1, 1]]
