"""Which races of a real repository a worker can begin: after a load, a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.plugins.compile.race.report import RaceReport
from millstream.plugins.compile.stored.job import Job, Jobs, RaceOptions, RaceState, new_job
from millstream.plugins.compile.worker.jobs import JobQueue
from millstream.services.model.manifest import Manifest
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import State
from millstream.workers.backends import get_backend
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModel
from tests.kit.versions import publish
from tests.kit.worker_parts import parts

HERE = "0123456789abcdef"
ELSEWHERE = "fedcba9876543210"


class Queue:
    """A queue of one worker."""

    def __init__(self, folder: Path) -> None:
        self.repository = FolderRepository(folder / "repository")
        self.manifest: Manifest = publish(self.repository, "m", 1)
        at = LoadEnvironment(get_backend("onnxruntime", folder), "onnxruntime", "cpu", 1, None)
        self.jobs = Jobs(self.repository)
        self.queue = JobQueue(parts(folder, self.repository, at), HERE)

    def asked(self, state: RaceState, **more: object) -> Job:
        fields = {"state": state, **more}
        one = new_job(self.manifest, "onnxruntime.cpu", HERE, "cpu", 1.0).model_copy(update=fields)
        self.jobs.put(one, lambda _: one)
        return one

    def ready(self, state: State = State.READY, reason: str | None = None) -> list[Job]:
        model = LoadedModel(self.manifest, state, reason)
        return [race for race, _ in self.queue.ready(self.jobs.all(), [model])]

    def stored(self) -> Job:
        [found] = self.jobs.all()
        return found


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path)


def test_a_race_waits_until_its_version_is_ready(queue: Queue) -> None:
    queue.asked(RaceState.QUEUED, why="the version is being loaded")
    assert queue.ready(State.LOADING) == []
    assert queue.stored().why == "the version is being loaded"
    assert queue.ready(State.FAILED, "no such operator") == []
    assert queue.stored().why == "the version cannot be loaded: no such operator"
    [job] = queue.ready()
    assert job.state is RaceState.QUEUED


def test_a_race_begins_again_after_a_pause_or_if_it_is_asked_for_again(queue: Queue) -> None:
    before = queue.asked(RaceState.QUEUED)
    queue.queue.postpone(before, 3600.0)
    assert queue.ready() == []
    queue.asked(RaceState.QUEUED, requested_at=2.0)
    assert len(queue.ready()) == 1
    queue.asked(RaceState.RUNNING)
    queue.queue.postpone(before, 0.0)
    [job] = queue.ready()
    assert job.state is RaceState.RUNNING, "its worker died: nobody has its lock"


@pytest.mark.parametrize("state", [RaceState.CANCELLED, RaceState.FAILED, RaceState.DECIDED])
def test_a_race_that_is_over_does_not_begin_again(queue: Queue, state: RaceState) -> None:
    before = queue.asked(state)
    assert queue.ready() == []
    assert queue.stored() == before


def test_a_race_that_was_asked_for_anew_is_not_changed_by_the_one_before(queue: Queue) -> None:
    before = queue.asked(RaceState.RUNNING)
    again = queue.asked(RaceState.RUNNING, requested_at=before.requested_at - 3600)  # the clock was set back
    queue.jobs.change(before, lambda one: one.model_copy(update={"state": RaceState.QUEUED}))
    assert queue.stored() == again
    queue.jobs.change(again, lambda one: one.model_copy(update={"state": RaceState.QUEUED}))
    assert queue.stored().state is RaceState.QUEUED


def test_another_device_or_library_asks_for_a_race_of_its_own_once(queue: Queue) -> None:
    options = RaceOptions(targets=("openvino",), accept_random_samples=True)
    report = RaceReport(winner="openvino-0")
    before = queue.asked(RaceState.DECIDED, options=options, device=ELSEWHERE, report=report)
    assert queue.ready(State.LOADING) == [], "the version must be ready first"
    assert queue.jobs.all() == [before]
    for _ in range(2):
        queue.ready()
        again = queue.jobs.get(before.model_copy(update={"device": HERE}))
        assert again is not None
        assert (again.state, again.options) == (RaceState.QUEUED, options)
        assert "another than that of the last verdict" in again.why
    assert len(queue.jobs.all()) == 2
    assert [job.device for job in queue.ready()] == [HERE]
    assert queue.jobs.get(before) == before, "workers with that device keep their verdict"


@pytest.mark.parametrize(
    ("state", "other"),
    [
        (RaceState.DECIDED, {"kind": "onnxruntime.cuda"}),
        (RaceState.DECIDED, {"pool": "other"}),
        (RaceState.CANCELLED, {}),
    ],
)
def test_races_of_other_pools_and_kinds_and_cancelled_ones_ask_for_none(
    queue: Queue, state: RaceState, other: dict[str, str]
) -> None:
    queue.asked(state, device=ELSEWHERE, **other)
    assert queue.ready() == []
    assert len(queue.jobs.all()) == 1
