"""A stateful machine over the account of a worker's memory: reserve, settle, fail, unload, free, and leaks."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.services.placement.views import Footprint
from millstream.workers.memory_budget import MemoryBudget

BASE, BUDGET = 100, 1000
NAMES = st.sampled_from("abcde")
FOOTPRINTS = st.builds(Footprint, st.integers(0, 600), st.integers(0, 300))


class Account(RuleBasedStateMachine):
    """`process` is what the process really has; the machine predicts what each operation must do."""

    def __init__(self) -> None:
        super().__init__()
        self.process = BASE
        self.budget = MemoryBudget(BUDGET, lambda: self.process)
        self.loading: dict[str, Footprint] = {}
        self.loaded: dict[str, Footprint] = {}
        self.unloading: dict[str, int] = {}

    @property
    def accounted(self) -> int:
        promised = sum(one.load_bytes for one in self.loading.values())
        resident = sum(one.resident_bytes for one in self.loaded.values())
        peak = max((one.peak_bytes for one in self.loaded.values()), default=0)
        return BASE + resident + peak + promised + sum(self.unloading.values())

    def known(self) -> set[str]:
        return {*self.loading, *self.loaded, *self.unloading}

    @rule(name=NAMES, need=FOOTPRINTS)
    def reserve(self, name: str, need: Footprint) -> None:
        if name in self.known():
            return
        fits = max(self.accounted, self.process) + need.load_bytes <= BUDGET
        assert self.budget.reserve(name, need) == fits
        if fits:
            self.loading[name] = need
            assert self.budget.footprint(name) == need

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), measured=FOOTPRINTS)
    def settle(self, data: st.DataObject, measured: Footprint) -> None:
        """A load may take more than was predicted."""
        name = data.draw(st.sampled_from(sorted(self.loading)))
        del self.loading[name]
        self.loaded[name] = measured
        self.process += measured.resident_bytes
        self.budget.settle(name, measured)

    @precondition(lambda self: self.loading or self.loaded)
    @rule(data=st.data())
    def begin_unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*self.loading, *self.loaded})))
        free = self.budget.free_bytes
        failed, instance = self.loading.pop(name, None), self.loaded.pop(name, None)
        self.unloading[name] = failed.load_bytes if failed else instance.resident_bytes if instance else 0
        self.budget.begin_unload(name)
        peak_bytes = instance.peak_bytes if instance else 0
        assert self.budget.free_bytes <= free + peak_bytes  # nothing else is free before it is really free

    @precondition(lambda self: self.unloading)
    @rule(data=st.data(), returned=st.booleans())
    def freed(self, data: st.DataObject, returned: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.unloading)))
        size = self.unloading.pop(name)
        if returned:
            self.process = max(BASE, self.process - size)
        self.budget.freed(name)

    @rule(size=st.integers(0, 200))
    def leak(self, size: int) -> None:
        self.process += size

    @invariant()
    def what_the_process_really_has_counts(self) -> None:
        assert self.budget.used_bytes == max(self.accounted, self.process)
        assert self.budget.free_bytes == max(0, BUDGET - self.budget.used_bytes)
        assert self.budget.room_bytes == BUDGET - BASE


TestAccount = Account.TestCase


def test_without_a_limit_everything_fits() -> None:
    budget = MemoryBudget(0, lambda: BASE)
    assert budget.reserve("a", Footprint(1 << 50))
    assert budget.room_bytes == budget.free_bytes == 1 << 62


def test_a_second_reservation_replaces_the_first_or_leaves_it() -> None:
    budget = MemoryBudget(BUDGET, lambda: BASE)
    assert budget.reserve("a", Footprint(500))
    assert budget.reserve("a", Footprint(900))
    assert not budget.reserve("a", Footprint(901))
    assert budget.free_bytes == 0
    assert budget.footprint("a") == Footprint(900)
    assert budget.footprint("b") is None


def test_the_library_belongs_to_the_base_only_before_the_first_load() -> None:
    process = BASE
    budget = MemoryBudget(BUDGET, lambda: process)
    process = 150
    budget.base_grew()
    assert (budget.base_bytes, budget.room_bytes) == (150, 850)
    budget.settle("a", Footprint(100))
    process = 400
    budget.base_grew()
    assert budget.base_bytes == 150
