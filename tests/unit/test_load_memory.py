"""What a load reserves, and what is learnt from loads that succeed, find no memory, or are measured beside others."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.placement.views import Footprint
from millstream.services.repository.folder import FolderRepository
from millstream.services.sizes import sizes
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import OutOfMemory
from millstream.workers.models.footprint_meter import Measurement
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.memory_budget import Measuring, MemoryBudget
from millstream.workers.residency.load_memory import LoadMemory
from tests.contract.repositories import manifest, publish

MIB = 1 << 20
BASE, ROOM = 100 * MIB, 400 * MIB


class Worker:
    def __init__(self, folder: Path) -> None:
        self.repository = FolderRepository(folder / "repository")
        publish(self.repository)
        self.process = BASE
        self.budget = MemoryBudget(BASE + ROOM, lambda: self.process)
        self.memory = LoadMemory(
            self.repository, LoadEnvironment(get_backend("simulated"), "simulated", "cpu", 1, self.budget)
        )

    def loaded(self, version: Manifest, measurement: Measurement, seconds: float) -> Footprint:
        """What a load does when it has succeeded."""
        found, kept = self.memory.loaded(version, measurement, seconds)
        self.memory.keep(version, kept)
        return found


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def version(size_bytes: int) -> Manifest:
    file = SourceFile(path="source/model.onnx", size_bytes=size_bytes, sha256="0" * 64)
    return manifest().model_copy(update={"files": (file,)})


def test_a_version_whose_files_do_not_fit_fails_with_both_numbers(worker: Worker) -> None:
    large = version(500 * MIB)
    with pytest.raises(Failure) as caught:
        worker.memory.reserve(large)
    assert caught.value.code is Code.MODEL
    takes, has = sizes(worker.memory.need(large).load_bytes, ROOM)
    assert f"it takes {takes} of memory, and this worker has {has} for models: raise --memory" in caught.value.message


def test_a_prediction_is_tried_with_all_memory_there_is_and_corrected_until_it_is_too_large(worker: Worker) -> None:
    doubtful = version(300 * MIB)
    assert worker.memory.need(doubtful).load_bytes == ROOM  # and not 3 times its files
    worker.memory.reserve(doubtful)
    assert worker.budget.free_bytes == 0
    worker.memory.failed(doubtful, OutOfMemory("no memory"))
    assert worker.budget.free_bytes == ROOM
    assert worker.memory.need(doubtful).load_bytes > ROOM
    with pytest.raises(Failure, match="raise --memory") as caught:
        worker.memory.reserve(doubtful)
    assert caught.value.code is Code.MODEL


def test_a_load_that_is_tried_with_less_than_predicted_keeps_what_was_reserved_and_learns_from_that(
    worker: Worker,
) -> None:
    doubtful, free = version(120 * MIB), ROOM - 50 * MIB
    worker.budget.settle("pinned", Footprint(50 * MIB))
    tried = worker.memory.need_within(doubtful, free, 1 << 62)
    assert tried.load_bytes == free
    assert worker.budget.reserve(doubtful.content_id, tried)
    worker.memory.reserve(doubtful)
    assert worker.budget.footprint(doubtful.content_id) == tried
    worker.memory.failed(doubtful, OutOfMemory("no memory"))
    assert worker.memory.need(doubtful).load_bytes == int(1.25 * free) > ROOM
    assert worker.memory.need_within(doubtful, free, 1 << 62).load_bytes > ROOM, (
        "what was too little is not tried again"
    )


def test_a_load_is_tried_where_its_files_fit_however_much_is_predicted(worker: Worker) -> None:
    doubtful = version(120 * MIB)
    assert worker.memory.need_within(doubtful, 121 * MIB, 1 << 62).load_bytes == 121 * MIB
    assert worker.memory.need_within(doubtful, 119 * MIB, 1 << 62) == worker.memory.need(doubtful)
    worker.memory.reserve(doubtful)
    worker.loaded(doubtful, Measurement(120 * MIB, 130 * MIB, disturbed=False), 0.5)
    assert worker.memory.need_within(doubtful, 240 * MIB, 1 << 62).load_bytes == 250 * MIB, "measured is certain"


def test_a_version_that_found_too_little_in_a_small_worker_is_tried_in_a_larger_one(worker: Worker) -> None:
    doubtful, small_room = version(120 * MIB), 200 * MIB
    small = MemoryBudget(BASE + small_room, lambda: BASE)
    in_small = LoadMemory(worker.repository, LoadEnvironment(get_backend("simulated"), "simulated", "cpu", 1, small))
    in_small.reserve(doubtful)
    in_small.failed(doubtful, OutOfMemory("no memory"))
    assert in_small.need(doubtful).load_bytes == 250 * MIB  # and not 4.5 times its files
    with pytest.raises(Failure, match="it takes 250 MiB"):
        in_small.reserve(doubtful)
    worker.memory.reserve(doubtful)
    assert worker.memory.need(doubtful).load_bytes == ROOM


def test_a_load_that_found_too_little_reserves_all_that_was_free_the_next_time(worker: Worker) -> None:
    small, other = version(MIB), Footprint(150 * MIB)
    worker.budget.settle("other", other)
    worker.memory.reserve(small)
    worker.memory.failed(small, OutOfMemory("no memory"))
    worker.memory.failed(small, OutOfMemory("its memory was returned already"))
    needed = worker.memory.need(small).load_bytes
    assert needed == ROOM - 150 * MIB + 1
    with pytest.raises(Failure) as caught:
        worker.memory.reserve(small)
    assert caught.value.code is Code.UNAVAILABLE  # the other must go first
    worker.budget.begin_unload("other")
    worker.budget.freed("other")
    worker.memory.reserve(small)
    worker.memory.failed(small, Failure(Code.MODEL, "another error"))
    assert worker.memory.need(small).load_bytes == needed
    worker.memory.reserve(small)
    assert worker.loaded(small, Measurement(2 * MIB, MIB, disturbed=False), 0.5) == Footprint(
        2 * MIB, MIB, 0.5, measured=True
    )
    assert worker.memory.need(small).load_bytes == 3 * MIB


def test_what_does_not_fit_now_is_tried_again(worker: Worker) -> None:
    worker.process = BASE + ROOM - MIB
    with pytest.raises(Failure, match=f"and 1 MiB of the {ROOM // MIB} MiB for models are free") as caught:
        worker.memory.reserve(version(MIB))
    assert caught.value.code is Code.UNAVAILABLE


def test_a_measurement_beside_another_load_or_unload_is_not_kept(worker: Worker) -> None:
    small = version(MIB)
    need = worker.memory.need(small)
    worker.memory.reserve(small)
    found = worker.loaded(small, Measurement(0, 0, disturbed=False, alone=False), 0.5)
    assert (found.resident_bytes, found.measured) == (need.resident_bytes, False)
    assert not worker.memory.need(small).measured
    found = worker.loaded(small, Measurement(90 * MIB, 0, disturbed=False, alone=False), 0.5)
    assert found.resident_bytes == 90 * MIB


def test_loads_beside_others_are_predicted_by_their_own_seconds(worker: Worker) -> None:
    large = version(100 * MIB)
    for seconds in (3.4, 8.0):
        worker.memory.reserve(large)
        worker.loaded(large, Measurement(150 * MIB, 0, disturbed=True, alone=False), seconds)
        worker.budget.begin_unload(large.content_id)
        worker.budget.freed(large.content_id)
        assert (worker.memory.need(large).load_s, worker.memory.need(large).measured) == (seconds, False)


def test_a_load_that_ran_one_row_keeps_the_bytes_that_were_measured_and_notes_how_long_it_took(worker: Worker) -> None:
    small = version(MIB)
    worker.memory.reserve(small)
    worker.loaded(small, Measurement(2 * MIB, 30 * MIB, disturbed=False), 0.5)
    worker.budget.begin_unload(small.content_id)
    worker.budget.freed(small.content_id)
    worker.memory.reserve(small)
    found = worker.loaded(small, Measurement(MIB, 0, disturbed=False, whole=False), 0.1)
    assert found == Footprint(2 * MIB, 30 * MIB, 0.1, measured=True)
    assert worker.memory.need(small) == found


def alone(one: Measuring) -> bool:
    return one.alone


def test_who_is_alone_while_it_is_measured() -> None:
    budget = MemoryBudget(0)
    with budget.measuring() as first:
        budget.begin_unload("failed to load")
        assert alone(first)
        budget.freed("failed to load")
        budget.settle("other", Footprint(1))
        assert alone(first)
        budget.begin_unload("other")
        assert not alone(first)
        with budget.measuring() as second:
            assert not alone(second)
    budget.freed("other")
    with budget.measuring() as third, budget.measuring() as fourth:
        assert not (alone(third) or alone(fourth))
    with budget.measuring() as last:
        assert alone(last)


def test_what_instances_take_in_other_processes_counts_while_they_run() -> None:
    taken: list[int] = []
    budget = MemoryBudget(BASE + ROOM, lambda: BASE, follow=taken.append)
    for name in ("one", "two", "here"):
        budget.settle(name, Footprint(50 * MIB))
    budget.measured_apart({"one": 150 * MIB, "two": 60 * MIB, "gone": MIB})
    assert budget.used_bytes == BASE + 260 * MIB
    assert taken[-1] == 210 * MIB, "this process itself may take that less"
    assert budget.footprint("one") == Footprint(150 * MIB)
    assert not budget.reserve("more", Footprint(141 * MIB))
    assert budget.most_grown() is None
    budget.measured_apart({"one": 20 * MIB, "two": 60 * MIB})
    assert budget.reserve("more", Footprint(141 * MIB)), "what was given back is free"
    budget.begin_unload("one")
    budget.freed("one")
    assert budget.apart_bytes == 60 * MIB


def test_the_instance_that_grew_most_is_the_one_to_end_if_growth_exceeds_the_budget() -> None:
    budget = MemoryBudget(BASE + ROOM, lambda: BASE)
    for name in ("large", "grown", "steady"):
        budget.settle(name, Footprint(100 * MIB))
    budget.settle("large", Footprint(220 * MIB))
    budget.measured_apart({"large": 221 * MIB, "grown": 100 * MIB, "steady": 100 * MIB})
    assert budget.over_bytes, "what was loaded takes more than was predicted"
    assert budget.most_grown() is None, "which is nothing that grew"
    budget.begin_unload("large")
    budget.freed("large")
    budget.settle("next", Footprint(190 * MIB))
    budget.measured_apart({"next": 191 * MIB, "grown": 150 * MIB, "steady": 120 * MIB})
    assert budget.most_grown() == ("grown", 50 * MIB)
