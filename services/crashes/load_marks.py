"""Load marks: record which versions a process is loading, so that its death counts against them.

worker: write a mark ─> load, warm up ─> remove the mark
after its death (the supervisor, or the next worker of that name): take the stale marks ─> count the death in verdicts

<run>/loads/<worker>.<n>   a Mark; locked by its process until that ends
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from millstream.services.model.manifest import Manifest
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import EVERY_KIND, Verdict

log = logging.getLogger("millstream.loads")

# Deaths after which a version is no longer loaded:
DEATHS_CERTAIN = 2  # if the load was certainly the cause
DEATHS_ALONE = 3  # if the process loaded nothing else, but how it ended is unknown
DEATHS_MAX = 5  # in all other cases
DOCUMENT_BYTES_MAX = 4 << 20
PROBE = "probe"  # replaces pool and index in the id of a process that loads one version in isolation


class Mark(BaseModel):
    """A load in progress.

    Args:
        alone: the process does nothing else.
        kind: of the worker, by which verdicts are kept.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    manifest: Manifest
    alone: bool = False
    kind: str = EVERY_KIND


class LoadMarks:
    """The marks of one process; `worker` is its id."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self.run_dir = run_dir
        self._folder = marks_dir(run_dir)
        self._worker = worker
        self._numbers = itertools.count()

    def close(self) -> None:
        """Remove all marks: the process ends as planned, so loads in progress are not at fault."""
        take_stale_marks(self.run_dir, f"{self._worker}.", own=True)

    @contextmanager
    def loading(self, manifest: Manifest, kind: str, *, alone: bool = False) -> Iterator[None]:
        """Keep a mark while the block runs. If it cannot be written, the load continues unmarked."""
        path = self._folder / f"{self._worker}.{next(self._numbers)}"
        descriptor = -1
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, Mark(manifest=manifest, alone=alone, kind=kind).model_dump_json().encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
            if descriptor >= 0:
                os.close(descriptor)


def marks_dir(run_dir: Path) -> Path:
    """Return the folder of all load marks of an installation."""
    return run_dir / "loads"


def take_stale_marks(run_dir: Path, worker: str, *, own: bool = False) -> list[Mark]:
    """Remove the marks of dead processes whose id begins with `worker`, and return them; each is returned only once.

    `own` also removes marks of this process, which are locked, and returns none.
    """
    marks: list[Mark] = []
    with suppress(OSError):
        for path in sorted(marks_dir(run_dir).iterdir()):
            if path.name.startswith(worker):
                with suppress(OSError):
                    if own:
                        path.unlink()
                    else:
                        marks += _take_mark(path)
    return marks


def _take_mark(path: Path) -> list[Mark]:
    """Remove the mark of a dead process and return it; none if another process took it or it was not complete."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the process is alive
        if not os.fstat(descriptor).st_nlink:
            return []  # another process took it first
        content = os.read(descriptor, DOCUMENT_BYTES_MAX)
        path.unlink()
        return [Mark.model_validate_json(content)]
    except ValidationError:
        return []  # the process died while it wrote the mark, before the load
    finally:
        os.close(descriptor)


def with_death(verdict: Verdict, kind: str, deaths_max: int, how: str, now: float) -> Verdict:
    """Return `verdict` after one more death of a worker of `kind`, on which it is failed from `deaths_max` on. Pure.

    `how` says how the process ended, as `describe_exit` does; `now` is the time in seconds since the epoch.
    """
    before = verdict.on(kind)
    deaths = before.deaths + 1
    after = before.model_copy(update={"deaths": deaths})
    if deaths < deaths_max or after.failed:
        return verdict.with_loads(kind, after)
    reason = (
        f"{deaths} processes died while they loaded it, the last {how}: it is no longer loaded; "
        "upload another version, or activate or load this one to try it again"
    )
    return verdict.with_loads(kind, after.with_failure(reason, now))


def record_death(
    repository: FolderRepository, marks: Sequence[Mark], how: str, now: float, *, certain: bool, busy: bool = False
) -> list[str]:
    """Count the death of one process in the verdict of each version it was loading; returns their content ids.

    `certain` says that the process ended by itself; `busy`, that a run was in progress, which may have been the cause.
    `how` and `now` are as for `with_death`. Raises Failure if a verdict cannot be written.
    """
    for mark in marks:
        deaths_max = DEATHS_MAX
        if len(marks) == 1 and not busy:
            deaths_max = DEATHS_CERTAIN if certain else DEATHS_ALONE if mark.alone else DEATHS_MAX

        def change(verdict: Verdict, kind: str = mark.kind, deaths_max: int = deaths_max) -> Verdict:
            return with_death(verdict, kind, deaths_max, how, now)

        verdict = repository.verdicts.change(mark.manifest, change)
        name = f"version {mark.manifest.version} of {mark.manifest.model}"
        log.warning("%s: a process that was loading it %s (%d in a row)", name, how, verdict.on(mark.kind).deaths)
    return [mark.manifest.content_id for mark in marks]
