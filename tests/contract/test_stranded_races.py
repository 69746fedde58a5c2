"""Races whose device no worker has any longer, in a real folder repository, under a clock of the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millstream.plugins.compile.stored.races import Race, RaceState, environment, new_race
from millstream.plugins.fleet.controller.stranded_races import StrandedRaces
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import DeviceRecord, WorkerRecord
from tests.kit.versions import publish

WAIT_S = 600.0
DEVICE = DeviceRecord(kind="cpu", fingerprint="0123456789ab")
WORKER = WorkerRecord(
    id="cpu-0-a", pool="cpu", device="cpu", backend="onnxruntime", pid=1, host="h", started=0.0, hardware=DEVICE,
    packages={"onnxruntime": "1.31.1"},
)  # fmt: skip
OTHERS = (
    WORKER.model_copy(update={"pool": "other"}),
    WORKER.model_copy(update={"backend": "openvino"}),
    WORKER.model_copy(update={"packages": {"onnxruntime": "1.32.0"}}),
    WORKER.model_copy(update={"hardware": None}),
)


class Watched:
    """A repository with one race, and a controller's look at it."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.repository = FolderRepository(folder)
        self.stranded = self.another()
        self.manifest = publish(self.repository, "m", 1)
        here = environment(DEVICE.fingerprint, WORKER.packages)
        self.key = new_race(self.manifest, WORKER.kind, here, "cpu", 1.0).key
        self.ask(1.0)

    def another(self) -> StrandedRaces:
        return StrandedRaces(self.repository, WAIT_S, lambda: self.now)

    def ask(self, at: float) -> None:
        self.repository.races.change(
            self.key, lambda _: new_race(self.manifest, self.key.kind, self.key.device, "cpu", at)
        )

    def be(self, state: RaceState) -> None:
        self.repository.races.change(self.key, lambda one: one and one.model_copy(update={"state": state}))

    def look(self, *workers: WorkerRecord, after_s: float = 0.0) -> Race:
        self.now += after_s
        self.stranded.look(workers)
        found = self.repository.races.get(self.key)
        assert found is not None
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "repository")


@pytest.mark.parametrize("state", [RaceState.WAITING, RaceState.QUEUED, RaceState.RUNNING])
def test_a_race_fails_when_no_worker_had_its_device_for_long(watched: Watched, state: RaceState) -> None:
    watched.be(state)
    assert watched.look(*OTHERS).state is state
    assert watched.look(*OTHERS, after_s=WAIT_S - 1).state is state
    failed = watched.look(*OTHERS, after_s=31)
    assert failed.state is RaceState.FAILED
    assert failed.why == (
        "no worker of pool 'cpu' with its device came within 600 s: start one (`millstream up --pool cpu=1`), then ask "
        "again (`millstream race m`)"
    )


def test_the_live_rows_that_a_race_would_have_used_are_deleted_with_it_and_uploaded_samples_are_not(
    watched: Watched,
) -> None:
    samples, rows = watched.repository.samples, {"input/x": np.ones((2, 2), np.float32)}
    samples.write(watched.manifest, rows)
    samples.write(watched.manifest, rows, captured=True)
    watched.look()
    watched.look(after_s=WAIT_S)
    kept = watched.repository.folder_of(watched.manifest)
    assert [path.name for path in kept.rglob("*.npz")] == ["uploaded.npz"]


def test_a_worker_that_comes_back_in_time_keeps_its_race(watched: Watched) -> None:
    watched.look()
    watched.look(after_s=WAIT_S - 40)
    watched.look(WORKER, *OTHERS, after_s=35)
    assert watched.look(after_s=35).state is RaceState.QUEUED
    assert watched.look(after_s=WAIT_S - 40).state is RaceState.QUEUED
    assert watched.look(after_s=41).state is RaceState.FAILED


def test_a_race_that_is_asked_for_again_waits_anew(watched: Watched) -> None:
    watched.look()
    watched.ask(2.0)
    assert watched.look(after_s=WAIT_S + 1).state is RaceState.QUEUED
    assert watched.look(after_s=WAIT_S + 1).state is RaceState.FAILED


def test_a_worker_that_redis_does_not_know_keeps_the_race_that_it_runs(watched: Watched) -> None:
    watched.be(RaceState.RUNNING)
    lock = watched.repository.races.try_run(watched.key)
    assert lock is not None
    watched.look()
    assert watched.look(after_s=WAIT_S + 1).state is RaceState.RUNNING
    lock.release()
    assert watched.look(after_s=31).state is RaceState.FAILED


@pytest.mark.parametrize("state", [RaceState.DECIDED, RaceState.FAILED, RaceState.CANCELLED, RaceState.UNFINISHED])
def test_a_race_that_is_over_stays_as_it_is(watched: Watched, state: RaceState) -> None:
    watched.be(state)
    watched.look()
    found = watched.look(after_s=WAIT_S + 1)
    assert (found.state, found.why) == (state, "")


def test_a_controller_that_takes_over_waits_anew_and_the_race_ends_once(watched: Watched) -> None:
    watched.look()
    watched.now += WAIT_S - 1
    other = watched.another()
    other.look(())
    failed = watched.look(after_s=31)
    assert failed.state is RaceState.FAILED
    watched.now += WAIT_S
    other.look(())
    assert watched.look() == failed
