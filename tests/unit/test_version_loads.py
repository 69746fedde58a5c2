"""When a worker tries again to load a version whose load failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.services.crashes.load_marks import LoadMarks
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import State
from millstream.workers.backends import get_backend
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.load_version import LoadEnvironment, load, probe
from millstream.workers.models.loaded_models import LoadedModels
from millstream.workers.models.memory_budget import MemoryBudget
from millstream.workers.models.record_parts import BeatSignal
from millstream.workers.residency import version_loads
from millstream.workers.residency.loader import Limits, LoadPolicy, LoadRequest
from millstream.workers.residency.version_loads import (
    FAILED_OFTEN_RETRY_S,
    FAILED_RETRY_S,
    FAILURES_MAX,
    FailedLoads,
    LoadGuard,
    VersionLoads,
)
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until


def loads_of(repository: FolderRepository, models: LoadedModels, folder: Path) -> VersionLoads:
    """Return loads of a worker with the simulated backend, without a limit on its memory; `folder`: for its files."""
    return VersionLoads(
        repository,
        LoadEnvironment(get_backend("simulated", folder), "simulated", "cpu", 1),
        models,
        WorkerMetrics(MetricsRegistry(None, "worker"), "sim", "sim-0", "cpu"),
        LoadGuard(LoadMarks(folder / "run", "sim-0-1"), Limits(600.0, 600.0), lambda: None),
        lambda: 5.0,
    )


def test_a_version_that_failed_is_tried_again_after_a_pause_and_rarely_after_three_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    repository = FolderRepository(tmp_path / "repository")
    manifest = publish_simulated(repository, "m", {})
    file = repository.folder_of(manifest) / manifest.served
    content = file.read_bytes()
    file.write_bytes(b"damaged")
    models = LoadedModels()
    loads = VersionLoads(
        repository,
        LoadEnvironment(get_backend("simulated", tmp_path), "simulated", "cpu", 1),
        models,
        WorkerMetrics(MetricsRegistry(None, "worker"), "sim", "sim-0", "cpu"),
        LoadGuard(LoadMarks(tmp_path, "sim-0-1"), Limits(60.0, 60.0), lambda: None),
        lambda: 5.0,
        FailedLoads(lambda: now[0], lambda: 0.0),
    )
    loads.start(LoadPolicy())
    content_id = manifest.content_id

    def ends_as(wanted: State) -> bool:
        model = models.get(content_id)
        return model is not None and model.state is wanted and not loads.pending

    caplog.set_level(logging.INFO)
    for failures in range(1, FAILURES_MAX + 1):
        loads.want([LoadRequest(manifest)], ())
        wait_until(lambda: ends_as(State.FAILED), what="it failed")
        pause_s = (FAILED_RETRY_S if failures < FAILURES_MAX else FAILED_OFTEN_RETRY_S) / 2
        [record] = models.records()
        assert record.retry_at == now[0] + pause_s
        assert loads.failed.of(content_id) == (failures, 0.0)
        now[0] += pause_s - 1.0
        assert not loads.failed.any_due()
        now[0] += 1.0
        assert loads.failed.any_due()
        assert loads.failed.take_due(content_id)
        assert not loads.failed.take_due(content_id), "once"
        models.remove(content_id)
    file.write_bytes(content)
    loads.want([LoadRequest(manifest)], ())
    wait_until(lambda: ends_as(State.READY), what="it is ready")
    assert loads.failed.of(content_id)[0] == 0
    levels = [record.levelname for record in caplog.records if record.message.startswith("failed: ")]
    assert levels == ["ERROR", "INFO", "INFO"], "the same failure again is no news"
    loads.stop()


def test_a_load_whose_reserved_memory_was_taken_by_others_did_not_fail(tmp_path: Path) -> None:
    repository = FolderRepository(tmp_path / "repository")
    manifest = publish_simulated(repository, "m", {})
    taken = [100 << 20]
    budget = MemoryBudget(400 << 20, lambda: taken[0])
    models = LoadedModels()
    loads = VersionLoads(
        repository,
        LoadEnvironment(get_backend("simulated", tmp_path), "simulated", "cpu", 1, budget),
        models,
        WorkerMetrics(MetricsRegistry(None, "worker"), "sim", "sim-0", "cpu"),
        LoadGuard(LoadMarks(tmp_path, "sim-0-1"), Limits(60.0, 60.0), lambda: None),
        lambda: 0.0,
    )
    short: list[LoadRequest] = []
    ended: list[str] = []

    class Policy(LoadPolicy):
        def load_ended(self, content_id: str) -> None:
            ended.append(content_id)

        def found_no_memory(self, request: LoadRequest) -> bool:
            short.append(request)
            return True

    loads.memory.reserve(manifest)
    taken[0] = 399 << 20  # another instance turns out to take more than was predicted
    loads.start(Policy())
    loads.demand(LoadRequest(manifest, demanded=True))
    wait_until(lambda: bool(ended), what="the load has ended")
    loads.stop()
    assert [request.content_id for request in short] == ended == [manifest.content_id]
    model = models.get(manifest.content_id)
    assert model is not None
    assert model.state is State.LOADING, "who tries it again says what it becomes"
    assert not loads.failed.any_due()
    taken[0] = 100 << 20
    assert budget.used_bytes == 100 << 20


def test_a_trial_load_is_a_phase_before_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_HOME", str(tmp_path))
    repository = FolderRepository(tmp_path / "repository")
    manifest = publish_simulated(repository, "m", {})
    models = LoadedModels()
    loads = loads_of(repository, models, tmp_path)
    phases = []
    for name, function in (("probe", probe), ("load", load)):

        def noted(*arguments: Any, name: str = name, function: Callable[..., Any] = function) -> Any:
            [current] = loads._loads
            phases.append((name, current.phase))
            return function(*arguments)

        monkeypatch.setattr(version_loads, name, noted)
    loads.start(LoadPolicy())
    loads.want([LoadRequest(manifest, suspect=True)], ())
    wait_until(lambda: [record.state for record in models.records()] == [State.READY], what="it is ready")
    loads.stop()
    assert phases == [("probe", "loading on trial"), ("load", "loading")]


def test_the_record_of_a_ready_version_tells_of_no_load_that_others_come_after(tmp_path: Path) -> None:
    repository = FolderRepository(tmp_path / "repository")
    manifest = publish_simulated(repository, "m", {})
    published: dict[State, list[str]] = {}

    class Publisher(BeatSignal):
        def now(self) -> None:
            published[models.all()[manifest.content_id].state] = [one.content_id for one in loads.records()]

        soon = now

    models = LoadedModels(signal=Publisher())
    loads = loads_of(repository, models, tmp_path)
    loads.start(LoadPolicy())
    loads.demand(LoadRequest(manifest, demanded=True))
    wait_until(lambda: State.READY in published, what="it is ready")
    assert published == {State.LOADING: [manifest.content_id], State.WARMING: [manifest.content_id], State.READY: []}
    wait_until(lambda: not loads.pending, what="the load has ended")
    loads.stop()


@pytest.mark.parametrize("behaviour", [{"endless_if": 0}, {"hang_if": 0}])
def test_a_trial_load_whose_warm_up_takes_too_long_fails_its_version_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, Any]
) -> None:
    monkeypatch.setenv("MILLSTREAM_HOME", str(tmp_path))
    repository = FolderRepository(tmp_path / "repository")
    manifest = publish_simulated(repository, "m", behaviour)
    models = LoadedModels()
    environment = LoadEnvironment(get_backend("simulated", tmp_path), "simulated", "cpu", 1)
    loads = VersionLoads(
        repository,
        environment,
        models,
        WorkerMetrics(MetricsRegistry(None, "worker"), "sim", "sim-0", "cpu"),
        LoadGuard(LoadMarks(tmp_path / "run", "sim-0-1"), Limits(600.0, 1.0), lambda: None),
        lambda: 5.0,
    )
    loads.start(LoadPolicy())
    loads.want([LoadRequest(manifest, suspect=True)], ())
    wait_until(lambda: [record.state for record in models.records()] == [State.FAILED], what="it failed")
    loads.stop()
    [record] = models.records()
    assert (record.reason, record.retry_at) == ("warming up took longer than 1 s", 0.0)
    assert repository.verdicts.of(manifest).on(environment.kind).failed == record.reason
    assert not list((tmp_path / "run" / "loads").iterdir()), "no mark is left"
