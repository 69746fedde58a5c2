"""Quotas of keys over several workers that tell each other what they hold: what fits at last is loaded."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.placement.line import Wait
from millstream.services.placement.quota import Held, Quota, counted, read_held, write_held
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, WorkerView

NOW = 1000.0
LIMIT = 100


def instance(name: str, size: int, *, pinned: bool) -> PlacedInstance:
    return PlacedInstance(name, Footprint(size, load_s=1.0, measured=True), 1.0, 500.0, pinned=pinned)


Workers = dict[str, dict[str, PlacedInstance]]
HOLDINGS = st.lists(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=4), min_size=1, max_size=4)


def workers_of(holdings: list[list[tuple[int, bool]]]) -> Workers:
    return {
        f"cpu-{index}": {
            f"m{index}-{number}": instance(f"m{index}-{number}", size, pinned=pinned)
            for number, (size, pinned) in enumerate(held)
        }
        for index, held in enumerate(holdings)
    }


def held(instances: dict[str, PlacedInstance], wanted: int = 0) -> Held:
    sizes = {one: counted(placed.footprint) for one, placed in instances.items()}
    return Held(sum(sizes.values()), sum(sizes[one] for one, placed in instances.items() if placed.pinned), wanted)


def quota(workers: Workers, worker: str, wants: dict[str, int]) -> Quota:
    told = {name: held(instances, wants.get(name, 0)) for name, instances in workers.items()}
    return Quota("key", LIMIT, worker, told.pop(worker), told)


def view(workers: Workers, worker: str) -> WorkerView:
    return WorkerView(worker, "cpu", 0, 0, instances=workers[worker])


def free_for_others(workers: Workers, wants: dict[str, int]) -> set[str]:
    """Let each worker free what it is to free, all of them at the same time; return what went."""
    over = {name: quota(workers, name, wants).over(view(workers, name), (), NOW, ()) for name in workers}
    for name, victims in over.items():
        for victim in victims:
            del workers[name][victim]
    return {victim for victims in over.values() for victim in victims}


@given(HOLDINGS, st.integers(1, 130))
def test_a_load_begins_as_soon_as_what_may_go_has_gone(holdings: list[list[tuple[int, bool]]], size: int) -> None:
    workers = workers_of(holdings)
    stays = sum(held(one).stays for one in workers.values())
    need = Footprint(size, measured=True)
    wants: dict[str, int] = {}
    for _ in range(20):
        mine = quota(workers, "cpu-0", {})
        if mine.allows(need):
            break
        found, wanted = mine.make_way(view(workers, "cpu-0"), (), need, NOW, (), called=True)
        if isinstance(found, Refusal):
            break
        assert not isinstance(found, Wait)
        for victim in found:
            del workers["cpu-0"][victim]
        wants = {"cpu-0": wanted}
        free_for_others(workers, wants)
    assert quota(workers, "cpu-0", {}).allows(need) == (stays + size <= LIMIT)


@given(HOLDINGS)
def test_a_quota_that_was_lowered_is_kept_and_nothing_more_goes_than_must(
    holdings: list[list[tuple[int, bool]]],
) -> None:
    workers = workers_of(holdings)
    before = {one: placed for instances in workers.values() for one, placed in instances.items()}
    gone: set[str] = set()
    while now := free_for_others(workers, {}):
        gone |= now
    left = sum(held(one).taken for one in workers.values())
    stays = sum(held(one).stays for one in workers.values())
    assert left <= max(LIMIT, stays)
    assert not any(before[one].pinned for one in gone)
    if gone and stays <= LIMIT:
        assert left + sum(counted(before[one].footprint) for one in gone) > LIMIT


def test_one_that_was_never_measured_is_tried_with_the_whole_quota() -> None:
    alone = quota({"cpu-0": {}}, "cpu-0", {})
    assert alone.allows(Footprint(5 * LIMIT))
    assert not alone.allows(Footprint(5 * LIMIT, measured=True))
    found, wanted = alone.make_way(
        view({"cpu-0": {}}, "cpu-0"), (), Footprint(5 * LIMIT, measured=True), NOW, (), called=True
    )
    assert isinstance(found, Refusal)
    assert (found.reason, wanted) == ("it takes 500 bytes, and the models of key 'key' may take 100 bytes of memory", 0)


def test_what_is_in_use_has_its_residence_before_it_goes_for_another_worker() -> None:
    busy = replace(instance("m", 80, pinned=False), in_use=True, loaded_at=NOW - 0.1)
    workers = {"cpu-0": {}, "cpu-1": {"m": busy}}
    assert free_for_others(workers, {"cpu-0": 50}) == set()
    workers["cpu-1"]["m"] = replace(busy, loaded_at=NOW - 60)
    assert free_for_others(workers, {}) == set()
    assert free_for_others(workers, {"cpu-0": 50}) == {"m"}


@given(st.dictionaries(st.text(max_size=5), st.builds(Held, *[st.integers(0, 1 << 60)] * 3)))
def test_what_a_worker_tells_is_read_until_it_expires(told: dict[str, Held]) -> None:
    assert read_held(write_held(told, NOW), NOW - 1) == told
    assert read_held(write_held(told, NOW), NOW) == {}
    for other in (b"", b"{}", b"[1]", b"nothing", b'[1e999,{"a":[1]}]'):
        assert read_held(other, NOW) == {}
