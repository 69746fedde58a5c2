"""Races: jobs that measure compiled forms of a version against each other. Kept across restarts, beside the versions.

<root>/races/<model>@<version>@<kind>@<device>.json   Race: what was asked for, its state, and the report at its end
<root>/races/….lock                                   file locks: one worker runs a race, one race runs on a device

POST ─> waiting ─(the version is ready)─┐
POST ───────────────────────────────────┴> queued ─(a worker has both locks)─> running ─> decided | failed | cancelled
running ─(others left it no time)─> unfinished ─(a pause)─> queued, and run with a share of the processor
A running race whose lock is free lost its worker: another worker goes on with it. Each change is one rename.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from millstream.plugins.compile.stored.race_parts import TRIALS_MAX, StoredProgress, StoredReport, Trial, trials_of
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.names import check_name, check_version
from millstream.services.repository.disk import locked, read_file, replace_file, storage_errors, try_lock
from millstream.services.repository.verdicts import content_digest
from millstream.services.wire.records import WorkerRecord

log = logging.getLogger("millstream.races")

DOCUMENT_BYTES_MAX = 4 << 20  # a larger one counts as damaged
RACES_MAX = 1024  # of all versions; beyond, those that ended the longest ago are deleted
PAST_MAX = 8  # earlier verdicts that a race remembers
SECONDS_DEFAULT = 120.0
SECONDS_MAX = 86_400.0
TARGETS_MAX = 64  # that a race names
TRIES_MAX = 5  # of a race whose worker died; then it failed
UNFINISHED_MAX = 2  # times that a race ends for lack of time; then it begins again only if it is asked for


class RaceState(StrEnum):
    """Progress of a race.

    WAITING: for the version to be loaded. UNFINISHED: other work left it too little time; a worker queues it again, and
    runs it with a share of the processor. DECIDED: it has a report, whether or not anything is faster than the version.
    """

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    UNFINISHED = "unfinished"
    DECIDED = "decided"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more happens, or only after a pause."""
        return self not in {RaceState.WAITING, RaceState.QUEUED, RaceState.RUNNING}


class Gate(BaseModel):
    """What the outputs of a candidate must agree in with those of the baseline."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    cosine_min: float = Field(0.999, ge=-1, le=1, description="Least cosine similarity of each output.")
    agreement_min: float = Field(0.99, ge=0, le=1, description="Least share of rows with the same largest element.")


class RaceOptions(BaseModel):
    """What a race is asked for."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seconds: float = Field(SECONDS_DEFAULT, gt=0, le=SECONDS_MAX, description="Longest time of the race.")
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


class RaceKey(NamedTuple):
    """What a race is about: a version on a kind of device.

    Args:
        kind: backend and kind of device of the workers, like "onnxruntime.cpu".
        device: id of the device and of the libraries there, of `environment`.
    """

    model: str
    version: int
    kind: str
    device: str

    @property
    def name(self) -> str:
        """The name of the document, without its ending."""
        return f"{check_name(self.model)}@{check_version(self.version)}@{self.kind}@{self.device}"


class Verdict(BaseModel):
    """How an earlier race ended."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: RaceState
    ended_at: float
    winner: str | None = None
    ratio: float = 1.0
    why: str = ""


class Undone(BaseModel):
    """Why a winner serves no longer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    why: str
    at: float  # seconds since the epoch
    automatic: bool = True


class Race(BaseModel):
    """The document of a race. Instants are seconds since the epoch.

    Args:
        content: digest of the version's content; a race of other content is not continued.
        rows: rows of batches in live traffic -> how many batches had them; empty: not known.
        tries: how often a worker began it.
        unfinished: how often it ended for lack of time since it was asked for.
        progress: the last event of the race while it runs.
        report: what was measured, and the winner; None: it is not decided.
        undone: why the winner serves no longer.
        past: how earlier races of the version ended on this kind of device, the last one first.
        trials: what earlier races of the version found out of candidates that the report does not have.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = 1
    model: str
    version: int
    content: str
    kind: str
    device: str
    pool: str
    state: RaceState = RaceState.QUEUED
    options: RaceOptions = RaceOptions()
    rows: dict[int, float] = {}
    requested_at: float
    began_at: float = 0.0
    ended_at: float = 0.0
    worker: str = ""
    tries: int = 0
    unfinished: int = 0
    why: str = ""
    progress: dict[str, Any] = {}
    report: dict[str, Any] | None = None
    undone: Undone | None = None
    past: tuple[Verdict, ...] = Field((), max_length=PAST_MAX)
    trials: tuple[Trial, ...] = Field((), max_length=TRIALS_MAX)

    @field_validator("report", "progress")
    @classmethod
    def _can_be_shown(cls, value: dict[str, Any] | None, about: ValidationInfo) -> dict[str, Any] | None:
        """Return a document as it is whose parts have the types that its readers rely on; else the race is damaged."""
        if value is not None:
            (StoredReport if about.field_name == "report" else StoredProgress).model_validate(value)
        return value

    @property
    def key(self) -> RaceKey:
        return RaceKey(self.model, self.version, self.kind, self.device)

    @property
    def winner(self) -> str | None:
        """The candidate that won; None: the baseline, or there is no verdict."""
        found = (self.report or {}).get("winner")
        return found if isinstance(found, str) else None

    @property
    def fingerprint(self) -> str:
        """The device of the report; empty: there is none."""
        found = (self.report or {}).get("fingerprint")
        return found if isinstance(found, str) else ""

    def known_trials(self) -> tuple[Trial, ...]:
        """Return the trials of the report, and earlier ones of other candidates."""
        last = trials_of(StoredReport.model_validate(self.report or {}))
        keys = {trial.candidate for trial in last}
        return (*last, *(trial for trial in self.trials if trial.candidate not in keys))[:TRIALS_MAX]

    def is_same_request(self, other: Race) -> bool:
        """Return whether another document is of the same request: neither asked for anew, nor of other content."""
        return (self.key, self.content, self.requested_at) == (other.key, other.content, other.requested_at)

    def ended(self, state: RaceState, now: float, why: str = "", report: dict[str, Any] | None = None) -> Race:
        """Return the race as it is after its end."""
        return self.model_copy(
            update={"state": state, "ended_at": now, "why": why, "report": report, "progress": {}, "worker": ""}
        )

    def resumed(self) -> Race:
        """Return an unfinished race that begins again, with the options and the count of before."""
        return self.requeued(self.requested_at, self.options, self.rows, self.why).model_copy(
            update={"unfinished": self.unfinished, "past": self.past}
        )

    def requeued(self, now: float, options: RaceOptions, rows: Mapping[int, float], why: str = "") -> Race:
        """Return a race that begins anew, and remembers how this one ended."""
        past = self.past
        if self.state.ended:
            ratio = (self.report or {}).get("ratio", 1.0)
            about = self.undone.why if self.undone is not None else self.why
            verdict = Verdict(state=self.state, ended_at=self.ended_at, winner=self.winner, ratio=ratio, why=about)
            past = (verdict, *past)[:PAST_MAX]
        return Race(
            model=self.model,
            version=self.version,
            content=self.content,
            kind=self.kind,
            device=self.device,
            pool=self.pool,
            options=options,
            rows=dict(rows),
            requested_at=now,
            why=why,
            past=past,
            trials=self.known_trials(),
        )


def new_race(manifest: Manifest, kind: str, device: str, pool: str, now: float) -> Race:
    """Return a race of a version that was not asked for before."""
    return Race(
        model=manifest.model,
        version=manifest.version,
        content=content_digest(manifest),
        kind=kind,
        device=device,
        pool=pool,
        requested_at=now,
    )


def has_worker(race: Race, workers: Iterable[WorkerRecord]) -> bool:
    """Return whether one of some workers is of the race's pool, and has its device and the libraries there."""
    for worker in workers:
        if (worker.pool, worker.kind) == (race.pool, race.kind):
            fingerprint = worker.hardware.fingerprint if worker.hardware is not None else ""
            if environment(fingerprint, worker.packages) == race.device:
                return True
    return False


class Lock:
    """A file lock that ends with `release`, or with the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Races:
    """The races of a folder repository. Safe for several threads and processes.

    Args:
        root: folder of the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._folder = self._root / "races"
        self._read: dict[str, _Stamped] = {}  # file name -> its race
        self._unreadable: set[str] = set()  # names of files of which the log says so

    def all(self) -> list[Race]:
        """Return all races whose documents are not damaged; one that did not change since the last call is not read.

        A document that cannot be read at present counts as it was read last. Raises Failure(INTERNAL) if the folder
        cannot be listed: no race must seem to be deleted then.
        """
        with storage_errors(self._root):
            names = _names(self._folder)
        self._read = {name: read for name in names if (read := self._read_again(name)) is not None}
        self._unreadable &= self._read.keys()
        return [read.race for read in self._read.values() if read.race is not None]

    def of(self, model: str, version: int) -> list[Race]:
        """Return the races of a version, the one that was asked for last first. Raises Failure(INTERNAL)."""
        prefix = f"{check_name(model)}@{check_version(version)}@"
        with storage_errors(self._root):
            names = [name for name in _names(self._folder) if name.startswith(prefix)]
            found = [race for name in names if (race := _read(self._folder / name)) is not None]
        return sorted(found, key=lambda race: -race.requested_at)

    def get(self, key: RaceKey) -> Race | None:
        """Return a race; None: there is none, or its document is damaged. Raises Failure(INTERNAL)."""
        with storage_errors(self._root):
            race = _read(self._path(key))
        return race if race is not None and race.key == key else None

    def change(self, key: RaceKey, change: Callable[[Race | None], Race | None]) -> Race | None:
        """Replace a race by the result of `change`, which gets the race as it is stored; None leaves it as it is.

        Returns what is stored then. Raises Failure(STORAGE, INTERNAL).
        """
        with storage_errors(self._root):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._folder / ".lock"):
                before = self.get(key)
                after = change(before)
                if after is None or after == before:
                    return before
                if before is None:
                    self._bound()
                replace_file(self._path(key), after.model_dump_json(indent=1).encode() + b"\n")
                return after

    def forget(self, model: str, version: int | None = None) -> None:
        """Delete the races of a version that is deleted, or of all versions of a model."""
        number = "*" if version is None else str(check_version(version))
        for path in self._folder.glob(f"{check_name(model)}@{number}@*"):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def try_run(self, key: RaceKey) -> Lock | None:
        """Lock a race for one worker; None: another one runs it."""
        return self._try_lock(f"{key.name}.lock")

    def try_device(self, host: str, device: str) -> Lock | None:
        """Lock a device for one race; None: another race runs there."""
        return self._try_lock(f"device-{sha256(f'{host}/{device}'.encode()).hexdigest()[:16]}.lock")

    def _try_lock(self, name: str) -> Lock | None:
        with storage_errors(self._root):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = try_lock(self._folder / name)
        return None if descriptor is None else Lock(descriptor)

    def _path(self, key: RaceKey) -> Path:
        return self._folder / f"{key.name}.json"

    def _read_again(self, name: str) -> _Stamped | None:
        """Return a race as it is now, or was when it could be read last; None: it is gone, or was never read."""
        path, known = self._folder / name, self._read.get(name)
        try:
            about = path.stat()
            stamp = (about.st_ino, about.st_mtime_ns, about.st_size)
            if known is not None and known.stamp == stamp:
                return known
            return _Stamped(stamp, _read(path))
        except FileNotFoundError:
            return None
        except OSError as error:  # as when the process has too many open files
            if name not in self._unreadable:
                self._unreadable.add(name)
                log.warning("%s cannot be read at present: %s", path, error.strerror)
            return known or _Stamped((0, 0, 0), None)

    def _bound(self) -> None:
        """Delete the races that ended the longest ago beyond the limit, before one is added."""
        races = self.all()
        ended = sorted((race for race in races if race.state.ended), key=lambda race: race.ended_at)
        for race in ended[: max(0, len(races) + 1 - RACES_MAX)]:
            self._path(race.key).unlink(missing_ok=True)
            self._path(race.key).with_suffix(".lock").unlink(missing_ok=True)


class _Stamped(NamedTuple):
    """A race as it was read.

    Args:
        stamp: inode, modification time and size of its file; another one: the file changed.
        race: None: its document is damaged.
    """

    stamp: tuple[int, int, int]
    race: Race | None


def _names(folder: Path) -> list[str]:
    """Return the names of the documents in a folder; none if there is no folder. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.name.endswith(".json"))
    except FileNotFoundError:
        return []


def _read(path: Path) -> Race | None:
    """Return a race; None: there is none, or its document is damaged. Raises OSError if it cannot be read."""
    try:
        race = Race.model_validate_json(read_file(path, DOCUMENT_BYTES_MAX))
        if f"{race.key.name}.json" != path.name:
            raise ValueError("it is of another race")
        return race
    except FileNotFoundError:
        return None
    except Failure as failure:  # a name or a version that none can have
        log.warning("%s is damaged and counts as no race: %s", path, failure.message)
        return None
    except ValueError as error:
        why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        log.warning("%s is damaged and counts as no race: %s", path, why)
        return None
