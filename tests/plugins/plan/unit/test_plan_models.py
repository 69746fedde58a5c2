"""What `millstream plan` takes from a running server, and from a repository."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.plugins.plan.models import models_of_repository, models_of_server
from millstream.plugins.plan.simulation.models import MEDIAN_RUN_S
from millstream.services.repository import endpoint_changes
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.footprints import Measured
from tests.kit.versions import publish

MB = 1 << 20
LOAD = {"pool": "cpu", "size_bytes": 30 << 20, "peak_bytes": 0, "load_s": 4.0, "measured": False}


def _instance(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "version": 1, "size_bytes": 10 * MB, "peak_bytes": 2 * MB, "load_s": 1.5} | fields


def _version(model: str, **fields: Any) -> dict[str, Any]:
    settings = {"pools": [], "pin": False, "instances_min": 0, "instances_max": 0, "idle_s": 0.0}
    shown = {"model": model, "version": 1, "active": True, "state": "ready", "settings": settings, "load": None}
    return {**shown, "pools": ["cpu"]} | fields


def _worker(*instances: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "id": "cpu-1-1",
        "pool": "cpu",
        "draining": False,
        "budget_bytes": 500 * MB,
        "used_bytes": 70 * MB,
        "instances": list(instances),
    } | fields


def _statistics(name: str, calls: int, *runs_ms: float) -> dict[str, Any]:
    batches = [{"batch_size": 1, "compute_infer": {"count": 1, "ns": ms * 1e6}} for ms in runs_ms]
    return {
        "name": name,
        "version": "1",
        "inference_stats": {"success": {"count": calls, "ns": 0}},
        "batch_stats": batches,
    }


def _read(workers: list[dict[str, Any]], versions: list[dict[str, Any]], *statistics: dict[str, Any]) -> Any:
    found: Any = {"leader": None, "workers": workers, "models": versions, "next_page_token": None}
    return models_of_server(found, statistics)  # type: ignore[arg-type]


def test_measured_and_predicted_models_of_a_server_with_their_settings():
    pinned = {"pin": True, "instances_min": 1, "instances_max": 2, "idle_s": 0.0}
    load = {"pool": "cpu", "size_bytes": 30 * MB, "peak_bytes": 3 * MB, "load_s": 4.0, "measured": False}
    known = _read(
        [_worker(_instance("a")), _worker(budget_bytes=400 * MB, used_bytes=40 * MB), _worker(draining=True)],
        [
            _version("a", settings=pinned),
            _version("a", version=2, active=False, state="standby", load=load, settings=pinned),
            _version("b", state="standby", load=load),
            _version("broken", state="failed"),
        ],
        _statistics("a", 4, 30.0, 10.0),
        _statistics("b", 0),
    )
    first, old, other = known.models
    assert (first.name, first.footprint.resident_bytes, first.footprint.load_s) == ("a", 10 * MB, 1.5)
    assert (first.pin, first.instances_min, first.instances_max) == (True, 1, 2)
    assert first.run_s == pytest.approx(0.01), "40 ms of runs for 4 calls"
    assert (old.name, old.pin, old.instances_min) == ("a:2", False, 0), "settings hold for the active version"
    assert (other.footprint.resident_bytes, other.footprint.load_s, other.run_s) == (30 * MB, 4.0, MEDIAN_RUN_S)
    assert (known.measured, known.workers) == (1, 2)
    assert known.memory_bytes == 360 * MB, "the second worker has 40 MB of its own"
    assert _read([_worker(_instance("a"))], [_version("a")]).memory_bytes == (500 - (70 - 12)) * MB


def test_a_model_of_0_bytes_is_measured_and_one_that_is_not_loaded_is_not():
    load = {"pool": "cpu", "size_bytes": 30 * MB, "peak_bytes": 3 * MB, "load_s": 4.0, "measured": False}
    small, loading = _instance("a", size_bytes=0), _instance("a", size_bytes=0, peak_bytes=0, load_s=0.0)
    for instance, expected in ((small, (0, 1.5, True)), (loading, (30 * MB, 4.0, False))):
        [model] = _read([_worker(instance)], [_version("a", load=load)]).models
        footprint = model.footprint
        assert (footprint.resident_bytes, footprint.load_s, footprint.measured) == expected


def test_a_server_without_models_or_limits():
    with pytest.raises(ValueError, match="serves no model"):
        _read([_worker()], [_version("a", state="pending")])
    assert _read([_worker(_instance("a"), budget_bytes=None)], [_version("a")]).memory_bytes == 0


def test_a_repository_tells_what_was_measured_and_predicts_the_rest(tmp_path):
    repository = FolderRepository(tmp_path / "repository")
    for name in ("a", "b"):
        endpoint_changes.activate_version(repository, publish(repository, name, 1).model, 1)
    measured = Measured(resident_bytes=50 * MB, peak_bytes=MB, load_s=2.5)
    repository.footprints.write(repository.manifest("a", 1), "openvino.gpu", measured)
    for folder in (tmp_path, tmp_path / "repository"):
        known = models_of_repository(folder)
        first, second = known.models
        assert (first.footprint.resident_bytes, first.footprint.load_s) == (50 * MB, 2.5)
        assert second.footprint.resident_bytes > 0
        assert (known.measured, known.workers, second.footprint.measured) == (1, 0, False)
    assert repository.footprints.kinds(repository.manifest("b", 1)) == []


def test_the_room_that_a_worker_tells_is_its_memory_for_models():
    """What it uses now, with a load in progress or an unload that is not free yet, does not say it."""
    workers = [_worker(_instance("a"), room_bytes=320 * MB), _worker(room_bytes=None, budget_bytes=None)]
    assert _read(workers, [_version("a")]).memory_bytes == 320 * MB


def test_a_server_has_pools_with_what_the_smallest_of_their_workers_has_for_models():
    known = _read(
        [
            _worker(_instance("a")),
            _worker(budget_bytes=400 * MB, used_bytes=40 * MB),
            _worker(pool="gpu", room_bytes=900 * MB),
            _worker(pool="gpu", draining=True),
        ],
        [
            _version("a", pools=["gpu", "cpu"]),
            _version("b", load=LOAD, settings={"pools": ["cpu"]}, pools=["cpu"]),
        ],
    )
    assert known.pools == (("cpu", 2, 360 * MB), ("gpu", 1, 900 * MB))
    assert [one.pools for one in known.models] == [("gpu", "cpu"), ("cpu",)]
