"""The models of a simulation: from a table, a running server, or a repository.

--models FILE | server | FOLDER ─> KnownModels ─> millstream plan
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.client.documents import (
    InstancePlacement,
    Placement,
    VersionPlacement,
    VersionStatistics,
    WorkerPlacement,
)
from millstream.plugins.plan.simulation.models import MEDIAN_RUN_S, SimulatedModel
from millstream.services.model.formats import backend_of
from millstream.services.placement.views import Footprint

if TYPE_CHECKING:
    from millstream.services.model.manifest import Manifest

SERVING = frozenset({"ready", "standby", "loading", "warming", "pending", "draining"})


class KnownPool(NamedTuple):
    """A pool of a server. `memory_bytes`: what the smallest of its workers has for models; 0: no limit."""

    name: str
    workers: int
    memory_bytes: int


class KnownModels(NamedTuple):
    """Models, and where their numbers come from.

    Args:
        measured: models whose memory was measured; the others' is predicted.
        workers: workers that the server has; 0: there is no server.
        memory_bytes: what the smallest of them has for models; 0: no limit, or there is no server.
        pools: those of the server, by name.
    """

    models: list[SimulatedModel]
    measured: int
    workers: int = 0
    memory_bytes: int = 0
    pools: tuple[KnownPool, ...] = ()


def models_of_server(found: Placement, statistics: Iterable[VersionStatistics]) -> KnownModels:
    """Return the models that a server serves. The active version has the model's name, others "name:version".

    Raises:
        ValueError: it serves no model whose memory is known.
    """
    runs_s = {(one["name"], one["version"]): _run_s(one) for one in statistics}
    instances = {
        (one["model"], one["version"]): one
        for worker in found["workers"]
        for one in worker["instances"]
        if one["load_s"]
    }
    models, measured = [], 0
    for one in found["models"]:
        footprint = _footprint(one, instances.get((one["model"], one["version"])))
        if one["state"] not in SERVING or footprint is None:
            continue
        measured += footprint.measured
        settings: Mapping[str, Any] = one["settings"] if one["active"] else {}
        models.append(
            SimulatedModel(
                one["model"] if one["active"] else f"{one['model']}:{one['version']}",
                footprint,
                runs_s.get((one["model"], str(one["version"]))) or MEDIAN_RUN_S,
                bool(settings.get("pin", False)),
                int(settings.get("instances_min", 0)),
                int(settings.get("instances_max", 0)),
                float(settings.get("idle_s", 0.0)),
                tuple(settings.get("pools") or one["pools"]),
            )
        )
    if not models:
        raise ValueError("the server serves no model, or no worker has said what its models take")
    serving = [worker for worker in found["workers"] if not worker["draining"]]
    names = sorted({worker["pool"] for worker in serving})
    pools = tuple(_known_pool(name, [worker for worker in serving if worker["pool"] == name]) for name in names)
    limits = [pool.memory_bytes for pool in pools if pool.memory_bytes]
    return KnownModels(models, measured, len(serving), min(limits, default=0), pools)


def _known_pool(name: str, workers: Sequence[WorkerPlacement]) -> KnownPool:
    rooms = [
        # An earlier release does not say it.
        worker.get("room_bytes")
        or max(0, worker["budget_bytes"] - _base_bytes(worker["used_bytes"], worker["instances"]))
        for worker in workers
        if worker["budget_bytes"]
    ]
    return KnownPool(name, len(workers), min(rooms, default=0))


def _base_bytes(used_bytes: int, instances: list[InstancePlacement]) -> int:
    """Return what a worker's process takes beside its instances and the largest of their peaks."""
    held = sum(one["size_bytes"] for one in instances) + max((one["peak_bytes"] for one in instances), default=0)
    return max(0, used_bytes - held)


def _footprint(version: VersionPlacement, instance: InstancePlacement | None) -> Footprint | None:
    if instance is not None and (instance["load_s"] or instance["size_bytes"]):
        return Footprint(instance["size_bytes"], instance["peak_bytes"], instance["load_s"], measured=True)
    load = version["load"]
    if load is None:
        return None
    return Footprint(load["size_bytes"], load["peak_bytes"], load["load_s"], load["measured"])


def _run_s(one: VersionStatistics) -> float:
    """Return the seconds that a worker is busy with one call, its share of a batch; 0: it was not called."""
    calls = one["inference_stats"]["success"]["count"]
    busy_ns = sum(batch["compute_infer"]["ns"] for batch in one["batch_stats"])
    return busy_ns / 1e9 / calls if calls else 0.0


def models_of_repository(folder: Path) -> KnownModels:
    """Return the models that a repository serves. Footprints are those that workers wrote there, else predicted.

    Raises:
        ValueError: the folder is no repository, or has no model that serves.
        Failure: it cannot be read.
    """
    from millstream.services.repository.folder import FolderRepository
    from millstream.services.repository.stored_models import StoredModels

    root = folder if (folder / "models").is_dir() else folder / "repository"
    if not (root / "models").is_dir():
        raise ValueError("it is no repository: it has no folder 'models'")
    repository = FolderRepository(root)
    stored = StoredModels(repository)
    stored.read()
    served = [
        (name if number == one.endpoint.active else f"{name}:{number}", manifest, verdict, one.endpoint)
        for name, one in sorted(stored.models.items())
        for number, (manifest, verdict) in one.versions.items()
        if one.endpoint.serves(number)
    ]
    kinds = [_kind(repository.footprints.kinds(manifest), manifest) for _, manifest, _, _ in served]
    models, measured = [], 0
    for (title, manifest, verdict, endpoint), kind in zip(served, kinds, strict=True):
        if verdict.failed_on({kind}):
            continue
        # All measured ones are read by now, so that the others are predicted from all of them.
        footprint, settings = repository.footprints.of(manifest, kind), endpoint.placement_of(manifest.version)
        measured += footprint.measured
        models.append(
            SimulatedModel(
                title,
                footprint,
                MEDIAN_RUN_S,
                settings.pin,
                settings.instances_min,
                settings.instances_max,
                settings.idle_s,
                settings.pools,
            )
        )
    if not models:
        raise ValueError("no model of it serves")
    return KnownModels(models, measured)


def _kind(measured: Iterable[str], manifest: Manifest) -> str:
    """Return the kind of instances to simulate: one on a CPU that was measured, else any, else the usual backend's."""
    kinds = sorted(measured, key=lambda kind: (not kind.endswith(".cpu"), kind))
    return kinds[0] if kinds else f"{backend_of(manifest.source_format)}.cpu"
