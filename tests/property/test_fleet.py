"""A fleet chooses as a look at all workers does, whatever was added, changed, ordered and removed before."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.services.placement.fleet import CLASSES_PER_OCTAVE, CLOSE_LOADS, QUOTE_LIFE_S, Fleet, rendezvous
from millstream.services.placement.room import cost_of, make_room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView
from tests.kit.fleets import NOW, fleets, footprints, workers


def _fleet(views) -> Fleet:
    fleet = Fleet()
    for view in views:
        fleet.update(view)
    return fleet


def _choice(views, content_id: str, need: Footprint, now: float) -> list[str] | Refusal:
    return _fleet(views).choose(content_id, need, now, limit=len(views))


def _first(fleet: Fleet, content_id: str) -> str:
    chosen = fleet.choose(content_id, Footprint(1), NOW)
    assert not isinstance(chosen, Refusal)
    return chosen[0]


def _exact_price(worker: WorkerView, need: Footprint) -> float:
    victims = make_room(worker, need, NOW)
    if worker.draining or isinstance(victims, Refusal):
        return math.inf
    return worker.loading_s + cost_of(map(worker.instances.__getitem__, victims), NOW)


@given(fleets, footprints)
def test_it_finds_a_worker_exactly_when_there_is_one(views, need):
    answer = _choice(views, "m:1:x", need, NOW)
    prices = {view.id: _exact_price(view, need) for view in views}
    if isinstance(answer, Refusal):
        assert min(prices.values()) == math.inf
    else:
        assert answer
        assert all(prices[worker] < math.inf for worker in answer)
        assert len(set(answer)) == len(answer)


@given(fleets, footprints)
def test_the_best_is_about_as_cheap_as_the_cheapest(views, need):
    """A price is that of a size class: of at most 2 ** 1/2 as many bytes."""
    answer = _choice(views, "m:1:x", need, NOW)
    if isinstance(answer, Refusal):
        return
    step = 2 ** (1 / CLASSES_PER_OCTAVE)
    wider = Footprint(
        math.ceil(need.load_bytes * step),
        0,
        need.load_s,
        device_resident_bytes=math.ceil(need.device_load_bytes * step),
    )
    bound = min(_bound(view, wider) for view in views)
    by_id = {view.id: view for view in views}
    if bound < math.inf:
        assert _exact_price(by_id[answer[0]], need) <= bound + CLOSE_LOADS * need.load_s + 1e-6


def _bound(worker: WorkerView, need: Footprint) -> float:
    """The price without the saving of victims that turn out not to be needed."""
    victims = make_room(worker, need, NOW)
    if worker.draining or isinstance(victims, Refusal):
        return math.inf
    settled = [one for one in worker.instances.values() if not (one.in_use or one.pinned or one.loaded_at == math.inf)]
    return worker.loading_s + cost_of(settled, NOW) if victims else worker.loading_s


@given(fleets, fleets, st.randoms(use_true_random=False), footprints)
def test_differences_lead_to_the_same_choice_as_a_new_fleet(before, after, order, need):
    fleet = _fleet(before)
    fleet.choose("m:1:x", need, NOW)
    names = {view.id for view in after}
    for view in before:
        if view.id not in names:
            fleet.remove(view.id)
    shuffled = list(after)
    order.shuffle(shuffled)
    for view in shuffled:
        fleet.update(view)
    fresh = _fleet(after)
    for content_id in ("a:1:x", "b:1:x"):
        assert fleet.choose(content_id, need, NOW) == fresh.choose(content_id, need, NOW)
    assert fleet.ids() == fresh.ids()


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), footprints), max_size=8), workers)
def test_orders_together_never_exceed_the_budget(orders, view):
    if not view.budget_bytes:
        return
    fleet = _fleet([replace(view, draining=False)])
    for name, need in orders:
        if fleet.choose(name, need, NOW) == [view.id]:
            fleet.order(view.id, name, need, NOW)
            assert fleet[view.id].used_bytes <= view.budget_bytes
            assert not view.device_budget_bytes or fleet[view.id].device_used_bytes <= view.device_budget_bytes


def _many(number: int, free_bytes: int = 1000) -> list[WorkerView]:
    return [WorkerView(f"cpu-{at}-7", "cpu", free_bytes, 0) for at in range(number)]


def test_versions_spread_over_free_workers():
    fleet = _fleet(_many(20))
    first = [_first(fleet, f"m{at}:1:x") for at in range(2000)]
    counts = {worker.id: first.count(worker.id) for worker in _many(20)}
    assert min(counts.values()) > 60, counts
    assert max(counts.values()) < 150, counts


def test_a_version_comes_back_to_its_worker_after_a_restart_and_few_move_when_one_leaves():
    fleet = _fleet(_many(20))
    before = {name: _first(fleet, name) for name in map(str, range(500))}
    fleet.remove("cpu-3-7")
    fleet.update(WorkerView("cpu-5-8", "cpu", 1000, 0))
    fleet.remove("cpu-5-7")
    after = {name: _first(fleet, name) for name in before}
    assert all(after[name] == "cpu-5-8" for name, worker in before.items() if worker == "cpu-5-7")
    moved = [name for name, worker in before.items() if after[name] != worker and worker != "cpu-5-7"]
    assert all(before[name] == "cpu-3-7" for name in moved)


def test_a_worker_with_loads_in_progress_comes_after_one_without():
    idle, busy = _many(2)
    loading = PlacedInstance("a", Footprint(1, 0, 9.0), math.inf, NOW, in_use=True)
    busy = replace(busy, instances={"a": loading})
    for name in map(str, range(20)):
        assert _choice([busy, idle], name, Footprint(1, 0, 1.0), NOW) == [idle.id, busy.id]


def test_a_fleet_without_workers_refuses():
    answer = Fleet().choose("m:1:x", Footprint(1), NOW)
    assert isinstance(answer, Refusal)
    assert answer.kind is RefusalKind.NO_WORKER
    draining = _choice([replace(_many(1)[0], draining=True)], "m:1:x", Footprint(1), NOW)
    assert isinstance(draining, Refusal)
    assert draining.kind is RefusalKind.NO_WORKER


def test_a_size_just_below_the_budget_is_not_refused_for_its_class():
    assert _choice(_many(3, 1000), "m:1:x", Footprint(1000), NOW) != []
    assert isinstance(_choice(_many(3, 1000), "m:1:x", Footprint(1001), NOW), Refusal)


def test_a_choice_makes_only_the_quotes_of_workers_that_changed():
    views = _many(200)
    fleet = _fleet(views)
    fleet.choose("m:1:x", Footprint(1), NOW)
    assert fleet.quoted == 200
    for at in range(1000):
        chosen = fleet.choose(f"m{at}:1:x", Footprint(1), NOW + at / 1000)
        assert not isinstance(chosen, Refusal)
        fleet.update(fleet[chosen[0]])
    assert fleet.quoted < 200 + 1000, "one changed worker at each choice"
    for at in range(1000):  # nothing fits: the quotes serve a while
        assert isinstance(fleet.choose(f"n{at}:1:x", Footprint(5000), NOW + 1 + at / 1000), Refusal)
    assert fleet.quoted <= 200 + 1000 + 200 * (1 + 1 / QUOTE_LIFE_S)


@given(fleets)
def test_ranked_workers_are_all_that_go_on_in_the_versions_own_order(views):
    ranked = _fleet(views).ranked("m:1:x", 100, exclude=["cpu-1-1"])
    assert sorted(ranked) == sorted(view.id for view in views if not view.draining and view.id != "cpu-1-1")
    assert ranked == sorted(ranked, key=lambda worker: rendezvous("m:1:x", worker))


@settings(max_examples=30)
@given(fleets, footprints)
def test_workers_that_are_excluded_are_not_offered(views, need):
    fleet = _fleet(views)
    offers = fleet.offers("m:1:x", need, NOW, exclude=["cpu-0-1", "unknown"])
    assert isinstance(offers, Refusal) or all(worker != "cpu-0-1" for worker, _ in offers)


def test_rendezvous_is_the_same_in_all_processes():
    assert rendezvous("m:1:x", "cpu-1-7") == rendezvous("m:1:x", "cpu-1-8") == 4671176021028060008
