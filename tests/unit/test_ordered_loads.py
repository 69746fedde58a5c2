"""The last loads that calls waited for: how far apart they are, and whether one is new."""

from __future__ import annotations

from millstream.services.placement.preloads import HEADROOM_LOADS_KNOWN, NextLoads, OrderedLoads
from millstream.services.placement.views import Footprint


def test_the_next_load_takes_the_most_that_one_of_the_last_took() -> None:
    loads = OrderedLoads()
    for number in range(20):
        loads.begin(Footprint(100 - number, number, 0.5, True, 7, 20 - number))
        loads.end(0.01, 100.0 + 3 * number)
    assert loads.any_new
    oldest = 20 - HEADROOM_LOADS_KNOWN
    expected = Footprint(100 - oldest, 19, 0.01, device_resident_bytes=7, device_peak_bytes=20 - oldest)
    assert loads.take() == NextLoads(expected, 3.0)


def test_a_load_that_has_ended_is_taken_once() -> None:
    loads = _known(0.0, 1.0)
    assert loads.take() is not None
    assert not loads.any_new
    assert loads.take() is None


def test_nothing_is_known_after_a_few_loads() -> None:
    loads = OrderedLoads()
    for _ in range(HEADROOM_LOADS_KNOWN - 1):
        loads.begin(Footprint(1))
        loads.end(0.01, 5.0)
        assert loads.take() is None


def test_a_clock_that_was_set_back_makes_no_negative_gap() -> None:
    assert _known(100.0, -1.0).take() == NextLoads(Footprint(1, 0, 0.01), 0.0)


def _known(began: float, gap_s: float) -> OrderedLoads:
    loads = OrderedLoads()
    for number in range(HEADROOM_LOADS_KNOWN):
        loads.begin(Footprint(1))
        loads.end(0.01, began + number * gap_s)
    return loads
