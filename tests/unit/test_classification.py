"""Scores as classes: the reference's text form, its order, what has no order; and the outputs label and score."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from millstream.gateway.tensors.output_options import LabelledOutputs, check_classifiable, classify
from millstream.gateway.tensors.outputs import Column, Outputs, OutputTensor
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.signature import Classes, Signature, TensorSpec, answered


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


def labelled(scores, labels, rows=None, *, kind="softmax", batching=True, datatype="FP32", top=None):
    shape = (-1, *scores.shape[1:]) if batching else scores.shape
    numbers = TensorSpec(name="n", datatype="INT64", shape=shape[:1])
    signature = Signature(
        inputs=(), outputs=(numbers, TensorSpec(name="logits", datatype=datatype, shape=shape)), batching=batching
    )
    classes = Classes(output="logits", scores=kind, top=top)
    inner = scores.shape[1:] if batching else scores.shape
    columns = [Column("INT64", () if batching else shape[:1], np.arange(len(scores))), Column(datatype, inner, scores)]
    rows = rows or [len(scores)]
    found = LabelledOutputs(signature, classes, labels).add(Outputs(columns, batching), rows)
    seen = answered(signature, classes)
    assert [spec.name for spec in seen.outputs] == ["n", "label", "score", "logits"]
    assert [spec.on_request for spec in seen.outputs] == [False, False, False, True]
    replies = found.replies(rows)
    for reply in replies:
        for spec, output in zip(seen.outputs, reply, strict=True):
            assert (output.datatype, len(output.shape)) == (spec.datatype, len(spec.shape))
            if isinstance(output.array, list):
                assert len(output.array) == np.prod(output.shape)
    return [reply[1:3] for reply in replies]


def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_the_best_label_of_each_row_goes_to_its_request() -> None:
    scores = np.array([[1, 3, 2], [9, 0, 0], [0, 0, 5]], np.float32)
    first, second = labelled(scores, ["a", "b", "b"], [1, 2])
    assert (first[0].array, second[0].array) == ([b"b"], [b"a", b"b"])
    np.testing.assert_allclose(np.concatenate([first[1].array, second[1].array]), softmax(scores).max(-1), rtol=1e-6)


def test_each_token_has_a_label() -> None:
    scores = np.random.default_rng(1).standard_normal((2, 4, 3)).astype(np.float32)
    ((label, score),) = labelled(scores, ["x", "y", "z"])
    assert label.shape == score.shape == (2, 4)
    assert label.array == [b"xyz"[at : at + 1] for at in scores.argmax(-1).ravel()]
    np.testing.assert_allclose(score.array, softmax(scores).max(-1), rtol=1e-6)


def test_every_label_with_a_probability_of_its_own_the_best_first() -> None:
    scores = np.array([[-1, 2, 0], [1000, -1000, np.nan]], np.float32)
    ((label, score),) = labelled(scores, ["a", "b", "c"], kind="sigmoid")
    assert label.array == [b"b", b"c", b"a", b"a", b"b", b"c"]
    np.testing.assert_allclose(score.array[0], 1 / (1 + np.exp([-2.0, 0, 1])), rtol=1e-6)
    assert score.array[1, :2].tolist() == [1, 0]
    assert np.isnan(score.array[1, 2])


def test_many_labels_of_a_text_are_the_best_hundred() -> None:
    scores = np.random.default_rng(1).standard_normal((3, 500)).astype(np.float32)
    scores[1, 7] = np.nan
    ((label, score),) = labelled(scores, [str(at) for at in range(500)], kind="sigmoid")
    assert label.shape == score.shape == (3, 100)
    best = np.argsort(-scores, -1)[:, :100]
    assert label.array == [str(at).encode() for at in best.ravel()]
    np.testing.assert_allclose(score.array, 1 / (1 + np.exp(-np.take_along_axis(scores, best, -1))), rtol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top", [1, 2, 9])
def test_the_best_of_the_classes_that_are_asked_for(kind: str, top: int) -> None:
    scores = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    ((label, score),) = labelled(scores, list("abcde"), kind=kind, top=top)
    best = np.argsort(-scores, -1)[:, :top]
    assert label.shape == score.shape == (3, min(top, 5))
    assert label.array == [b"abcde"[at : at + 1] for at in best.ravel()]
    wanted = softmax(scores) if kind == "softmax" else 1 / (1 + np.exp(-scores))
    np.testing.assert_allclose(score.array, np.take_along_axis(wanted, best, -1), rtol=1e-5)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP64"])
def test_labels_of_other_datatypes_and_without_rows(datatype: str) -> None:
    scores = np.array([1.5, -2, 4])
    made = scores.astype(ml_dtypes.bfloat16).view(np.uint16) if datatype == "BF16" else scores.astype(NUMPY[datatype])
    ((label, score),) = labelled(made, ["a", "b", "c"], [1], batching=False, datatype=datatype)
    assert (label.shape, label.array) == ((), [b"c"])
    np.testing.assert_allclose(score.array, softmax(scores).max(), rtol=1e-3)


def test_infinite_and_large_scores_have_no_warning() -> None:
    with np.errstate(all="raise"):
        ((label, score),) = labelled(np.array([[3e38, -3e38], [np.inf, 0], [np.nan, 1]], np.float32), ["a", "b"])
    assert label.array[:2] == [b"a", b"a"]
    assert score.array[0] == 1
    assert np.isnan(score.array[1:]).all()
