"""Rows of live runs are kept as samples only where an endpoint asks for it, within bounds, and are deleted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millstream.plugins.compile.stored.races import RaceState, new_race
from millstream.plugins.compile.worker import sample_capture
from millstream.plugins.compile.worker.sample_capture import PAUSE_S, ROWS_EACH, WRITE_S, Capture, SampleCaptures
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import State
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from tests.kit.versions import publish


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    return FolderRepository(tmp_path / "repository")


@pytest.fixture
def manifest(repository: FolderRepository) -> Manifest:
    return publish(repository, "m", 1)


def rows(count: int, start: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.arange(start, start + 4 * count, dtype=np.float32).reshape(count, 4)}


def test_rows_are_copied_up_to_the_limits(manifest: Manifest) -> None:
    now = [1.0]
    capture = Capture(manifest, 6, lambda: now[0])
    given = rows(10)
    assert capture.due(now[0])
    capture.keep(given, [])
    given["x"][:] = -1  # the memory of a run is used again
    assert not capture.due(now[0])
    assert capture.due(now[0] + PAUSE_S)
    capture.keep(rows(10, 100), [])
    assert capture.full
    assert not capture.due(now[0] + 100)
    taken = capture.take()
    assert list(taken) == ["input/x"]
    expected = np.concatenate([rows(ROWS_EACH)["x"], rows(2, 100)["x"]])
    np.testing.assert_array_equal(taken["input/x"], expected)


def test_rows_of_other_shapes_text_and_large_ones_are_left_out(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Capture(manifest, 100)
    capture.keep({"x": np.array([[b"a"]], object)}, [])
    assert not capture.take()
    capture.keep(rows(1), [])
    capture.keep({"x": np.zeros((1, 5), np.float32)}, [])
    assert capture.take()["input/x"].shape == (1, 4)
    monkeypatch.setattr(sample_capture, "BYTES_MAX", 20)
    small = Capture(manifest, 100)
    small.keep(rows(1), [])
    small.keep(rows(1), [])
    assert small.full
    assert len(small.take()["input/x"]) == 1


class Worker:
    def __init__(self, repository: FolderRepository, manifest: Manifest) -> None:
        self.repository = repository
        self.models = LoadedModels()
        self.models.set(LoadedModel(manifest, State.READY))
        self.active: Mapping[str, Capture] = {}
        self.captures = SampleCaptures(repository, self.models, self.activate)

    def activate(self, active: Mapping[str, Capture]) -> None:
        self.active = active

    def ask(self, count: int) -> None:
        endpoint = self.repository.endpoint("m")
        placement = EndpointPlacement(capture_samples=count)
        self.repository.replace_endpoint(endpoint.model_copy(update={"placement": placement}))
        self.captures.follow()


def test_nothing_is_captured_unless_the_endpoint_asks_for_it(
    repository: FolderRepository, manifest: Manifest, tmp_path: Path
) -> None:
    worker = Worker(repository, manifest)
    worker.captures.follow()
    assert not worker.active
    worker.ask(3)
    capture = worker.active[manifest.content_id]
    worker.captures.follow()
    assert worker.active[manifest.content_id] is capture
    capture.keep(rows(8), [])
    worker.captures.follow()
    assert not worker.active, "it is full"
    found = repository.samples.find(manifest)
    assert found is not None
    assert found.captured
    assert found.path.stat().st_mode & 0o777 == 0o600
    np.testing.assert_array_equal(np.load(found.path)["input/x"], rows(3)["x"])
    publish(repository, "other", 1)  # the repository changes, the settings do not
    worker.captures.follow()
    assert not worker.active, "a setting asks once"
    worker.ask(0)
    assert repository.samples.find(manifest) is None
    worker.ask(5)
    assert worker.active


def test_uploaded_samples_come_first_and_captured_ones_are_deleted_after_a_race(
    repository: FolderRepository, manifest: Manifest
) -> None:
    repository.samples.write(manifest, {"input/x": rows(1)["x"]}, captured=True)
    repository.samples.write(manifest, {"input/x": rows(2)["x"]})
    found = repository.samples.find(manifest)
    assert found is not None
    assert not found.captured
    repository.samples.forget_captured(manifest, older_s=3600)
    assert (found.path.parent / "captured.npz").exists()
    repository.samples.forget_captured(manifest)
    assert [path.name for path in found.path.parent.iterdir()] == ["uploaded.npz"]
    repository.delete_version("m", 1)
    assert repository.samples.find(manifest) is None


def test_a_version_that_is_not_ready_is_not_captured(repository: FolderRepository, manifest: Manifest) -> None:
    worker = Worker(repository, manifest)
    model = worker.models.get(manifest.content_id)
    assert model is not None
    worker.models.set(replace(model, state=State.FAILED))
    worker.ask(3)
    assert not worker.active


def test_samples_of_versions_that_are_not_loaded_are_deleted_too(
    repository: FolderRepository, manifest: Manifest, tmp_path: Path
) -> None:
    old, young = (publish(repository, name, 1) for name in ("old", "young"))
    for name in ("old", "young"):
        endpoint = repository.endpoint(name)
        placement = EndpointPlacement(capture_samples=4)
        repository.replace_endpoint(endpoint.model_copy(update={"placement": placement}))
    for one in (manifest, old, young):
        repository.samples.write(one, {"input/x": rows(1)["x"]}, captured=True)
    repository.samples.write(manifest, {"input/x": rows(1)["x"]})
    folder = tmp_path / "repository" / "models"
    for path in (folder / "old/1/race/captured.npz", folder / "young/1/race/.new-killed"):
        path.touch()
        os.utime(path, (1.0, 1.0))
    (folder / "young/1/race/.new-at-work").touch()
    SampleCaptures(repository, LoadedModels(), lambda _: None).follow()
    left = {str(path.relative_to(folder)) for path in folder.glob("*/*/race/*")}
    assert left == {"m/1/race/uploaded.npz", "young/1/race/captured.npz", "young/1/race/.new-at-work"}


def test_rows_that_find_no_space_are_written_later(repository: FolderRepository, manifest: Manifest) -> None:
    worker = Worker(repository, manifest)
    worker.ask(3)
    capture = worker.active[manifest.content_id]
    capture.keep(rows(8), [])
    folder = repository.folder_of(manifest) / "race"
    folder.write_bytes(b"")  # a file where the folder of samples belongs
    worker.captures.write(manifest.content_id)
    assert worker.active, "it waits for space"
    assert not capture.is_due_to_be_written(capture.began + WRITE_S - 1)
    assert capture.is_due_to_be_written(capture.began + WRITE_S)
    folder.unlink()
    worker.captures.write(manifest.content_id)
    assert not worker.active
    assert repository.samples.find(manifest) is not None


def test_a_race_ends_the_capture_that_it_used(repository: FolderRepository, manifest: Manifest) -> None:
    worker = Worker(repository, manifest)
    worker.ask(10)
    worker.active[manifest.content_id].keep(rows(2), [])
    worker.captures.write(manifest.content_id)
    assert repository.samples.find(manifest) is not None
    worker.captures.forget(manifest)
    for _ in range(2):
        worker.captures.follow()
        worker.captures.write(manifest.content_id)
    assert not worker.active
    assert repository.samples.find(manifest) is None


@pytest.mark.parametrize("end", [RaceState.DECIDED, RaceState.FAILED, RaceState.CANCELLED])
def test_the_end_of_a_race_of_another_worker_ends_the_capture_too(
    repository: FolderRepository, manifest: Manifest, end: RaceState
) -> None:
    earlier = new_race(manifest, "onnxruntime.cpu", "0" * 16, "cpu", 1.0).ended(RaceState.DECIDED, 2.0)
    later = new_race(manifest, "onnxruntime.cpu", "1" * 16, "cpu", 3.0)
    worker = Worker(repository, manifest)
    worker.ask(10)
    worker.active[manifest.content_id].keep(rows(2), [])
    unfinished = later.ended(RaceState.UNFINISHED, 3.5)
    for races in ([earlier], [earlier], [earlier, later], [earlier, unfinished], [earlier, later]):
        worker.captures.end_used(races)
        assert worker.active, "an earlier verdict did not use it"
    worker.captures.write(manifest.content_id)
    assert repository.samples.find(manifest) is not None
    worker.captures.end_used([earlier, later.ended(end, 4.0)])
    worker.captures.write(manifest.content_id)
    assert not worker.active
    assert repository.samples.find(manifest) is None
    worker.ask(11)
    worker.captures.end_used([earlier, later.ended(end, 4.0)])
    assert worker.active, "it was asked for again"


def test_rows_that_are_written_after_they_were_deleted_are_deleted_again(
    repository: FolderRepository, manifest: Manifest
) -> None:
    """A race is cancelled, which deletes them, and only then is the capture complete."""
    race = new_race(manifest, "onnxruntime.cpu", "1" * 16, "cpu", 3.0)
    cancelled = race.ended(RaceState.CANCELLED, 4.0)
    worker = Worker(repository, manifest)
    worker.ask(2)
    capture = worker.active[manifest.content_id]
    worker.captures.end_used([])
    repository.samples.forget_captured(manifest)  # as the gateway does
    capture.keep(rows(2), [])
    worker.captures.follow()
    assert not worker.active
    assert repository.samples.find(manifest) is not None
    assert not capture.take(), "their memory was given back"
    worker.captures.end_used([race])
    assert repository.samples.find(manifest) is not None
    worker.captures.end_used([cancelled])
    assert repository.samples.find(manifest) is None
    assert not worker.captures._unused


def test_captures_of_deleted_versions_are_not_followed_for_ever(
    repository: FolderRepository, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_capture, "SWEEP_S", 0.0)
    worker = Worker(repository, manifest)
    worker.ask(2)
    worker.active[manifest.content_id].keep(rows(2), [])
    worker.captures.follow()
    assert worker.captures._unused, "its samples wait for a race"
    repository.samples.forget_captured(manifest)
    worker.captures.follow()
    assert not worker.captures._unused
