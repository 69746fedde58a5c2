"""plugins/compile/race/bounds.py: what a form is asked for, and which batches it gets."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.plugins.compile.candidate import DIMENSION_MAX
from millstream.plugins.compile.race.bounds import (
    EQUAL_ROWS,
    Extreme,
    Guard,
    extreme_call,
    extreme_rows,
    extremes,
    finite,
    is_inside,
    narrowed,
    sampled,
)
from millstream.services.model.agreement import Array, as_float
from tests.kit.races import signature

OF = signature(
    [("x", "FP32", (-1, 3)), ("half", "BF16", (-1, 2)), ("t", "INT64", (-1,)), ("b", "UINT8", (-1,)),
     ("s", "BYTES", (-1,))],
    [("y", "FP32", (-1, 3))],
)  # fmt: skip


def batch(rows: int) -> dict[str, Array]:
    return {
        "x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3),
        "half": np.full((rows, 2), 0x3F80, np.uint16),
        "t": np.arange(rows),
        "b": np.arange(rows, dtype=np.uint8),
    }


def test_each_input_is_tried_at_the_ends_of_its_type_and_where_narrower_types_end() -> None:
    found = extremes(OF)
    assert found[0] == Extreme(), "equal rows"
    values = {name: [one.value for one in found if one.name == name] for name in ("x", "t", "b", "s")}
    assert {"0.0", "-1.0", "1e+30", "-1e+30", "1e-40", "nan", "inf", "-inf", "3.4028234663852886e+38"} <= {*values["x"]}
    beyond = {0, -1, 2**24 + 1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63 - 1, -(2**63)}
    assert beyond <= set(map(int, values["t"]))
    assert values["b"] == ["0", "255"]
    assert values["s"] == []


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_batch_of_extremes_has_equal_rows_and_one_place_in_another(rows: int) -> None:
    specs = {spec.name: spec for spec in OF.inputs}
    given = batch(rows)
    made = extreme_rows(given, specs["x"], "nan", rows)
    equal = min(rows, EQUAL_ROWS)
    assert np.isnan(made["x"][:equal]).all()
    assert np.isnan(made["x"]).sum() == equal * 3 + (rows > EQUAL_ROWS)
    assert {len(set(array[:equal].reshape(equal, -1)[:, 0].tolist())) for array in (made["t"], made["b"])} == {1}
    assert not np.isnan(given["x"]).any(), "the samples stay"
    assert extreme_rows(given, specs["t"], str(2**63 - 1), rows)["t"][0] == 2**63 - 1
    assert np.isnan(as_float("BF16", extreme_rows(given, specs["half"], "nan", rows)["half"][0])).all()
    assert np.isinf(extreme_call(given, specs["x"], "-inf")["x"]).all()
    np.testing.assert_array_equal(extreme_rows(given, None, "", rows)["x"][:equal], given["x"][:1].repeat(equal, 0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 5.5, -1.5])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_one_number_outside_of_the_bounds_keeps_a_batch_from_a_form(value: float, rows: int) -> None:
    guard = Guard({"x": (-1.0, 100.0), "half": (-1.0, 5.0)}, OF)
    given = batch(rows)
    assert guard.admits(given)
    assert guard.admits({"x": given["x"][:0]}), "there is no number"
    given["half"][-1, -1] = np.float32(value).view(np.uint32) >> 16
    assert not guard.admits(given)
    given = batch(rows)
    given["x"][-1, -1] = value if value != 5.5 else 100.5
    assert not guard.admits(given)


def test_integers_are_compared_exactly_and_sizes_are_bounded() -> None:
    guard = Guard({"t": (-(2.0**31) + 1, 2.0**31 - 1)}, OF)
    for number in (2**31, 2**32, 2**63 - 1, -(2**31), -(2**63)):
        assert not guard.admits({"t": np.array([0, number])})
    assert guard.admits({"t": np.array([2**31 - 1, -(2**31) + 1])})
    assert not guard.admits({"t": np.zeros(DIMENSION_MAX + 1, np.int64)})


def test_bounds_of_samples_are_twice_as_wide_and_those_of_two_proofs_the_narrower() -> None:
    samples = [{"x": np.array([[0.0, 2.0, np.nan]], np.float32), "t": np.array([4])}]
    assert sampled(OF, samples) == {"x": (-1.0, 3.0)}
    assert sampled(OF, samples, integers=True) == {"x": (-1.0, 3.0), "t": (2.0, 6.0)}
    assert narrowed({"x": (0.0, 9.0), "t": (1.0, 2.0)}, {"x": (-5.0, 5.0)}) == {"x": (0.0, 5.0), "t": (1.0, 2.0)}
    assert set(finite(OF)) == {"x", "half"}
    assert not is_inside(finite(OF), Extreme("x", "nan"))
    assert not is_inside(finite(OF), Extreme("half", "inf"))
    assert is_inside(finite(OF), Extreme("t", str(2**63 - 1)))
