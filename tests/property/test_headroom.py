"""What a worker unloads ahead of calls: little, nothing that must stay, and nothing that is called before."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.placement.preloads import (
    HEADROOM_LOAD_S_MAX,
    HEADROOM_LOADS_MAX,
    HEADROOM_SHARE_MAX,
    Headroom,
    headroom_of,
    unloaded_ahead,
)
from millstream.services.placement.room import make_room
from millstream.services.placement.usage import NO_USAGE
from millstream.services.placement.views import UNLIMITED_BYTES, Footprint, PlacedInstance, Refusal, WorkerView
from tests.kit.fleets import IDS, NOW, footprints, usage_of, workers

sizes = st.integers(0, 10_000)
headrooms = st.builds(lambda one: Headroom(one, one, 1), footprints)


@given(footprints, sizes, sizes)
def test_it_is_a_small_part_of_the_memory_and_at_most_a_few_loads(last, models_bytes, device_models_bytes):
    headroom = headroom_of(last, models_bytes, device_models_bytes)
    if headroom is None:
        one_fits = last.load_bytes <= HEADROOM_SHARE_MAX * models_bytes
        one_fits_device = last.device_load_bytes <= HEADROOM_SHARE_MAX * device_models_bytes
        assert last.load_s > HEADROOM_LOAD_S_MAX or not (one_fits and one_fits_device)
        return
    assert last.load_s <= HEADROOM_LOAD_S_MAX
    assert 1 <= headroom.loads <= HEADROOM_LOADS_MAX
    assert headroom.high.load_bytes <= HEADROOM_SHARE_MAX * models_bytes
    assert headroom.high.device_load_bytes <= HEADROOM_SHARE_MAX * device_models_bytes
    assert last.load_bytes <= headroom.low.load_bytes <= headroom.high.load_bytes
    assert last.device_load_bytes <= headroom.low.device_load_bytes <= headroom.high.device_load_bytes


@given(workers, headrooms, st.floats(0, 1e5), st.frozensets(st.sampled_from(IDS), max_size=3))
def test_what_goes_ahead_would_go_for_the_next_loads_anyway(worker, headroom, gap_s, protected):
    victims = unloaded_ahead(worker, headroom, gap_s, NOW, protected)
    anyway = make_room(worker, headroom.high, NOW, protected)
    if isinstance(anyway, Refusal):
        assert victims == ()
    else:
        assert set(victims) <= set(anyway)


@given(workers, headrooms)
def test_nothing_that_is_called_before_the_room_is_used_goes(worker, headroom):
    often = usage_of([5.0] * 8)
    instances = {
        name: replace(one, usage=often, last_used=NOW - 1.0, loaded_at=min(one.loaded_at, NOW - 1e5))
        for name, one in worker.instances.items()
    }
    assert unloaded_ahead(replace(worker, instances=instances), headroom, 60.0, NOW) == ()


def _full_worker(*instances: PlacedInstance) -> WorkerView:
    held = {one.content_id: one for one in instances}
    return WorkerView("cpu-1", "cpu", 100 * len(held), 100 * len(held), instances=held)


def test_what_was_never_called_goes_for_one_load():
    never, called = (PlacedInstance(name, Footprint(100, 0, 0.01), 0.0, 0.0) for name in ("never", "called"))
    called = replace(called, last_used=NOW - 10, usage=usage_of([20.0]))
    headroom = headroom_of(Footprint(100, 0, 0.01), 1600, UNLIMITED_BYTES)
    assert headroom == Headroom(Footprint(100, 0, 0.01), Footprint(100, 0, 0.01), 1)
    assert unloaded_ahead(_full_worker(never, called), headroom, 1.0, NOW) == ("never",)


def test_models_that_are_called_as_often_as_others_are_missed_stay():
    """A worker with one model too many: another miss for each miss would never end."""
    hot = [
        PlacedInstance(f"hot-{number}", Footprint(100, 0, 0.01), 0.0, NOW - number, usage=usage_of([10.0] * 8))
        for number in range(10)
    ]
    headroom = headroom_of(Footprint(100, 0, 0.01), 100 * 64, UNLIMITED_BYTES)
    assert headroom is not None
    assert headroom.loads == HEADROOM_LOADS_MAX
    assert unloaded_ahead(_full_worker(*hot), headroom, 5.0, NOW) == ()
    seldom = replace(hot[0], content_id="seldom", last_used=NOW - 3600, usage=NO_USAGE)
    assert unloaded_ahead(_full_worker(*hot, seldom), headroom, 5.0, NOW) == ("seldom",)


def test_several_loads_need_their_peak_once():
    headroom = headroom_of(Footprint(10, 30, 0.01), 16 * 70, UNLIMITED_BYTES)
    assert headroom == Headroom(Footprint(20, 30, 0.01), Footprint(40, 30, 0.01), 4)
