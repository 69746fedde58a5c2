"""What a profile says of sizes between, below and above the measured ones, for any measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.services.model.profile import EFFICIENT_SHARE, Profile

SECONDS = st.floats(min_value=1e-9, max_value=1e4)
MEASURED = st.dictionaries(st.integers(1, 65536), SECONDS, min_size=1, max_size=20)
ROWS = st.integers(1, 200_000)


@given(MEASURED, ROWS, ROWS)
def test_more_rows_never_take_less_time(seconds: dict[int, float], one: int, other: int) -> None:
    profile = Profile(seconds)
    low, high = sorted((one, other))
    assert profile.predict(low) <= profile.predict(high) * (1 + 1e-12)


@given(MEASURED)
def test_a_measured_size_takes_what_was_measured_up_to_it(seconds: dict[int, float]) -> None:
    profile = Profile(seconds)
    for rows in seconds:
        assert profile.predict(rows) == max(spent for size, spent in seconds.items() if size <= rows)


@given(st.dictionaries(st.integers(1, 4096), SECONDS, min_size=2, max_size=12), st.data())
def test_between_two_sizes_lies_between_their_times(seconds: dict[int, float], data: st.DataObject) -> None:
    profile, sizes = Profile(seconds), sorted(seconds)
    at = data.draw(st.integers(1, len(sizes) - 1))
    rows = data.draw(st.integers(sizes[at - 1], sizes[at]))
    low, high = profile.predict(sizes[at - 1]), profile.predict(sizes[at])
    assert low * (1 - 1e-12) <= profile.predict(rows) <= high * (1 + 1e-12)


@given(MEASURED)
def test_beyond_the_largest_size_time_grows_in_proportion(seconds: dict[int, float]) -> None:
    profile, largest = Profile(seconds), max(seconds)
    assert profile.predict(3 * largest) == pytest.approx(3 * profile.predict(largest))


@given(MEASURED)
def test_efficient_rows_is_the_smallest_size_near_the_best_rate(seconds: dict[int, float]) -> None:
    profile = Profile(seconds)
    rates = {rows: rows / profile.predict(rows) for rows in seconds}
    chosen, best = profile.efficient_rows(), max(rates.values())
    assert rates[chosen] >= EFFICIENT_SHARE * best * (1 - 1e-9)
    assert all(rates[rows] < EFFICIENT_SHARE * best * (1 + 1e-9) for rows in rates if rows < chosen)


def test_interpolates_in_a_straight_line() -> None:
    profile = Profile({1: 1.0, 5: 3.0, 10: 3.0})
    assert [profile.predict(rows) for rows in (1, 3, 5, 7, 10, 20)] == [1.0, 2.0, 3.0, 3.0, 3.0, 6.0]


def test_a_cnn_on_a_cpu_gains_nothing_from_rows() -> None:
    assert Profile({1: 0.0155, 2: 0.0305, 4: 0.0602, 8: 0.1201}).efficient_rows() == 1


def test_nothing_measured_predicts_nothing() -> None:
    empty = Profile({})
    assert (empty.predict(7), empty.efficient_rows()) == (0.0, 1)


def test_a_run_too_short_for_the_clock_is_efficient() -> None:
    assert Profile({1: 0.0, 2: 0.0}).efficient_rows() == 1


@pytest.mark.parametrize("seconds", [{0: 1.0}, {1: -1.0}, {1: float("nan")}, {1: float("inf")}])
def test_impossible_measurements_are_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="maps rows"):
        Profile(seconds)
