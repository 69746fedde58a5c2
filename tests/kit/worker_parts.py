"""The parts of a worker that a plug-in gets, without the worker."""

from __future__ import annotations

from pathlib import Path

from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import DeviceRecord
from millstream.workers.batches.watchdog import LoopState
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModels
from millstream.workers.parts import WorkerParts


def parts(
    folder: Path,
    repository: FolderRepository,
    at: LoadEnvironment,
    models: LoadedModels | None = None,
    registry: MetricsRegistry | None = None,
    loop: LoopState | None = None,
) -> WorkerParts:
    """Return the parts of a worker cpu-0; its main loop waits for work unless `loop` says otherwise."""
    if loop is None:
        loop = LoopState()
        loop.waiting = True
    return WorkerParts(
        id="cpu-0:1",
        name="cpu-0",
        pool="cpu",
        host="host",
        device=DeviceRecord(kind="cpu", name="", memory_bytes=0),
        packages={},
        repository=repository,
        environment=at,
        models=models or LoadedModels(),
        metrics=WorkerMetrics(registry or MetricsRegistry(None, "worker"), "cpu", "cpu-0", "cpu"),
        loop=loop,
        run_dir=folder,
    )
