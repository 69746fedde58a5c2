"""A stateful machine over the account of a worker's memory: reserve, settle, fail, unload, free, and leaks."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.services.placement.views import Footprint
from millstream.workers.models.memory_budget import MemoryBudget, MemorySpace

BASE, BUDGET = 100, 1000
NAMES = st.sampled_from("abcde")
DEVICE_BASE, DEVICE_BUDGET = 10, 500
FOOTPRINTS = st.builds(
    Footprint,
    st.integers(0, 600),
    st.integers(0, 300),
    device_resident_bytes=st.integers(0, 300),
    device_peak_bytes=st.integers(0, 150),
)


class Account(RuleBasedStateMachine):
    """`process` is what the process really has; the machine predicts what each operation must do."""

    def __init__(self) -> None:
        super().__init__()
        self.process = BASE
        self.device = DEVICE_BASE
        device = MemorySpace(DEVICE_BUDGET, lambda: self.device)
        self.budget = MemoryBudget(BUDGET, lambda: self.process, device=device)
        self.loading: dict[str, Footprint] = {}
        self.loaded: dict[str, Footprint] = {}
        self.unloading: dict[str, int] = {}
        self.device_unloading: dict[str, int] = {}

    @property
    def accounted(self) -> int:
        promised = sum(one.load_bytes for one in self.loading.values())
        resident = sum(one.resident_bytes for one in self.loaded.values())
        peak = max((one.peak_bytes for one in self.loaded.values()), default=0)
        return BASE + resident + peak + promised + sum(self.unloading.values())

    @property
    def device_accounted(self) -> int:
        promised = sum(one.device_load_bytes for one in self.loading.values())
        resident = sum(one.device_resident_bytes for one in self.loaded.values())
        peak = max((one.device_peak_bytes for one in self.loaded.values()), default=0)
        return DEVICE_BASE + resident + peak + promised + sum(self.device_unloading.values())

    def known(self) -> set[str]:
        return {*self.loading, *self.loaded, *self.unloading}

    @rule(name=NAMES, need=FOOTPRINTS)
    def reserve(self, name: str, need: Footprint) -> None:
        if name in self.known():
            return
        fits = max(self.accounted, self.process) + need.load_bytes <= BUDGET
        fits = fits and max(self.device_accounted, self.device) + need.device_load_bytes <= DEVICE_BUDGET
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
        self.device += measured.device_resident_bytes
        self.budget.settle(name, measured)

    @precondition(lambda self: self.loading or self.loaded)
    @rule(data=st.data())
    def begin_unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*self.loading, *self.loaded})))
        free = self.budget.free_bytes
        failed, instance = self.loading.pop(name, None), self.loaded.pop(name, None)
        self.unloading[name] = failed.load_bytes if failed else instance.resident_bytes if instance else 0
        device = instance.device_resident_bytes if instance else 0
        self.device_unloading[name] = failed.device_load_bytes if failed else device
        self.budget.begin_unload(name)
        peak_bytes = instance.peak_bytes if instance else 0
        assert self.budget.free_bytes <= free + peak_bytes  # nothing else is free before it is really free

    @precondition(lambda self: self.unloading)
    @rule(data=st.data(), returned=st.booleans())
    def freed(self, data: st.DataObject, returned: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.unloading)))
        size, device_size = self.unloading.pop(name), self.device_unloading.pop(name)
        if returned:
            self.process = max(BASE, self.process - size)
            self.device = max(DEVICE_BASE, self.device - device_size)
        self.budget.freed(name)

    @rule(size=st.integers(0, 200))
    def leak(self, size: int) -> None:
        self.process += size

    @invariant()
    def what_the_process_really_has_counts(self) -> None:
        assert self.budget.used_bytes == max(self.accounted, self.process)
        assert self.budget.free_bytes == max(0, BUDGET - self.budget.used_bytes)
        assert self.budget.room_bytes == BUDGET - BASE
        assert self.budget.device.used_bytes == max(self.device_accounted, self.device)
        assert self.budget.device.free_bytes == max(0, DEVICE_BUDGET - self.budget.device.used_bytes)
        assert self.budget.device.room_bytes == DEVICE_BUDGET - DEVICE_BASE


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


def test_the_model_of_a_load_in_progress_does_not_belong_to_the_base() -> None:
    process = BASE
    budget = MemoryBudget(BUDGET, lambda: process)
    process = 150
    assert budget.base_grew()
    with budget.measuring():
        process = 550
        assert not budget.base_grew(), "a second load begins beside the first one"
    assert not budget.base_grew(), "the first one has ended, and is not settled yet"
    assert (budget.base_bytes, budget.room_bytes) == (150, 850)


def test_a_version_that_is_unloaded_twice_at_the_same_time_counts_until_both_are_closed() -> None:
    budget = MemoryBudget(BUDGET, lambda: BASE)
    for size in (100, 200):
        assert budget.reserve("a", Footprint(size))
        budget.settle("a", Footprint(size))
        budget.begin_unload("a")
    assert budget.used_bytes == BASE + 300
    budget.freed("a")
    assert budget.used_bytes == BASE + 200
    budget.freed("a")
    assert budget.used_bytes == BASE
