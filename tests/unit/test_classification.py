"""Scores as classes: the reference's text form, its order, and what has no order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from millstream.gateway.tensors.classification import check_classifiable, classify
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import TensorSpec


def best(array, count=3, labels=(), *, batching=True, datatype="FP32"):
    return classify(OutputTensor(datatype, array.shape, array), count, labels, batching=batching)


def test_floats_have_six_decimals_and_rows_are_ranked_by_themselves() -> None:
    scores = np.array([[1, 10, 2.5], [0.1, -3, 0]], np.float32)
    found = best(scores, 2)
    assert (found.datatype, found.shape) == ("BYTES", (2, 2))
    assert found.array == [b"10.000000:1", b"2.500000:2", b"0.100000:0", b"0.000000:2"]


def test_integers_are_plain_and_unsigned_ones_do_not_wrap() -> None:
    assert best(np.array([[3, 0, 200]], np.uint8), datatype="UINT8").array == [b"200:2", b"3:0", b"0:1"]
    least = np.iinfo(np.int64).min
    assert best(np.array([[least, 0]], np.int64), datatype="INT64").array == [b"0:1", b"%d:0" % least]


def test_more_classes_than_there_are_gives_all_of_them() -> None:
    assert best(np.array([[1, 2]], np.float64), 10, datatype="FP64").shape == (1, 2)


def test_labels_stand_behind_the_index_where_there_are_any() -> None:
    scores = np.array([[1, 2, 3]], np.float32)
    assert best(scores, labels=("a", "", "c:d")).array == [b"3.000000:2:c:d", b"2.000000:1", b"1.000000:0:a"]
    assert best(scores, labels=("a",)).array[-1] == b"1.000000:0:a"


def test_without_batching_the_whole_tensor_is_ranked() -> None:
    found = best(np.array([[1, 4], [3, 2]], np.float32), 3, batching=False)
    assert (found.shape, found.array) == ((3,), [b"4.000000:1", b"3.000000:2", b"2.000000:3"])


def test_inner_dimensions_are_flattened_in_each_row() -> None:
    assert best(np.arange(8, dtype=np.int32).reshape(2, 2, 2), 1, datatype="INT32").array == [b"3:3", b"7:3"]


def test_equal_values_keep_their_order_and_nan_comes_last() -> None:
    scores = np.array([[np.nan, 1, 1, -np.inf]], np.float32)
    assert [text.split(b":")[1] for text in best(scores, 4).array] == [b"1", b"2", b"0", b"3"]


def test_half_precision_of_both_kinds() -> None:
    assert best(np.array([[1.5, 2]], np.float16), 1, datatype="FP16").array == [b"2.000000:1"]
    bits = np.array([[1.5, -2]], ml_dtypes.bfloat16).view(np.uint16)
    assert best(bits, 1, datatype="BF16").array == [b"1.500000:0"]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_rank(shape: tuple[int, int]) -> None:
    found = best(np.zeros(shape, np.float32))
    assert (found.shape, found.array) == (shape, [])


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES"])
def test_what_has_no_order_is_refused(datatype: str) -> None:
    with pytest.raises(Failure, match="class result not available") as caught:
        check_classifiable(TensorSpec(name="y", datatype=datatype, shape=(-1, 2)))
    assert caught.value.code is Code.INVALID
