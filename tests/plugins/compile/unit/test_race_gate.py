"""plugins/compile/race/gate.py: what counts as the same answer."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.plugins.compile.race.gate import Judgement, differing, influenced, judge, neighbours
from millstream.plugins.compile.race.report import Gate
from millstream.services.model.agreement import Array
from millstream.services.model.signature import Signature, TensorSpec

RANDOM = np.random.default_rng(7)
SCORES = RANDOM.standard_normal((64, 10)).astype(np.float32)


def signature(*datatypes: str, batching: bool = True) -> Signature:
    outputs = tuple(TensorSpec(name=f"y{at}", datatype=one, shape=(-1, -1)) for at, one in enumerate(datatypes))
    return Signature(inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),), outputs=outputs, batching=batching)


def why(expected: Array, actual: Array, datatype: str = "FP32", gate: Gate | None = None) -> str:
    return judge(signature(datatype), [expected], [actual], gate or Gate()).why


def test_equal_outputs_pass_with_full_figures() -> None:
    judgement = judge(signature("FP32"), [SCORES], [SCORES.copy()], Gate())
    assert not judgement.why
    assert judgement.cosine_min == pytest.approx(1.0)
    assert judgement.agreement_min == 1.0
    assert judgement.outputs["y0"].equal == 1.0


def test_rounding_of_bf16_passes() -> None:
    rounded = (SCORES.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert why(SCORES, rounded) == ""


def test_one_bad_row_among_many_good_ones_is_refused_and_the_output_is_named() -> None:
    wrong = SCORES.copy()
    wrong[17] = wrong[17][::-1]
    judgement = judge(signature("FP32", "FP32"), [SCORES, SCORES], [SCORES, wrong], Gate())
    assert judgement.why.startswith("output 'y1': the cosine is ")
    assert not judgement.outputs["y0"].why


def test_a_cosine_of_one_does_not_hide_another_length() -> None:
    assert "of its length away" in why(SCORES, SCORES * np.float32(1.2))
    assert "of its length away" in why(SCORES, SCORES * np.float32(0.5))
    assert why(SCORES, SCORES * np.float32(1.01)) == ""


def test_single_numbers_are_judged_together_since_a_cosine_of_one_number_is_its_sign() -> None:
    targets = RANDOM.random((50, 1)).astype(np.float32) + 1
    assert "cosine" in why(targets, RANDOM.permutation(targets))
    assert why(targets, targets * np.float32(1.001)) == ""


def test_another_largest_element_is_refused_even_where_the_cosine_is_high() -> None:
    expected = np.tile(np.linspace(1.0, 2.0, 100, dtype=np.float32), (10, 1))
    actual = expected.copy()
    actual[0, 0] = 2.1
    figures = judge(signature("FP32"), [expected], [actual], Gate(cosine_min=0.99)).outputs["y0"]
    assert figures.agreement == pytest.approx(0.9)
    assert "largest element is another in 10.0%" in figures.why
    assert why(expected, actual, gate=Gate(cosine_min=0.99, agreement_min=0.9)) == ""


def test_tied_elements_may_change_places() -> None:
    expected = np.array([[0.0, 1.0, 1.0], [5.0, 5.0, 0.0]], np.float32)
    actual = np.array([[0.0, 1.0, 1.0001], [5.0, 5.0001, 0.0]], np.float32)
    assert judge(signature("FP32"), [expected], [actual], Gate()).agreement_min == 1.0


@pytest.mark.parametrize("datatype", ["INT64", "BOOL", "BYTES"])
def test_integers_booleans_and_text_must_be_equal(datatype: str) -> None:
    expected: Array = np.array([[1, 0], [1, 1], [0, 0]])
    if datatype == "BYTES":
        expected = np.array([[b"a", b"b"], [b"c", b"d"], [b"", b"e"]], dtype=object)
    if datatype == "BOOL":
        expected = expected.astype(bool)
    actual = expected.copy()
    assert why(expected, actual, datatype) == ""
    actual[2, 0] = actual[1, 0]
    assert "only 83.33% of the elements are equal" in why(expected, actual, datatype)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_pass_only_where_they_were(odd: float) -> None:
    expected = SCORES.copy()
    expected[3, 3] = odd
    assert why(expected, expected.copy()) == ""
    assert "NaN or infinity in other places" in why(expected, SCORES)
    assert "NaN or infinity in other places" in why(SCORES, expected)


def test_infinities_of_opposite_signs_differ() -> None:
    one, other = SCORES.copy(), SCORES.copy()
    one[0, 0], other[0, 0] = np.inf, -np.inf
    assert "NaN or infinity" in why(one, other)


def test_zeros_are_equal_to_zeros_alone() -> None:
    zeros = np.zeros((4, 10), np.float32)
    assert why(zeros, zeros.copy()) == ""
    assert "cosine" in why(zeros, SCORES[:4])
    assert "cosine" in why(SCORES[:4], zeros)


def test_one_wrong_row_of_a_single_number_does_not_hide_among_others() -> None:
    targets = RANDOM.random((256, 1)).astype(np.float32) + 1
    wrong = targets.copy()
    wrong[100] += 0.3
    judgement = judge(signature("FP32"), [targets], [wrong], Gate())
    assert judgement.cosine_min is not None
    assert judgement.cosine_min > 0.999, "which says nothing"
    assert "of its length away" in judgement.why
    near_zero = np.array([[1e-6], [1.0], [-1.0]], np.float32)
    assert why(near_zero, near_zero + np.float32(1e-3)) == ""


@pytest.mark.parametrize("lossy", [False, True])
def test_a_row_that_differs_is_found_in_any_batch(lossy: bool) -> None:
    def differs(expected: Array, actual: Array, datatype: str = "FP32") -> str:
        return differing(signature(datatype), [expected], [actual], Gate(), lossy=lossy)

    for rows in (1, 4, 16):
        expected = SCORES[:rows].copy()
        assert differs(expected, expected * np.float32(1.001)) == ""
        wrong = expected.copy()
        wrong[-1] = wrong[-1][::-1]
        assert "of its length away" in differs(expected, wrong)
        expected[-1] = np.nan
        assert differs(expected, expected.copy()) == ""
        assert "NaN or infinity" in differs(expected, SCORES[:rows]), "a plausible row of what was NaN"
        whole = np.arange(rows * 4).reshape(rows, 4)
        assert differs(whole, whole.copy(), "INT64") == ""
        assert "other values" in differs(whole, whole ^ (whole == rows * 4 - 1), "INT64")


def test_denormal_numbers_may_become_zero() -> None:
    small = np.full((2, 10), 1e-40, np.float32)
    assert differing(signature("FP32"), [small], [np.zeros_like(small)], Gate(), lossy=False) == ""
    assert differing(signature("FP32"), [small], [np.full_like(small, 1e-3)], Gate(), lossy=False)


def test_huge_numbers_do_not_overflow() -> None:
    huge = (SCORES.astype(np.float64) * 1e300).astype(np.float64)
    assert why(huge, huge.copy(), "FP64") == ""
    assert "cosine" in why(huge, -huge, "FP64")


def test_other_shapes_datatypes_and_numbers_of_outputs_are_refused() -> None:
    assert "the shape is [64, 9]" in why(SCORES, SCORES[:, :9])
    assert "the datatype is float64" in why(SCORES, SCORES.astype(np.float64))
    assert "0 outputs instead of 1" in judge(signature("FP32"), [SCORES], [], Gate()).why


def test_bf16_bits_are_compared_as_numbers() -> None:
    bits = (SCORES.view(np.uint32) >> 16).astype(np.uint16)
    assert why(bits, bits ^ 1, "BF16") == ""
    assert why(bits, bits ^ 0x8000, "BF16")


def test_empty_outputs_pass() -> None:
    assert why(np.zeros((3, 0), np.float32), np.zeros((3, 0), np.float32)) == ""


def test_rows_that_take_their_scale_from_the_batch_are_found() -> None:
    inputs: dict[str, Array] = {"x": SCORES, "ids": np.arange(64)[:, None]}
    changed = neighbours(inputs, {"x": "FP32", "ids": "INT64"})
    assert np.array_equal(changed["x"][0], SCORES[0])
    assert changed["ids"][:3, 0].tolist() == [0, 63, 62]

    def quantized(x: Array) -> Array:
        scale = np.abs(x).max() / 127
        rounded: Array = (np.round(x / scale) * scale).astype(np.float32)
        return rounded

    one, other = quantized(inputs["x"]), quantized(changed["x"])
    assert influenced(signature("FP32"), [one], [other]) == "y0"
    assert influenced(signature("FP32"), [inputs["x"] * 2], [changed["x"] * 2]) == ""


def test_largest_element_of_an_embedding_means_nothing() -> None:
    """Another element is the largest by a little, in the same direction."""
    expected = np.tile(np.linspace(0.95, 1, 32, dtype=np.float32), (4, 1))
    actual = expected.copy()
    actual[:, 0] = 1.01
    judged = judge(signature("FP32"), [expected], [actual], Gate())
    assert "the largest element is another" in judged.why
    assert judge(signature("FP32"), [expected], [actual], Gate(), ["y0"]) == Judgement(
        {"y0": judged.outputs["y0"].model_copy(update={"agreement": None, "why": ""})}, ""
    )
    assert "the cosine is" in judge(signature("FP32"), [expected], [-actual], Gate(), ["y0"]).why
