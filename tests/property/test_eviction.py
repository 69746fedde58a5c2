"""What a worker unloads for a load: enough, never what must stay, the cheapest, and the same every time."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.placement.eviction import RESIDENCE_LOADS, cost_of, is_settled, make_room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView
from tests.kit.fleets import IDS, NOW, footprints, usage_of, workers

protected_ids = st.frozensets(st.sampled_from(IDS), max_size=3)


@given(workers, footprints, protected_ids)
def test_it_makes_enough_room_and_unloads_nothing_that_must_stay(worker, need, protected):
    victims = make_room(worker, need, NOW, protected)
    if isinstance(victims, Refusal):
        return
    gone = [worker.instances[one] for one in victims]
    freed_bytes = sum(one.footprint.resident_bytes for one in gone)
    assert need.load_bytes <= worker.free_bytes + freed_bytes
    assert not any(one.in_use or one.pinned or one.loaded_at == math.inf for one in gone)
    assert not protected & set(victims)
    assert all(is_settled(one, NOW) for one in gone)
    # none is unloaded without need
    for one in gone:
        assert need.load_bytes > worker.free_bytes + freed_bytes - one.footprint.resident_bytes


@given(workers, footprints, protected_ids)
def test_it_refuses_only_when_it_must_and_says_why(worker, need, protected):
    answer = make_room(worker, need, NOW, protected)
    may_go = [
        one
        for one in worker.instances.values()
        if not (one.in_use or one.pinned or one.loaded_at == math.inf or one.content_id in protected)
    ]
    settled_bytes = sum(one.footprint.resident_bytes for one in may_go if is_settled(one, NOW))
    assert isinstance(answer, Refusal) == (worker.free_bytes + settled_bytes < need.load_bytes)
    if not isinstance(answer, Refusal):
        return
    later = replace(
        worker,
        instances={
            one: replace(worker.instances[one], loaded_at=0.0)
            for one in worker.instances
            if worker.instances[one].loaded_at < math.inf
        }
        | {one.content_id: one for one in worker.instances.values() if one.loaded_at == math.inf},
    )
    if answer.kind is RefusalKind.THRASHING:
        assert answer.retry_after_s > 0
        assert not isinstance(make_room(later, need, NOW, protected), Refusal), "time alone mends it"
    else:
        assert isinstance(make_room(later, need, NOW, protected), Refusal)


@given(workers, footprints)
def test_it_is_the_same_in_every_order_of_the_instances(worker, need):
    turned = replace(worker, instances=dict(reversed(worker.instances.items())))
    assert make_room(worker, need, NOW) == make_room(turned, need, NOW)


@given(workers, footprints)
def test_after_the_load_the_same_need_finds_no_victim_twice(worker, need):
    """Two versions do not take turns: what was just loaded stays for a multiple of its load time."""
    victims = make_room(worker, need, NOW)
    if isinstance(victims, Refusal) or not worker.budget_bytes or not need.load_s:
        return
    freed = sum(worker.instances[one].footprint.resident_bytes for one in victims)
    loaded = PlacedInstance("new:1:x", need, loaded_at=NOW, last_used=NOW)
    stay = {one: instance for one, instance in worker.instances.items() if one not in victims}
    after = replace(
        worker, used_bytes=worker.used_bytes - freed + need.resident_bytes, instances={**stay, "new:1:x": loaded}
    )
    again = make_room(after, need, NOW + RESIDENCE_LOADS * need.load_s * 0.99)
    assert isinstance(again, Refusal) or "new:1:x" not in again


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
