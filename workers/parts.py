"""What a plug-in may use of a worker, and what it adds to one.

contributions("worker", WorkerPart's builder) ─> build(WorkerParts) ─> WorkerPart: started and stopped with the worker
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import DeviceRecord
from millstream.workers.batches.watchdog import LoopState
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModels


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker's plug-ins may use.

    Args:
        id: of this process.
        name: of the worker, also after a restart.
        host: equal for processes of one machine.
        packages: inference libraries and compilers -> versions.
        loop: how far the main loop is.
        run_dir: for files that outlive the process.
    """

    id: str
    name: str
    pool: str
    host: str
    device: DeviceRecord
    packages: dict[str, str]
    repository: FolderRepository
    environment: LoadEnvironment
    models: LoadedModels
    metrics: WorkerMetrics
    loop: LoopState
    run_dir: Path


class WorkerPart(Protocol):
    """A part of a worker that a plug-in adds."""

    def start(self) -> None: ...

    def stop(self) -> None: ...
