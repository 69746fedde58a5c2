"""plugins/compile/race/weights.py: the batch sizes of the traffic."""

from __future__ import annotations

from millstream.plugins.compile.race.report import SIZES_MAX
from millstream.plugins.compile.race.weights import BATCHES_MIN, batch_weights


def test_a_few_batches_are_no_traffic() -> None:
    assert batch_weights({1: BATCHES_MIN - 1}, 64) == {}
    assert batch_weights({1: BATCHES_MIN}, 64) == {1: BATCHES_MIN}
    assert batch_weights({}, 64) == {}


def test_the_most_frequent_sizes_are_taken_in_order() -> None:
    batches = {1 << power: 100.0 + power for power in range(SIZES_MAX + 2)}

    weights = batch_weights(batches, 1 << 20)

    assert list(weights) == sorted(batches)[2:]


def test_batches_larger_than_the_version_takes_are_left_out() -> None:
    assert batch_weights({1: 60, 8: 60, 0: 5}, 4) == {1: 60}
