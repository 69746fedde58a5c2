"""Preloads: all versions if they fit together, else pinned ones and a share of the memory in an order of the worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.placement.preloads import FILL_SHARE, Candidate, Preloads, preloads
from millstream.services.placement.views import Footprint, PlacedInstance, WorkerView

BUDGET, BASE = 1000, 100


def worker(*held: str, used: int | None = None, id_: str = "cpu-0-abc") -> WorkerView:
    placed = {name: PlacedInstance(name, Footprint(100, 50), 0, 0) for name in held}
    return WorkerView(id_, "cpu", BUDGET, BASE + 100 * len(held) if used is None else used, instances=placed)


def candidates(*names: str, resident: int = 100, pinned: tuple[str, ...] = ()) -> list[Candidate]:
    return [Candidate(name, Footprint(resident, 50), name in pinned) for name in names]


def test_all_that_fit_together_are_loaded_in_their_order() -> None:
    assert preloads(worker("b"), candidates("c", "b", "a"), BASE) == Preloads(True, ("c", "a"))


def test_without_a_limit_all_fit() -> None:
    unlimited = WorkerView("w-0-a", "cpu", 0, 10_000)
    assert preloads(unlimited, candidates("a", "b", resident=1 << 50), BASE).whole


def test_a_share_is_filled_if_not_all_fit() -> None:
    names = [f"m{i}" for i in range(20)]
    chosen = preloads(worker(), candidates(*names), BASE)
    assert not chosen.whole
    assert BASE + 100 * len(chosen.content_ids) <= FILL_SHARE * BUDGET
    assert len(chosen.content_ids) == 6
    others = preloads(worker(id_="cpu-1-abc"), candidates(*names), BASE).content_ids
    assert set(others) != set(chosen.content_ids), "another worker fills its memory with others"
    again = preloads(worker(id_="cpu-0-def"), candidates(*names), BASE).content_ids
    assert again == chosen.content_ids, "a worker that is started again takes the same"


def test_pinned_versions_come_first_and_may_fill_the_memory() -> None:
    names = [f"m{i}" for i in range(20)]
    chosen = preloads(worker(used=FULL - 150), candidates(*names, pinned=("m7", "m8")), BASE)
    assert chosen.content_ids == ("m7",)


FULL = BUDGET - 50


def test_what_was_put_away_waits_for_an_order() -> None:
    put_away = Candidate("a", Footprint(100), waits=True)
    assert preloads(worker(), [put_away, *candidates("b")], BASE).content_ids == ("b",)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 200), st.booleans(), st.booleans()), max_size=40),
    used=st.integers(0, 1200),
)
def test_preloads_never_exceed_the_budget(sizes: list[tuple[int, int, bool, bool]], used: int) -> None:
    every = [
        Candidate(f"m{i}", Footprint(resident, peak), pinned, waits)
        for i, (resident, peak, pinned, waits) in enumerate(sizes)
    ]
    chosen = preloads(worker(used=used), every, BASE)
    known = {one.content_id: one for one in every}
    loaded = [known[name] for name in chosen.content_ids]
    assert not any(one.waits for one in loaded)
    assert len(set(chosen.content_ids)) == len(chosen.content_ids)
    if not chosen.whole:
        for one in loaded:
            assert used + one.footprint.load_bytes <= BUDGET
            used += one.footprint.resident_bytes
