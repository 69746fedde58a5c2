"""Nested lists and numpy arrays <-> tensors of a signature."""

from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, join
from millstream.gateway.tensors.inputs import InputPlan
from millstream.gateway.tensors.nested_lists import from_array, from_lists, row_of_lists
from millstream.gateway.tensors.outputs import OutputTensor, own_copies, rows_of, text_of
from millstream.services.errors import Failure
from millstream.services.model.datatypes import NUMPY, decode_elements
from millstream.services.model.signature import Signature, TensorSpec


def plans(*inputs: tuple[str, str, tuple[int, ...]]) -> InputPlans:
    specs = tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs)
    return InputPlans("m", Signature(inputs=specs, outputs=(), batching=True), 8)


def plan(datatype: str, shape: tuple[int, ...]) -> InputPlan:
    return plans(("x", datatype, shape)).named("x")


def array(found: CheckedInput, datatype: str) -> np.ndarray[Any, Any]:
    data = found.tensor.data
    raw = data.tobytes() if isinstance(data, np.ndarray) else bytes(data)
    assert found.tensor.size_bytes == len(raw)
    dtype = ml_dtypes.bfloat16 if datatype == "BF16" else NUMPY[datatype]
    return np.frombuffer(raw, dtype).reshape(found.tensor.shape)


@pytest.mark.parametrize("datatype", sorted(NUMPY))
def test_numbers_of_every_datatype(datatype: str) -> None:
    value: Any = [[True, False], [False, True]] if datatype == "BOOL" else [[1, 0], [0, 100]]
    found = from_lists(plan(datatype, (-1, 2)), value)
    assert found.extent.rows == 2
    assert array(found, datatype).tolist() == value
    given = np.array(value, np.bool_ if datatype == "BOOL" else np.int64)
    assert array(from_array(plan(datatype, (-1, 2)), given), datatype).tolist() == value


@pytest.mark.parametrize(
    ("datatype", "low", "high"),
    [("INT8", -128, 127), ("UINT8", 0, 255), ("INT64", -(2**63), 2**63 - 1), ("UINT64", 0, 2**64 - 1)],
)
def test_integers_have_a_range(datatype: str, low: int, high: int) -> None:
    assert array(from_lists(plan(datatype, (-1,)), [low, high]), datatype).tolist() == [low, high]
    for value in (low - 1, high + 1):
        with pytest.raises(Failure, match=f"out of the range of {datatype}"):
            from_lists(plan(datatype, (-1,)), [value])
    if datatype.endswith("8"):
        with pytest.raises(Failure, match=f"out of the range of {datatype}"):
            from_array(plan(datatype, (-1,)), np.array([high + 1]))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (-1, 1, 1)])
@pytest.mark.parametrize("value", [[2, 3], [[2], [3]], [[[2]], [[3]]]])
def test_a_row_of_one_element_may_stand_alone_or_in_lists(shape: tuple[int, ...], value: Any) -> None:
    for read in (from_lists, row_of_lists):
        found = read(plan("INT64", shape), value)
        assert found.tensor.shape == (2, *shape[1:])
        assert array(found, "INT64").reshape(-1).tolist() == [2, 3]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_null_is_the_nan_of_floats(datatype: str) -> None:
    found = array(from_lists(plan(datatype, (-1, 2)), [[1, None], [None, 4]]), datatype).astype(float)
    np.testing.assert_array_equal(found, [[1, math.nan], [math.nan, 4]])


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_floats_keep_what_is_not_finite(datatype: str) -> None:
    found = array(from_lists(plan(datatype, (-1,)), [math.nan, math.inf, -math.inf, 0.5]), datatype).astype(float)
    assert math.isnan(found[0])
    assert found[1:].tolist() == [math.inf, -math.inf, 0.5]


def test_bf16_rounds_to_the_nearest() -> None:
    values = np.random.default_rng(5).standard_normal(1000)
    expected = values.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert array(from_lists(plan("BF16", (-1, -1)), [values.tolist()]), "BF16")[0].tolist() == expected.tolist()
    output = OutputTensor("BF16", (1000,), expected.view(np.uint16))
    assert np.array(json.loads(text_of(output)), np.float32).tolist() == expected.astype(np.float32).tolist()


def test_strings_are_text_or_base64() -> None:
    found = from_lists(plan("BYTES", (-1, 2)), [["é", {"b64": "AP8="}], ["", {"b64": ""}]])
    assert decode_elements(bytes(found.tensor.data)) == ["é".encode(), b"\x00\xff", b"", b""]
    array_found = from_array(plan("BYTES", (-1,)), np.array(["a", "bc"]))
    assert decode_elements(bytes(array_found.tensor.data)) == [b"a", b"bc"]


@pytest.mark.parametrize(
    ("datatype", "shape", "value", "error"),
    [
        ("FP32", (-1, 2), [[1, 2], [3]], r"input 'x' at \[1\]: a list of 1 where its neighbours have 2"),
        ("FP32", (-1, 2), [[1, 2], 3], r"input 'x' at \[1\]: a list is expected"),
        ("FP32", (-1, 2), [[[1], [2]], [[3], 4]], r"input 'x' at \[1\]\[1\]: a list is expected"),
        ("FP32", (-1,), [1, [2]], r"input 'x' at \[1\]: no list is expected"),
        ("FP32", (-1, 2), [[1, 2], [3, "4"]], r"input 'x' at \[1\]\[1\]: a string where FP32"),
        ("FP32", (-1,), [1, True], r"at \[1\]: a boolean where FP32"),
        ("INT64", (-1, 2), [[1, 2], [3, None]], r"input 'x' at \[1\]\[1\]: null where INT64"),
        ("BOOL", (-1,), [None], r"at \[0\]: null where BOOL"),
        ("BYTES", (-1,), ["a", None], r"at \[1\]: null where a string or"),
        ("FP32", (-1, -1), [1, 2], r"Expected \[-1,-1\], got \[2\]"),
        ("FP32", (-1, 1), [[1, 2]], r"Expected \[-1,1\], got \[1,2\]"),
        ("FP32", (-1,), [[1, 2]], r"Expected \[-1\], got \[1,2\]"),
        ("INT32", (-1,), [1, 1.0], r"at \[1\]: a number with a fraction where INT32"),
        ("INT32", (-1,), [True], r"at \[0\]: a boolean where INT32"),
        ("BOOL", (-1,), [1], r"at \[0\]: an integer where BOOL"),
        ("BYTES", (-1,), [1], r"at \[0\]: an integer where a string or"),
        ("BYTES", (-1,), [{"b64": "%"}], r"at \[0\]: the string is not base64"),
        ("BYTES", (-1,), [{"b64": "é"}], r"at \[0\]: the string is not base64"),
        ("BYTES", (-1,), [{"b64": 1}], r"at \[0\]: an object where a string or"),
        ("BYTES", (-1,), ["\ud800"], r"at \[0\]: the string is not valid Unicode"),
        ("FP32", (-1, 2), [[1, 2, 3]], r"Expected \[-1,2\], got \[1,3\]"),
        ("FP32", (-1, 2), [1, 2], r"Expected \[-1,2\], got \[2\]"),
        ("FP32", (-1, 2), 1, r"Expected \[-1,2\], got \[\]"),
        ("FP32", (-1, 1), [[1]] * 9, "batch-size must be <= 8"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(
    datatype: str, shape: tuple[int, ...], value: Any, error: str
) -> None:
    with pytest.raises(Failure, match=error):
        from_lists(plan(datatype, shape), value)


def test_depth_is_bounded() -> None:
    value: Any = 1
    for _ in range(500):
        value = [value]
    with pytest.raises(Failure, match="nested deeper than 100 levels"):
        from_lists(plan("FP32", (-1,)), value)


def test_an_empty_list_has_no_rows() -> None:
    assert from_lists(plan("FP32", (-1, 2)), []).tensor.shape == (0, 2)
    assert from_lists(plan("FP32", (-1, -1)), [[], []]).tensor.shape == (2, 0)


def test_a_single_value_becomes_a_row() -> None:
    assert row_of_lists(plan("FP32", (-1, 1)), 3).tensor.shape == (1, 1)
    assert row_of_lists(plan("FP32", (-1, 2)), [3, 4]).tensor.shape == (1, 2)
    assert row_of_lists(plan("FP32", (-1, 2)), [[3, 4], [5, 6]]).tensor.shape == (2, 2)
    with pytest.raises(Failure, match="unexpected shape"):
        row_of_lists(plan("FP32", (-1, 2)), 3)


@pytest.mark.parametrize(
    ("datatype", "given"),
    [
        ("INT32", np.array([1.0])),
        ("FP32", np.array(["a"])),
        ("FP32", np.array([True])),
        ("BOOL", np.array([1])),
        ("FP32", np.array([1j])),
        ("BYTES", np.array([1])),
    ],
)
def test_arrays_of_another_kind_are_refused(datatype: str, given: np.ndarray[Any, Any]) -> None:
    with pytest.raises(Failure, match="but the array holds"):
        from_array(plan(datatype, (-1,)), given)


def test_inputs_are_joined_in_the_order_of_the_signature() -> None:
    both = plans(("a", "FP32", (-1, 1)), ("b", "INT32", (-1,)))
    found = {"b": from_lists(both.named("b"), [1, 2]), "a": from_lists(both.named("a"), [[1], [2]])}
    inputs = join(both, found)
    assert [tensor.shape for tensor in inputs.tensors] == [(2, 1), (2,)]
    assert inputs.rows == 2
    assert inputs.size_bytes == 16
    with pytest.raises(Failure, match="batch size does not match"):
        join(both, {**found, "b": from_lists(both.named("b"), [1])})
    with pytest.raises(Failure, match="missing required input"):
        join(both, {"a": found["a"]})
    with pytest.raises(Failure, match="unexpected inference input 'c'"):
        join(both, {**found, "c": found["a"]})


def test_outputs_are_nested_as_their_shapes() -> None:
    numbers = OutputTensor("FP32", (2, 1, 2), np.array([[[0.1, math.nan]], [[math.inf, -math.inf]]], np.float32))
    assert text_of(numbers) == b"[[[0.1,NaN]],[[Infinity,-Infinity]]]"
    assert text_of(OutputTensor("FP32", (), np.array(0.5, np.float32))) == b"0.5"
    assert json.loads(text_of(OutputTensor("FP32", (2, 0), np.empty((2, 0), np.float32)))) == [[], []]
    words = OutputTensor("BYTES", (2, 2), [b"a", b"b", b"c", b"d"])
    assert text_of(words) == b'[["a","b"],["c","d"]]'
    assert (
        text_of(words._replace(shape=(1, 4)), b64=True)
        == b'[[{"b64":"YQ=="},{"b64":"Yg=="},{"b64":"Yw=="},{"b64":"ZA=="}]]'
    )
    assert text_of(OutputTensor("BYTES", (0, 2), [])) == b"[]"
    with pytest.raises(Failure, match="not UTF-8"):
        text_of(OutputTensor("BYTES", (1,), [b"\xff"]))


def test_rows_of_an_output() -> None:
    numbers = OutputTensor("INT64", (2, 2), np.array([[1, 2], [3, 4]]))
    assert [text_of(row) for row in rows_of(numbers)] == [b"[1,2]", b"[3,4]"]
    assert [text_of(row) for row in rows_of(OutputTensor("INT64", (2,), np.array([1, 2])))] == [b"1", b"2"]
    words = OutputTensor("BYTES", (2, 2), [b"a", b"b", b"c", b"d"])
    assert [text_of(row) for row in rows_of(words)] == [b'["a","b"]', b'["c","d"]']


def test_owned_outputs_do_not_change_with_what_they_came_from() -> None:
    source = np.array([1.0, 2.0], np.float32)
    kept = own_copies([OutputTensor("FP32", (2,), source)])
    source[:] = 0
    assert text_of(kept[0]) == b"[1.0,2.0]"
