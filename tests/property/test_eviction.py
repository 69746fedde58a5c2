"""What a worker unloads for a load: enough, never what must stay, the cheapest, and the same every time."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.placement.room import cost_of, freed_bytes, make_room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView
from tests.kit.fleets import IDS, NOW, counted, footprints, usage_of, workers

protected_ids = st.frozensets(st.sampled_from(IDS), max_size=3)


def _after(worker: WorkerView, gone: Collection[str]) -> WorkerView:
    """Return the worker after it has unloaded instances, as its account counts it."""
    return counted(worker, {one: instance for one, instance in worker.instances.items() if one not in gone})


def _evictable(worker: WorkerView, protected: Collection[str]) -> list[PlacedInstance]:
    return [
        one
        for one in worker.instances.values()
        if not (one.in_use or one.pinned or one.loaded_at == math.inf or one.content_id in protected)
    ]


@given(workers, footprints, protected_ids)
def test_it_makes_enough_room_and_unloads_nothing_that_must_stay(worker, need, protected):
    victims = make_room(worker, need, NOW, protected)
    if isinstance(victims, Refusal):
        return
    assert _after(worker, victims).has_room(need)
    assert set(victims) <= {one.content_id for one in _evictable(worker, protected)}
    for one in victims:
        assert not _after(worker, set(victims) - {one}).has_room(need), "none is unloaded without need"


@given(workers, footprints, protected_ids)
def test_it_finds_room_exactly_when_some_set_of_evictable_instances_makes_it(worker, need, protected):
    evictable = [one.content_id for one in _evictable(worker, protected)]
    sets = [gone for size in range(len(evictable) + 1) for gone in combinations(evictable, size)]
    possible = any(_after(worker, gone).has_room(need) for gone in sets)
    assert possible == (not isinstance(make_room(worker, need, NOW, protected), Refusal))


@given(workers, footprints, protected_ids)
def test_it_says_why_it_refuses(worker, need, protected):
    answer = make_room(worker, need, NOW, protected)
    if not isinstance(answer, Refusal):
        return
    everything = _after(worker, [one.content_id for one in _evictable(worker, protected)])
    assert not everything.has_room(need)
    assert (answer.kind is RefusalKind.TOO_LARGE) == (not _after(worker, worker.instances).has_room(need))
    short = everything if answer.kind is RefusalKind.NOTHING_EVICTABLE else _after(worker, worker.instances)
    of_device = need.load_bytes <= short.free_bytes  # it names the memory that is short
    assert ("device memory" in answer.reason) == of_device
    assert f"{need.device_load_bytes if of_device else need.load_bytes} bytes" in answer.reason


@given(workers, footprints, protected_ids, st.integers(0, 2000))
def test_what_is_on_its_way_out_counts_as_free(worker, need, protected, leaving):
    """However long it takes to close what was unloaded, nothing more is unloaded for the same need."""
    worker = replace(worker, used_bytes=worker.used_bytes + leaving, leaving_bytes=leaving)
    first = make_room(worker, need, NOW, protected)
    if isinstance(first, Refusal):
        return
    stay = {one: instance for one, instance in worker.instances.items() if one not in first}
    host, device = freed_bytes(worker, first)
    unloading = replace(worker, instances=stay, leaving_bytes=leaving + host, device_leaving_bytes=device)
    assert make_room(unloading, need, NOW, protected) == ()


@given(workers, footprints)
def test_it_is_the_same_in_every_order_of_the_instances(worker, need):
    turned = replace(worker, instances=dict(reversed(worker.instances.items())))
    assert make_room(worker, need, NOW) == make_room(turned, need, NOW)


def _worker(*instances: PlacedInstance, budget_bytes: int) -> WorkerView:
    used_bytes = sum(one.footprint.resident_bytes for one in instances)
    return WorkerView("cpu-1", "cpu", budget_bytes, used_bytes, instances={one.content_id: one for one in instances})


def _instance(name: str, size: int, load_s: float, gap_s: float, idle_s: float) -> PlacedInstance:
    return PlacedInstance(name, Footprint(size, 0, load_s), 0.0, NOW - idle_s, usage=usage_of([gap_s] * 8))


def test_what_is_quick_to_load_again_goes_before_what_is_older():
    quick = _instance("quick", 100, 1.0, 300.0, 10.0)
    slow = _instance("slow", 100, 30.0, 300.0, 200.0)
    assert make_room(_worker(quick, slow, budget_bytes=200), Footprint(100), NOW) == ("quick",)


def test_what_is_called_next_hour_goes_before_what_is_called_next_minute():
    hourly = _instance("hourly", 100, 5.0, 3600.0, 10.0)  # called 10 s ago, and not again for an hour
    often = _instance("often", 100, 5.0, 60.0, 50.0)
    assert make_room(_worker(hourly, often, budget_bytes=200), Footprint(100), NOW) == ("hourly",)


def test_one_large_seldom_called_instance_goes_before_many_small_ones():
    large = _instance("large", 1000, 5.0, 7200.0, 3000.0)
    small = [_instance(f"small-{number}", 10, 5.0, 300.0, 60.0) for number in range(20)]
    assert make_room(_worker(large, *small, budget_bytes=1200), Footprint(500), NOW) == ("large",)


def test_a_dear_victim_stays_when_a_cheaper_large_one_is_enough():
    little = _instance("little", 10, 0.001, 1e5, 3000.0)
    large = _instance("large", 1000, 50.0, 1e5, 3000.0)
    victims = make_room(_worker(little, large, budget_bytes=1010), Footprint(900), NOW)
    assert victims == ("large",), "the little one alone would not do, and is not needed beside the large one"
    assert cost_of([little], NOW) < cost_of([large], NOW)


def _refused(worker: WorkerView, need: Footprint) -> Refusal:
    answer = make_room(worker, need, NOW)
    assert isinstance(answer, Refusal)
    return answer


def test_several_with_large_peaks_go_together_where_one_alone_frees_little():
    """A worker counts the largest peak alone: unloading one of two equal ones frees no peak, both free one."""
    two = [PlacedInstance(name, Footprint(10, 100, 1.0), 0.0, 0.0) for name in ("one", "two")]
    worker = WorkerView("cpu-1", "cpu", 130, 120, instances={one.content_id: one for one in two})
    assert make_room(worker, Footprint(100), NOW) == ("one", "two")
    assert make_room(worker, Footprint(20), NOW) == ("one",)
    assert _refused(worker, Footprint(131)).kind is RefusalKind.TOO_LARGE


def test_the_memory_of_the_device_alone_decides_where_it_alone_is_short():
    held = {
        "host": PlacedInstance("host", Footprint(500, 0, 1.0), 0.0, 0.0),
        "both": PlacedInstance("both", Footprint(10, 0, 30.0, device_resident_bytes=300), 0.0, 0.0),
    }
    worker = WorkerView("gpu-1", "gpu", 1000, 510, instances=held, device_budget_bytes=400, device_used_bytes=300)
    assert make_room(worker, Footprint(100, device_resident_bytes=100), NOW) == ()
    assert make_room(worker, Footprint(100, device_resident_bytes=200), NOW) == ("both",)
    assert make_room(worker, Footprint(600, device_resident_bytes=100), NOW) == ("host",)
    assert make_room(worker, Footprint(1000, device_resident_bytes=400), NOW) == ("host", "both")
    refusal = _refused(worker, Footprint(100, device_resident_bytes=500))
    assert refusal.kind is RefusalKind.TOO_LARGE
    assert refusal.reason == "it takes 500 bytes of device memory, and a worker of pool gpu has 400 bytes for models"


def test_memory_that_is_not_free_yet_makes_nothing_too_large() -> None:
    """What an unload or another load takes for now is no part of the memory that a model can never have."""
    need = Footprint(600)
    beside_an_unload = WorkerView("cpu-1", "cpu", 1000, 700)
    refusal = make_room(replace(beside_an_unload, room_bytes=900), need, NOW)
    assert isinstance(refusal, Refusal)
    assert refusal.kind is RefusalKind.NOTHING_EVICTABLE
    refusal = make_room(replace(beside_an_unload, room_bytes=500), need, NOW)
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, refusal.reason) == (
        RefusalKind.TOO_LARGE,
        "it takes 600 bytes of memory, and a worker of pool cpu has 500 bytes for models",
    )


def test_a_refusal_beside_a_load_in_progress_says_that_models_may_be_loading() -> None:
    loading = PlacedInstance("other", Footprint(700), math.inf, NOW)
    worker = WorkerView("cpu-1", "cpu", 1000, 700, instances={"other": loading}, room_bytes=1000)
    refusal = _refused(worker, Footprint(400))
    assert refusal.kind is RefusalKind.NOTHING_EVICTABLE
    assert refusal.reason == (
        "it takes 400 bytes of memory, 300 bytes are free, and all other models are in use, pinned or still loading"
    )
