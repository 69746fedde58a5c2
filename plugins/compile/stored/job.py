"""Jobs: races that were asked for. Kept across restarts, beside the versions, and read by every process.

<root>/races/<model>@<version>@<kind>@<device>.json   Job: what was asked for, its state, and the report at its end
<root>/races/….lock                                   one worker runs a job, one job runs on a device

POST ─> queued ─(a worker that has the version ready takes both locks)─> running ─> decided | failed | cancelled
A running job whose lock is free lost its worker: another one goes on with it.

<root>/models/<model>/<version>/race/uploaded.npz  samples that a caller of the API gave, for later races of the version

They may be users' data: mode 0600, gone with the version. services.model.samples says what they contain.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from millstream.plugins.compile.race.report import Gate, Progress, RaceReport
from millstream.services.errors import Code, Failure
from millstream.services.model.agreement import Array
from millstream.services.model.manifest import Manifest
from millstream.services.repository.disk import FileLock, fsync, storage_errors
from millstream.services.repository.documents import VersionDocument, VersionDocuments, content_digest
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import WorkerRecord

PAST_MAX = 8  # earlier verdicts that a job remembers
TARGETS_MAX = 64  # that a job names
UNFINISHED_S = 3600.0  # after which the file of samples whose write did not end is deleted
_SAMPLES, _NEW = "race", ".new-"
TRIES_MAX = 3  # of a job whose worker or process died, or which found no time; then it failed
#: States of documents of earlier releases -> what they are now.
_BEFORE = {"waiting": "queued", "unfinished": "failed"}


class RaceState(StrEnum):
    """Progress of a job. DECIDED: it has a report, whether or not anything is faster than the version."""

    QUEUED = "queued"
    RUNNING = "running"
    DECIDED = "decided"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in {RaceState.QUEUED, RaceState.RUNNING}


class RaceOptions(BaseModel):
    """What a race is asked for."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    targets: tuple[str, ...] = Field(
        (), max_length=TARGETS_MAX, description="Targets, or keys of candidates, that take part; empty: all."
    )
    gate: Gate = Field(Gate(), description="What outputs must agree in with the baseline's.")
    accept_random_samples: bool = Field(False, description="Whether lossy targets may take part without real samples.")


def environment(fingerprint: str, packages: Mapping[str, str]) -> str:
    """Return an id of a device with the inference libraries and compilers beside it, and their versions.

    A verdict holds in one environment: with another device or another version of a library, the race runs again.
    """
    installed = "\0".join(f"{name} {version}" for name, version in sorted(packages.items()))
    return sha256(f"{fingerprint}\0{installed}".encode()).hexdigest()[:16]


class RacePast(BaseModel):
    """How an earlier race of the version ended on this kind of device."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: str
    ended_at: float
    winner: str | None = None
    ratio: float = 1.0
    why: str = ""


class RaceUndone(BaseModel):
    """Why the winner of a race serves no longer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    why: str
    at: float = Field(description="Seconds since the epoch.")
    automatic: bool = Field(True, description="Whether a worker decided it; false: it was asked for.")


class Job(VersionDocument):
    """A race of a version on a kind of device. Instants are seconds since the epoch.

    Args:
        content: digest of the version's content; a job of other content is not continued.
        kind: backend and kind of device of the workers, like "onnxruntime.cpu".
        device: id of the device and of the libraries there, of `environment`.
        tries: how often a worker began it.
        progress: what it does while it runs.
        report: what was measured, and the winner; None: it is not decided.
        undone: why the winner serves no longer.
        past: how earlier races of the version ended on this kind of device, the last one first.
    """

    format: int = 1
    content: str
    kind: str
    device: str
    pool: str
    state: RaceState = RaceState.QUEUED
    options: RaceOptions = RaceOptions()
    requested_at: float
    began_at: float = 0.0
    ended_at: float = 0.0
    worker: str = ""
    tries: int = 0
    why: str = ""
    progress: Progress = Progress()
    report: RaceReport | None = None
    undone: RaceUndone | None = None
    past: tuple[RacePast, ...] = Field((), max_length=PAST_MAX)

    @field_validator("state", mode="before")
    @classmethod
    def _from_before(cls, state: Any) -> Any:
        return _BEFORE.get(state, state) if isinstance(state, str) else state

    @property
    def key(self) -> str:
        return f"{self.kind}@{self.device}"

    @property
    def over_at(self) -> float:
        return self.ended_at if self.state.ended else 0.0

    @property
    def winner(self) -> str | None:
        """The candidate that won; None: the baseline, or there is no verdict."""
        return self.report.winner if self.report is not None else None

    @property
    def ratio(self) -> float:
        """How many times as fast as the baseline the winner is."""
        return self.report.ratio if self.report is not None else 1.0

    def is_same_request(self, other: Job) -> bool:
        """Return whether another document is of the same request: neither asked for anew, nor of other content."""
        mine = (self.model, self.version, self.key, self.content, self.requested_at)
        return mine == (other.model, other.version, other.key, other.content, other.requested_at)

    def ended(self, state: RaceState, now: float, why: str = "", report: RaceReport | None = None) -> Job:
        """Return the job as it is after its end."""
        end = {"state": state, "ended_at": now, "why": why, "report": report, "progress": Progress(), "worker": ""}
        return self.model_copy(update=end)

    def requeued(self, now: float, options: RaceOptions, pool: str) -> Job:
        """Return a job that begins anew, and remembers how this one ended."""
        about = self.undone.why if self.undone is not None else self.why
        last = RacePast(state=self.state, ended_at=self.ended_at, winner=self.winner, ratio=self.ratio, why=about)
        fields = {name: getattr(self, name) for name in ("model", "version", "content", "kind", "device")}
        return Job(**fields, pool=pool, options=options, requested_at=now, past=(last, *self.past)[:PAST_MAX])


def new_job(manifest: Manifest, kind: str, device: str, pool: str, now: float) -> Job:
    """Return a job of a version that was not asked for before."""
    of = {"model": manifest.model, "version": manifest.version, "content": content_digest(manifest)}
    return Job(**of, kind=kind, device=device, pool=pool, requested_at=now)


def has_worker(job: Job, workers: Iterable[WorkerRecord]) -> bool:
    """Return whether one of some workers is of the job's pool, and has its device and the libraries there."""
    for worker in workers:
        if (worker.pool, worker.kind) == (job.pool, job.kind):
            fingerprint = worker.hardware.fingerprint if worker.hardware is not None else ""
            if environment(fingerprint, worker.packages) == job.device:
                return True
    return False


class Jobs:
    """The jobs of a repository. Safe for several threads and processes."""

    def __init__(self, repository: FolderRepository) -> None:
        self._documents: VersionDocuments[Job] = repository.documents("races", Job)

    def all(self) -> list[Job]:
        """Return all jobs. Raises Failure(INTERNAL)."""
        return self._documents.all()

    def of(self, model: str, version: int) -> list[Job]:
        """Return the jobs of a version, the one that was asked for last first. Raises Failure(INTERNAL)."""
        return sorted(self._documents.of(model, version), key=lambda job: -job.requested_at)

    def get(self, job: Job) -> Job | None:
        """Return a job as it is stored now. Raises Failure(INTERNAL)."""
        return self._documents.get(job.model, job.version, job.key)

    def put(self, job: Job, change: Callable[[Job | None], Job | None]) -> Job | None:
        """Replace the job that is stored for what `job` is about. Raises Failure(STORAGE, INTERNAL)."""
        return self._documents.change(job.model, job.version, job.key, change)

    def change(self, job: Job, to: Callable[[Job], Job | None]) -> Job | None:
        """Change a job unless it ended, or was asked for anew.

        Returns it as it is then; None: it is another one. Raises Failure(STORAGE, INTERNAL).
        """

        def changed(one: Job | None) -> Job | None:
            return None if one is None or one.state.ended or not one.is_same_request(job) else to(one)

        present = self.put(job, changed)
        return present if present is not None and present.is_same_request(job) else None

    def try_locks(self, job: Job, host: str, device: str) -> tuple[FileLock, ...]:
        """Lock a device for one job, and the job for one worker; (): another worker has one of them."""
        name = f"device-{sha256(f'{host}/{device}'.encode()).hexdigest()[:16]}"
        of_device = self._documents.try_lock(name)
        if of_device is None:
            return ()
        of_job = self._documents.try_lock(f"{job.model}@{job.version}@{job.key}")
        if of_job is None:
            of_device.release()
            return ()
        return of_device, of_job


def find_samples(repository: FolderRepository, manifest: Manifest) -> Path | None:
    """Return the samples of a version; None: there are none."""
    path = _samples_folder(repository, manifest) / "uploaded.npz"
    return path if path.is_file() else None


def write_uploaded(repository: FolderRepository, manifest: Manifest, arrays: Mapping[str, Array]) -> None:
    """Store samples in place of earlier ones. Raises Failure(NOT_FOUND, STORAGE, INTERNAL)."""
    folder = _samples_folder(repository, manifest)
    if not folder.parent.is_dir():
        raise Failure(Code.NOT_FOUND, f"version {manifest.version} of {manifest.model!r} was deleted")
    with storage_errors(folder.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=_NEW)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(folder / "uploaded.npz")
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        fsync(folder)


def sweep_samples(repository: FolderRepository) -> None:
    """Delete rows of live requests that an earlier release captured, and what killed processes left of writes."""
    now = time.time()  # noqa: TID251 - as the file system's clock
    for folder in repository.variants.beside(_SAMPLES):
        with suppress(OSError):
            for path in folder.iterdir():
                unfinished = path.name.startswith(_NEW) and now - path.stat().st_mtime > UNFINISHED_S
                if unfinished or path.name == "captured.npz":
                    path.unlink(missing_ok=True)


def _samples_folder(repository: FolderRepository, manifest: Manifest) -> Path:
    return repository.variants.compiled(manifest).parent / _SAMPLES
