"""Sizes that the warm-up had no time for are tried as a version runs, and learnt: for any model."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.model.profile import EFFICIENT_SHARE, TRIAL_GROWTH, TRIAL_S, Profile
from millstream.workers.models.loaded_models import STEP, TRIALS, Exploration

ROWS_MAX = st.sampled_from([1, 2, 7, 64, 1000])


def settled(
    fixed_s: float, row_s: float, rows_max: int, runs: int = 200, waiting: int = 1 << 20
) -> tuple[int, list[int]]:
    """Run a model of so much for each run and each row, as many rows as are asked for or wait; the last target, all
    sizes.
    """
    measured = {1: fixed_s + row_s}
    exploration = Exploration(measured, rows_max)
    target = Profile(measured).rows_worth_running(rows_max)
    sizes = []
    for _ in range(runs):
        rows = min(target, waiting)
        sizes.append(rows)
        wanted = exploration.ran(rows, fixed_s + row_s * rows, 1 << 30)
        target = target if wanted is None else wanted
    return target, sizes


@given(fixed_s=st.floats(0.1, 10), part=st.floats(0, 0.001), rows_max=ROWS_MAX)
def test_a_model_whose_runs_all_take_as_long_is_run_full_after_few(fixed_s: float, part: float, rows_max: int) -> None:
    target, sizes = settled(fixed_s, fixed_s * part, rows_max)
    seconds = {rows: fixed_s + fixed_s * part * rows for rows in (target, rows_max)}
    assert EFFICIENT_SHARE * seconds[target] / target <= seconds[rows_max] / rows_max * 1.001, "it is as efficient"
    steps = math.ceil(math.log2(rows_max)) + 1
    assert sizes[0] == min(rows_max, TRIAL_GROWTH) or 2 * fixed_s * sizes[0] > TRIAL_S, "the first run has many rows"
    assert {*sizes[steps:]} <= {target, rows_max}


@given(row_s=st.floats(0.1, 10), rows_max=ROWS_MAX)
def test_a_model_that_gains_nothing_is_soon_left_alone(row_s: float, rows_max: int) -> None:
    target, sizes = settled(0.0, row_s, rows_max)
    assert target == 1
    assert max(sizes) * row_s <= max(2 * row_s, TRIAL_S) * 1.001
    assert sum(rows > 1 for rows in sizes) <= TRIALS


@given(fixed=st.floats(0, 10), row=st.floats(0.001, 10), rows_max=ROWS_MAX)
def test_what_it_settles_at_is_nearly_the_best(fixed: float, row: float, rows_max: int) -> None:
    target, sizes = settled(fixed, row, rows_max)
    assert sizes[-1] == target

    def rate(rows: int) -> float:
        return rows / (fixed + row * rows)

    # A step that gains less than a tenth ends the search; what would have come after it is worth less than a fourth.
    assert rate(target) >= 0.75 * rate(rows_max)
    assert target <= rows_max


@given(fixed_s=st.floats(1, 10), waiting=st.integers(1, 9))
def test_what_waits_bounds_what_is_tried(fixed_s: float, waiting: int) -> None:
    target, sizes = settled(fixed_s, 0.0, 64, waiting=waiting)
    assert max(sizes) == waiting
    assert target <= TRIAL_GROWTH * waiting


@given(data=st.data(), rows_max=ROWS_MAX)
def test_whatever_runs_how_long_it_stays_within_bounds(data: st.DataObject, rows_max: int) -> None:
    measured: dict[int, float] = data.draw(
        st.dictionaries(st.integers(1, rows_max), st.floats(1e-6, 10), max_size=3), label="measured"
    )
    known = len(measured)
    exploration = Exploration(measured, rows_max)
    fitting = 1 << 30
    for _ in range(30):
        rows = data.draw(st.integers(1, rows_max))
        fitting = min(fitting, data.draw(st.sampled_from([1 << 30, 8])))
        target = exploration.ran(rows, data.draw(st.floats(0, 10)), fitting)
        if target is not None:
            assert 1 <= target <= min(rows_max, fitting)
            assert target <= TRIAL_GROWTH * max(measured)
        Profile(measured)  # raises where something in it is none
    assert len(measured) <= known + 2 + math.log(rows_max, STEP)


def test_a_disturbed_first_run_of_a_size_does_not_end_the_search() -> None:
    exploration = Exploration({1: 1.0}, 64)
    assert exploration.ran(2, 5.0, 1 << 30) == 2  # something else took the machine
    assert exploration.ran(2, 1.0, 1 << 30) == 10


def test_what_was_measured_completely_is_only_corrected() -> None:
    measured = {1: 1.0, 2: 2.0, 4: 4.0}
    exploration = Exploration(measured, 4)
    assert exploration.ran(4, 2.0, 1 << 30) is None
    assert exploration.ran(3, 2.0, 1 << 30) is None
    assert measured == {1: 1.0, 2: 2.0, 4: 3.8}


def test_inputs_of_callers_count_not_made_up_ones() -> None:
    measured = {1: 0.5}  # of texts of one token
    exploration = Exploration(measured, 64)
    assert exploration.ran(2, 5.0, 1 << 30) == 2
    assert exploration.ran(1, 4.9, 1 << 30) == 4
    assert measured == {1: 4.9, 2: 5.0}
