"""When two runs of a model agree: what another order of summing explains, and nothing more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.services.model.agreement import SUMMING, agree, column_scale, disagreeing_rows


def test_sums_in_another_order_agree() -> None:
    rng = np.random.default_rng(1)
    rows, weights = rng.standard_normal((16, 512)).astype(np.float32), rng.standard_normal((512, 8)).astype(np.float32)
    order = rng.permutation(512)
    assert agree("FP32", rows[:, order] @ weights[order], rows @ weights)


def test_a_column_of_large_values_does_not_hide_an_error_in_a_small_one() -> None:
    expected = np.array([[1e4, 1.0], [2e4, 2.0], [3e4, 1.0]], np.float32)
    actual = expected.copy()
    actual[1, 1] += 0.05  # relative to the whole tensor next to nothing
    assert disagreeing_rows("FP32", actual, expected) == [1]


def test_a_value_that_cancels_out_may_be_off_by_what_its_summands_were() -> None:
    expected = np.array([[1000.0, 0.0], [900.0, 0.0]], np.float32)
    actual = expected + np.array([[0.0, 1e-4], [0.0, -1e-4]], np.float32)
    assert agree("FP32", actual, expected)
    assert not agree("FP32", actual * np.float32(100), expected * np.float32(100) + np.float32(1))


@pytest.mark.parametrize("datatype", ["INT64", "BOOL", "UINT8", "BYTES"])
def test_discrete_values_agree_only_when_they_are_equal(datatype: str) -> None:
    dtype: object = (
        object if datatype == "BYTES" else {"INT64": np.int64, "BOOL": np.bool_, "UINT8": np.uint8}[datatype]
    )
    values = [[b"0", b"1"], [b"1", b"1"]] if datatype == "BYTES" else [[0, 1], [1, 1]]
    expected = np.array(values, dtype)  # type: ignore[call-overload]
    actual = expected.copy()
    assert disagreeing_rows(datatype, actual, expected) == []
    actual[1, 0] = b"0" if datatype == "BYTES" else 0
    assert disagreeing_rows(datatype, actual, expected) == [1]


def test_what_is_not_finite_agrees_with_itself_alone() -> None:
    expected = np.array([[np.nan], [np.inf], [-np.inf], [1.0]], np.float32)
    assert agree("FP32", expected.copy(), expected)
    for row, other in enumerate([1.0, -np.inf, 1.0, np.nan]):
        actual = expected.copy()
        actual[row, 0] = other
        assert disagreeing_rows("FP32", actual, expected) == [row]


def test_other_shapes_disagree_everywhere_and_no_elements_nowhere() -> None:
    assert disagreeing_rows("FP32", np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32)) == [0, 1]
    assert agree("FP32", np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32))
    assert not agree("FP32", np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32))
    assert agree("FP32", np.array(1, np.float32), np.array(1, np.float32))


def test_bf16_is_compared_by_value() -> None:
    one, next_one, two = 0x3F80, 0x3F81, 0x4000
    assert agree("BF16", np.array([[next_one]], np.uint16), np.array([[one]], np.uint16))
    assert not agree("BF16", np.array([[two]], np.uint16), np.array([[one]], np.uint16))


def test_a_scale_of_more_rows_serves_for_one() -> None:
    batch = np.array([[1.0], [1000.0]], np.float32)
    off = np.array([[1.01]], np.float32)
    assert disagreeing_rows("FP32", off, batch[:1]) == [0]
    assert disagreeing_rows("FP32", off, batch[:1], scale=column_scale("FP32", batch)) == []


@given(
    row=st.integers(0, 4),
    column=st.integers(0, 2),
    size=st.floats(1e-20, 1e20),
    datatype=st.sampled_from(["FP32", "FP64"]),
)
def test_an_influence_of_ten_tolerances_is_found_whatever_the_scale(
    row: int, column: int, size: float, datatype: str
) -> None:
    expected = np.random.default_rng(5).uniform(0.5, 1, (5, 3)) * size
    actual = expected.copy()
    actual[row, column] *= 1 + 20 * SUMMING[datatype]
    dtype = np.float32 if datatype == "FP32" else np.float64
    assert disagreeing_rows(datatype, actual.astype(dtype), expected.astype(dtype)) == [row]
