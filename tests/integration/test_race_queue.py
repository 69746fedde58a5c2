"""Which races of a real repository a worker can begin: after a load, a lack of time, a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.plugins.compile.stored.races import UNFINISHED_MAX, Race, RaceOptions, RaceState, new_race
from millstream.plugins.compile.worker.queue import RaceQueue, Racer, change
from millstream.services.model.manifest import Manifest
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import State
from millstream.workers.backends import get_backend
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModel
from tests.kit.versions import publish

HERE = "0123456789abcdef"
ELSEWHERE = "fedcba9876543210"


class Queue:
    """A queue of one worker."""

    def __init__(self, folder: Path) -> None:
        self.repository = FolderRepository(folder / "repository")
        self.manifest: Manifest = publish(self.repository, "m", 1)
        at = LoadEnvironment(get_backend("onnxruntime", folder), "onnxruntime", "cpu", 1, None)
        self.queue = RaceQueue(Racer("cpu-0", "cpu", "host", HERE), self.repository, at)

    def asked(self, state: RaceState, **more: object) -> Race:
        fields = {"state": state, **more}
        one = new_race(self.manifest, "onnxruntime.cpu", HERE, "cpu", 1.0).model_copy(update=fields)
        self.repository.races.change(one.key, lambda _: one)
        return one

    def ready(self, state: State = State.READY, reason: str | None = None) -> list[Race]:
        model = LoadedModel(self.manifest, state, reason)
        return [race for race, _ in self.queue.ready(self.repository.races.all(), [model])]

    def stored(self) -> Race:
        [found] = self.repository.races.all()
        return found


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path)


def test_a_race_waits_until_its_version_is_ready(queue: Queue) -> None:
    queue.asked(RaceState.WAITING, why="the version is being loaded")
    assert queue.ready(State.LOADING) == []
    assert queue.stored().why == "the version is being loaded"
    assert queue.ready(State.FAILED, "no such operator") == []
    assert queue.stored().state is RaceState.WAITING
    assert queue.stored().why == "the version cannot be loaded: no such operator"
    [race] = queue.ready()
    assert (race.state, race.why) == (RaceState.QUEUED, "")
    assert queue.stored() == race


def test_an_unfinished_race_begins_again_after_a_pause(queue: Queue) -> None:
    before = queue.asked(RaceState.UNFINISHED, unfinished=1, why="no time", ended_at=5.0)
    queue.queue.postpone(before, 3600.0)
    assert queue.ready() == []
    assert queue.stored() == before
    queue.asked(RaceState.QUEUED, requested_at=2.0)
    assert len(queue.ready()) == 1, "it was asked for again"
    queue.asked(RaceState.UNFINISHED, unfinished=1, why="no time", ended_at=5.0)
    queue.queue.postpone(before, 0.0)
    [race] = queue.ready()
    assert (race.state, race.unfinished, race.why) == (RaceState.QUEUED, 1, "no time")
    assert race.options == before.options


@pytest.mark.parametrize(
    ("state", "unfinished"),
    [(RaceState.UNFINISHED, UNFINISHED_MAX), (RaceState.CANCELLED, 1), (RaceState.FAILED, 0), (RaceState.DECIDED, 0)],
)
def test_a_race_that_is_over_does_not_begin_again(queue: Queue, state: RaceState, unfinished: int) -> None:
    before = queue.asked(state, unfinished=unfinished)
    assert queue.ready() == []
    assert queue.stored() == before


def test_a_race_that_was_asked_for_anew_is_not_changed_by_the_one_before(queue: Queue) -> None:
    before = queue.asked(RaceState.RUNNING)
    again = queue.asked(RaceState.RUNNING, requested_at=before.requested_at - 3600)  # the clock was set back
    change(queue.repository, before, lambda one: one.model_copy(update={"state": RaceState.QUEUED}))
    assert queue.stored() == again
    change(queue.repository, again, lambda one: one.model_copy(update={"state": RaceState.QUEUED}))
    assert queue.stored().state is RaceState.QUEUED


def test_another_device_or_library_asks_for_a_race_of_its_own_once(queue: Queue) -> None:
    options = RaceOptions(seconds=33, targets=("openvino",), accept_random_samples=True)
    report = {"winner": "openvino-0", "rows": [{"target": "openvino", "candidate": "openvino-0", "verdict": "won"}]}
    before = queue.asked(RaceState.DECIDED, options=options, rows={4: 1.0}, device=ELSEWHERE, report=report)
    assert queue.ready(State.LOADING) == [], "the version must be ready first"
    assert queue.repository.races.all() == [before]
    for _ in range(2):
        queue.ready()
        again = queue.repository.races.get(before.key._replace(device=HERE))
        assert again is not None
        assert (again.state, again.options, again.rows) == (RaceState.QUEUED, options, {4: 1.0})
        assert "another than that of the last verdict" in again.why
    assert len(queue.repository.races.all()) == 2
    assert [race.device for race in queue.ready()] == [HERE]
    assert queue.repository.races.get(before.key) == before, "workers with that device keep their verdict"


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
    assert len(queue.repository.races.all()) == 1
