"""Memory of work in the background: a load gets it, also from work that takes a while to end."""

from __future__ import annotations

import threading

from millstream.services.placement.views import Footprint
from millstream.workers.models.memory_budget import GIVING_WAY_S_MAX, MemoryBudget, SpareMemory

BUDGET_BYTES = 1000
NEED = Footprint(600)


class Work:
    """Work that ends when the test says so, or at once when it is stopped."""

    def __init__(self, *, obeys: bool) -> None:
        self.budget = MemoryBudget(BUDGET_BYTES, lambda: 0)
        self.stops = 0
        self.seconds = 0.0
        self._obeys = obeys
        self.memory = SpareMemory(self.budget, self._stop, lambda: self.seconds)

    def _stop(self) -> None:
        self.stops += 1
        if self._obeys:
            threading.Thread(target=self.memory.free).start()


def test_without_work_there_is_nothing_to_wait_for() -> None:
    work = Work(obeys=True)
    assert not work.memory.give_way()
    assert work.stops == 0
    assert not work.memory.giving_way


def test_a_load_gets_the_memory_of_work_that_is_stopped() -> None:
    work = Work(obeys=True)
    assert work.memory.reserve("work", NEED)
    assert not work.budget.reserve("load", NEED)
    assert work.memory.give_way()
    assert not work.memory.giving_way
    assert work.budget.reserve("load", NEED)


def test_the_memory_of_work_that_is_slow_to_end_is_about_to_be_free_for_a_while() -> None:
    work = Work(obeys=False)
    assert work.memory.reserve("work", NEED)
    assert not work.memory.asked()
    assert not work.memory.give_way()
    assert work.memory.asked()
    said = [work.memory.giving_way]
    work.seconds += GIVING_WAY_S_MAX
    assert [*said, work.memory.giving_way] == [True, False], "from then on it counts as taken"
    work.memory.free()
    work.memory.free()
    assert work.budget.used_bytes == 0
    assert work.memory.reserve("more work", NEED)
    assert not work.memory.asked(), "no load needed this memory yet"


def test_work_without_memory_does_not_begin() -> None:
    work = Work(obeys=True)
    assert work.budget.reserve("load", NEED)
    assert not work.memory.reserve("work", NEED)
    assert not work.memory.give_way()
    work.memory.free()
    assert work.budget.used_bytes == NEED.load_bytes
