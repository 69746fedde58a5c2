"""The controller's decisions: within every budget, never against what must stay, few, and the same every time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from millstream.plugins.fleet.planned import Plan, ServedVersion, Unmeasured
from millstream.plugins.fleet.planner import REST_S, UNMET_MAX, UTILISATION_HIGH, plan
from millstream.plugins.fleet.planning_round import ORDER_LIFE_S, ORDERS_MAX, WORKER_LOADS_MAX
from millstream.services.placement.room import make_room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, WorkerView
from millstream.services.wire.orders import OrderReason
from tests.kit.fleets import NOW, accounted, counted, usage_of
from tests.plugins.fleet.situations import situations


def carried_out(workers, orders, versions, now):
    """Return the workers after the orders, each carried out by the worker's own rules."""
    views = {worker.id: worker for worker in workers}
    needs = {version.content_id: version for version in versions}
    for order in orders:
        worker = views[order.worker]
        held = dict(worker.instances)
        if order.do == "unload":
            gone = held.pop(order.content_id, None)
            if gone is None:
                continue  # it went for a load of the same round
            assert not (gone.in_use or gone.pinned or gone.loaded_at == math.inf), "it unloads what must stay"
        else:
            need = needs[order.content_id].footprints[worker.pool]
            assert order.content_id not in held, "it loads what is there"
            victims = make_room(worker, need, now, _below_minimum(views.values(), versions))
            assert not isinstance(victims, Refusal), "it orders a load that the worker must refuse"
            assert order.evict or not victims
            for victim in victims:
                assert not needs[victim].pin
                del held[victim]
            held[order.content_id] = PlacedInstance(order.content_id, need, math.inf, now)
        after = counted(worker, held)
        if order.do == "load":
            assert not worker.budget_bytes or after.used_bytes <= worker.budget_bytes, "it exceeds a budget"
            device_used, device_budget = after.device_used_bytes, worker.device_budget_bytes
            assert not device_budget or device_used <= device_budget, "it exceeds the budget of a device"
            # Its load ends at once.
            after = counted(after, held | {order.content_id: PlacedInstance(order.content_id, need, now, now)})
        views[order.worker] = after
    return list(views.values())


def _below_minimum(workers, versions):
    """Return the versions of which no instance may go: they have no more than `instances_min` of them."""
    counts = Counter(content_id for worker in workers if not worker.draining for content_id in worker.instances)
    return frozenset(one.content_id for one in versions if 0 < counts[one.content_id] <= one.instances_min)


@settings(max_examples=150, deadline=None)
@given(situations)
def test_orders_respect_budgets_and_what_must_stay(situation):
    workers, versions = situation
    decided = plan(workers, versions, Plan(), NOW)
    carried_out(workers, decided.orders, versions, NOW)
    assert len(decided.orders) <= ORDERS_MAX
    draining = {worker.id for worker in workers if worker.draining}
    assert not any(order.do == "load" and order.worker in draining for order in decided.orders)
    for worker in workers:
        begun = sum(one.loaded_at == math.inf for one in worker.instances.values())
        ordered = sum(order.do == "load" and order.worker == worker.id for order in decided.orders)
        assert not ordered or begun + ordered <= WORKER_LOADS_MAX


@settings(max_examples=100, deadline=None)
@given(situations)
def test_limits_of_the_endpoints_hold(situation):
    workers, versions = situation
    decided = plan(workers, versions, Plan(), NOW)
    pools = {worker.id: worker.pool for worker in workers}
    for version in versions:
        mine = [order for order in decided.orders if order.content_id == version.content_id]
        holders = {worker.id for worker in workers if version.content_id in worker.instances and not worker.draining}
        loads = [order for order in mine if order.do == "load"]
        unloads = [order for order in mine if order.do == "unload" and order.worker in holders]
        if version.instances_max:
            for pool in version.pools:
                held = sum(pools[one] == pool for one in holders)
                added = sum(pools[order.worker] == pool for order in loads)
                assert not added or held + added <= version.instances_max
        assert all(pools[order.worker] in version.pools for order in loads)
        if unloads and not version.instances_max:
            assert len(holders) + len(loads) - len(unloads) >= version.instances_min
        assert not (version.pin and unloads)


@settings(max_examples=100, deadline=None)
@given(situations)
def test_a_second_round_with_the_same_facts_neither_repeats_nor_undoes_the_first(situation):
    workers, versions = situation
    first = plan(workers, versions, Plan(), NOW)
    second = plan(workers, versions, first, NOW)
    given_before = {(order.worker, order.content_id) for order in first.orders}
    assert not [order for order in second.orders if (order.worker, order.content_id) in given_before]
    loaded = {order.content_id for order in first.orders if order.do == "load"}
    unloaded = {order.content_id for order in second.orders if order.do == "unload"}
    beyond_max = {one.content_id for one in versions if one.instances_max or one.idle_s}
    assert not (loaded & unloaded) - beyond_max


@settings(max_examples=100, deadline=None)
@given(situations)
def test_it_is_the_same_in_every_order_of_the_facts(situation):
    workers, versions = situation
    turned = [replace(one, instances=dict(reversed(one.instances.items()))) for one in reversed(workers)]
    assert plan(workers, versions, Plan(), NOW).orders == plan(turned, versions[::-1], Plan(), NOW).orders


@settings(max_examples=200, deadline=None)
@given(situations)
def test_rounds_come_to_rest(situation):
    """With unchanging traffic, orders that are carried out lead to a state in which hardly anything is ordered.

    Not nothing: what is never called becomes cheaper to unload with time, and then makes room for what is.
    """
    workers, versions = situation
    workers = [_quiet(worker) for worker in workers if not worker.draining]
    versions = [replace(one, idle_s=0.0, usage=usage_of([]), instances_max=0) for one in versions]
    now, decided, moves = NOW, Plan(), []
    for _ in range(40):
        decided = plan(workers, versions, decided, now)
        moves.append(decided.orders)
        workers = carried_out(workers, decided.orders, versions, now)
        now += REST_S + 1000.0
        called = {version.content_id for version in versions if version.calls_per_s}
        workers = [_later(worker, called, now) for worker in workers]
        versions = [replace(one, last_used=now if one.calls_per_s else one.last_used) for one in versions]
    assert len([order for orders in moves[-20:] for order in orders]) <= 3, moves[-20:]


def _quiet(worker):
    held = {
        content_id: replace(one, loaded_at=0.0, in_use=False, usage=usage_of([]))
        for content_id, one in worker.instances.items()
    }
    return replace(worker, instances=held)


def _later(worker, called, now):
    """Return the worker after its loads: it gives back what it took for loading alone, and calls arrive."""
    held = {
        one: replace(instance, last_used=now) if one in called else instance
        for one, instance in worker.instances.items()
    }
    host, device = accounted(held.values())
    return replace(worker, used_bytes=host, device_used_bytes=device, instances=held)


def _workers(number: int, budget_bytes: int = 1000, pool: str = "cpu") -> list[WorkerView]:
    return [WorkerView(f"{pool}-{at}-1", pool, budget_bytes, 0) for at in range(number)]


def _version(name: str, size: int = 10, **settings: Any) -> ServedVersion:
    return ServedVersion(name, ("cpu",), {"cpu": Footprint(size, 0, 2.0)}, **settings)


def _holding(worker: WorkerView, *names: str, size: int = 10, **facts: Any) -> WorkerView:
    fact = {"loaded_at": 0.0, "last_used": NOW} | facts
    held = {name: PlacedInstance(name, Footprint(size, 0, 2.0), **fact) for name in names}
    return replace(worker, instances={**worker.instances, **held}, used_bytes=worker.used_bytes + size * len(names))


def _orders(workers, versions, before=None, now=NOW):
    before = before or Plan()
    return [(one.do, one.worker, one.content_id, one.reason) for one in plan(workers, versions, before, now).orders]


def test_the_minimum_is_loaded_on_different_workers():
    decided = plan(_workers(5), [_version("m", instances_min=3)], Plan(), NOW).orders
    assert [order.reason for order in decided] == [OrderReason.MINIMUM] * 3
    assert len({order.worker for order in decided}) == 3
    assert decided[0].why == "instance 1 of the 3 that are always loaded"
    assert decided[0].evict


def test_minima_spread_over_workers():
    versions = [_version(f"m{at}", instances_min=1) for at in range(10)]
    decided = plan(_workers(10), versions, Plan(), NOW).orders
    counts = [sum(order.worker == worker.id for order in decided) for worker in _workers(10)]
    assert sum(counts) == 10
    assert max(counts) <= WORKER_LOADS_MAX


def test_a_load_for_the_minimum_does_not_unload_another_one_of_the_minimum():
    holder = _holding(_workers(1, budget_bytes=10)[0], "a")
    assert _orders([holder], [_version("a", instances_min=1), _version("b", instances_min=1)]) == []


@pytest.mark.parametrize(("kept", "tried"), [(0, 1000), (400, 600), (600, 400), (610, None)])
def test_a_version_that_was_never_measured_is_placed_with_the_memory_that_others_leave(kept, tried):
    """Its prediction exceeds all memory for models, 1000, of which a pinned instance has a part."""
    holder = replace(_holding(_workers(1)[0], "pinned", size=kept, pinned=True), room_bytes=1000)
    version = _version("m", size=1800, instances_min=1)
    assert _orders([holder], [version]) == [], "measured, it does not fit"
    version = replace(version, unmeasured={"cpu": Unmeasured(400)})
    decided = plan([holder], [version], Plan(), NOW)
    assert [one.do for one in decided.orders] == ([] if tried is None else ["load"])
    if tried is None:
        return
    # Another one finds nothing beside it, in this round and while the worker does not show the order.
    second = _version("n", size=10, instances_min=1)
    assert [one[2] for one in _orders([holder], [version, second])] == ["m"]
    assert _orders([holder], [version, second], decided, NOW + 1) == []


def test_a_round_looks_for_workers_for_a_part_of_the_minima_that_none_can_meet():
    """Each look takes milliseconds among many workers; in some rounds all have had their turn."""
    workers = _workers(2, 100)
    unmet = [_version(f"m{number:04}", size=1000, instances_min=1) for number in range(3 * UNMET_MAX - 10)]
    last = _version("n", size=10, instances_min=1)
    rounds = [Plan()]
    for number in range(4):
        rounds.append(plan(workers, [*unmet, last], rounds[-1], NOW + number))
    assert [[one.content_id for one in one.orders] for one in rounds[1:]] == [[], [], ["n"], []]
    # The third round begins anew after the last one: 10 of its number are left.
    expected = [unmet[UNMET_MAX - 1], unmet[2 * UNMET_MAX - 1], unmet[9]]
    assert [one.unmet_after for one in rounds[1:4]] == [one.content_id for one in expected]
    few = unmet[: UNMET_MAX - 1]
    assert plan(workers, few, rounds[1], NOW).unmet_after == "", "all had their turn"


def test_minima_that_find_no_place_among_the_orders_of_a_round_come_first_in_the_next():
    workers = _workers(ORDERS_MAX, 1000)
    versions = [_version(f"m{number:04}", instances_min=1) for number in range(ORDERS_MAX + 30)]
    first = plan(workers, versions, Plan(), NOW)
    second = plan(workers, versions, first, NOW + 1)
    assert [one.content_id for one in first.orders + second.orders] == [one.content_id for one in versions]


def test_a_version_is_not_placed_with_memory_that_a_load_found_too_little():
    holder = replace(_holding(_workers(1)[0], "pinned", size=400, pinned=True), room_bytes=1000)
    for too_little, orders in ((600, 1), (601, 0)):
        known = Unmeasured(400, Footprint(too_little))
        version = _version("m", size=1800, instances_min=1, unmeasured={"cpu": known})
        assert len(_orders([holder], [version])) == orders


def test_a_version_is_not_placed_where_its_files_alone_do_not_fit():
    version = _version("m", size=1800, instances_min=1, unmeasured={"cpu": Unmeasured(1001)})
    assert _orders([replace(_workers(1)[0], room_bytes=1000)], [version]) == []


def test_the_next_pool_is_taken_when_the_preferred_one_has_no_room():
    version = replace(
        _version("m", instances_min=1),
        pools=("gpu", "cpu"),
        footprints={"gpu": Footprint(50, 0, 1.0), "cpu": Footprint(10, 0, 1.0)},
    )
    assert [order[1] for order in _orders([*_workers(1), *_workers(1, 40, "gpu")], [version])] == ["cpu-0-1"]
    assert [order[1] for order in _orders([*_workers(1), *_workers(1, 60, "gpu")], [version])] == ["gpu-0-1"]


def test_one_instance_that_is_not_enough_gets_others():
    first, *others = _workers(5)
    version = _version("m", calls_per_s=20.0, run_s=0.05)
    orders = _orders([_holding(first, "m"), *others], [version])
    assert [(do, why) for do, _, _, why in orders] == [("load", OrderReason.LOAD)]
    assert orders[0][1] != first.id


def test_a_number_of_instances_between_the_two_bounds_stays():
    workers = [_holding(worker, "m") for worker in _workers(3)]
    for load in (0.81, 1.2, 2.0):
        version = _version("m", calls_per_s=load * 10, run_s=0.1)
        assert _orders(workers, [version]) == [], load
    seldom = _version("m", calls_per_s=0.1, run_s=0.1)
    assert _orders(workers, [seldom]) == []  # memory is plentiful: its workers loaded what fits
    fuller = [replace(worker, used_bytes=800) for worker in workers]
    assert _orders(fuller, [seldom])[0][0::3] == ("unload", OrderReason.SURPLUS)


def test_what_a_draining_worker_has_is_loaded_elsewhere_first_and_unloaded_there_afterwards():
    leaving, other = _workers(2)
    leaving = replace(_holding(leaving, "m", in_use=False), draining=True)
    version = _version("m", calls_per_s=1.0, run_s=0.01, last_used=NOW, usage=usage_of([1.5] * 5))
    assert _orders([leaving, other], [version]) == [("load", other.id, "m", OrderReason.DRAIN)]
    assert _orders([leaving, _holding(other, "m", loaded_at=math.inf)], [version]) == []
    assert _orders([leaving, _holding(other, "m")], [version]) == [("unload", leaving.id, "m", OrderReason.DRAIN)]


def test_what_idles_is_unloaded_but_not_below_the_minimum():
    workers = [_holding(worker, "m", last_used=NOW - 400) for worker in _workers(3)]
    orders = _orders(workers, [_version("m", idle_s=300.0, instances_min=1, last_used=NOW - 400)])
    assert [(do, why) for do, _, _, why in orders] == [("unload", OrderReason.IDLE)] * 2
    assert plan(workers, [_version("m", idle_s=300.0)], Plan(), NOW).orders[0].why == "idle for 400 s"
    assert _orders(workers[:1], [_version("m", idle_s=500.0)]) == []


def test_what_idles_in_use_or_pinned_stays():
    for fact in ({"in_use": True}, {"pinned": True}, {"loaded_at": math.inf}):
        worker = _holding(_workers(1)[0], "m", **({"last_used": NOW - 400} | fact))
        assert _orders([worker], [_version("m", idle_s=300.0)]) == []


def test_a_call_like_clockwork_finds_its_model_loaded():
    version = _version("m", usage=usage_of([3600.0] * 40), last_used=NOW)
    assert _orders(_workers(2), [version], now=NOW + 3000) == []
    (order,) = plan(_workers(2), [version], Plan(), NOW + 3590).orders
    assert order.reason is OrderReason.PREFETCH
    assert order.why == "a call is expected in 10 s"
    assert _orders(_workers(2), [version], now=NOW + 3700) == [], "the call did not come: no further load for it"


def test_a_prefetch_unloads_nothing_that_is_called_sooner():
    busy = _holding(_workers(1, budget_bytes=10)[0], "often", usage=usage_of([5.0] * 10), last_used=NOW + 3588)
    version = _version("m", usage=usage_of([3600.0] * 10), last_used=NOW)
    assert _orders([busy], [version, _version("often")], now=NOW + 3590) == []


def test_a_regular_model_gets_a_second_instance_only_while_memory_is_plentiful():
    first, second = _workers(2, budget_bytes=100)
    version = _version("m", usage=usage_of([900.0, 1100.0, 800.0, 1400.0]), last_used=NOW)
    assert [one[0::3] for one in _orders([_holding(first, "m"), second], [version])] == [("load", OrderReason.REGULAR)]
    assert _orders([_holding(first, "m"), _holding(second, "a", size=70)], [version]) == []
    full = [_holding(_holding(worker, "m"), "a", "b", size=44) for worker in (first, second)]
    assert [one[0::3] for one in _orders(full, [version])] == [("unload", OrderReason.SURPLUS)]


def test_versions_of_a_busy_worker_move_to_an_idle_one():
    hot, idle = _workers(2)
    hot = _holding(hot, "a", "b", "c")
    versions = [_version(name, calls_per_s=3.0, run_s=0.1) for name in "abc"]
    decided = plan([hot, idle], versions, Plan(), NOW)
    assert [(one.do, one.worker, one.reason) for one in decided.orders] == [("load", idle.id, OrderReason.SPREAD)]
    moved = decided.orders[0].content_id
    idle = _holding(idle, moved)
    later = plan([hot, idle], versions, decided, NOW + 10.0)
    assert later.orders == (), "it rests after a move"
    versions = [replace(one, calls_per_s=3.9) for one in versions]
    last = plan([hot, idle], versions, later, NOW + REST_S + 1.0)
    assert UTILISATION_HIGH < 2.5 * 0.39
    assert [(one.do, one.worker, one.content_id) for one in last.orders][:1] == [("unload", hot.id, moved)]


def test_an_order_that_no_worker_carried_out_is_repeated_after_a_while():
    version = _version("m", instances_min=1)
    first = plan(_workers(1), [version], Plan(), NOW)
    assert plan(_workers(1), [version], first, NOW + ORDER_LIFE_S - 1).orders == ()
    assert len(plan(_workers(1), [version], first, NOW + ORDER_LIFE_S + 1).orders) == 1


def test_a_round_has_a_limited_number_of_orders():
    versions = [_version(f"m{at}", instances_min=1) for at in range(400)]
    assert len(plan(_workers(200), versions, Plan(), NOW).orders) == ORDERS_MAX


def test_a_large_version_finds_its_place_among_many_small_ones():
    """Small pinned versions are spread; a large one still gets in, for unpinned ones go."""
    workers = [_holding(worker, *(f"{worker.id}-{at}" for at in range(90))) for worker in _workers(4)]
    large = _version("large", size=600, instances_min=1)
    (order,) = plan(workers, [large], Plan(), NOW).orders
    assert order.content_id == "large"
