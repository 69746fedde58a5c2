"""Load marks: which versions a process was loading when it died, and what follows for them.

a worker: mark ─> load, warm up ─> unmark
after its death (its supervisor, or the next worker of its name): marks left behind ─> judged ─> verdicts

<run>/loads/<worker>.<n>   a Mark; locked by its process for as long as that lives
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
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import Verdict

log = logging.getLogger("millstream.loads")

#: deaths after which a version is loaded no more: when it is certain that loading it was the cause; when the process tried
#: it alone but nobody saw how it ended; whatever the circumstances
DEATHS_CERTAIN = 2
DEATHS_ALONE = 3
DEATHS_MAX = 5
DOCUMENT_BYTES_MAX = 4 << 20
PROBE = "probe"  # stands for pool and index in the id of a process that tries a version alone


class Mark(BaseModel):
    """A load under way. `alone`: the process does nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest
    alone: bool = False


class LoadMarks:
    """The marks of one process. `worker`: its id."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self.run_dir = run_dir
        self._folder = marks_dir(run_dir)
        self._worker = worker
        self._numbers = itertools.count()

    def close(self) -> None:
        """The process ends as it was told to: what it is still loading is not the cause."""
        left_behind(self.run_dir, f"{self._worker}.", own=True)

    @contextmanager
    def loading(self, manifest: Manifest, *, alone: bool = False) -> Iterator[None]:
        """Leave a mark for as long as the block runs. Without room for one the load goes on unmarked."""
        path = self._folder / f"{self._worker}.{next(self._numbers)}"
        descriptor = -1
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, Mark(manifest=manifest, alone=alone).model_dump_json().encode())
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
    """The folder of all marks of an installation."""
    return run_dir / "loads"


def left_behind(run_dir: Path, worker: str, *, own: bool = False) -> list[Mark]:
    """Take the marks of dead processes whose id begins with `worker`. Each is given out once. `own`: also locked ones."""
    found: list[Mark] = []
    with suppress(OSError):
        for path in sorted(marks_dir(run_dir).iterdir()):
            if path.name.startswith(worker):
                with suppress(OSError):
                    if own:
                        path.unlink()
                    else:
                        found += _take(path)
    return found


def _take(path: Path) -> list[Mark]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
        if not os.fstat(descriptor).st_nlink:
            return []  # somebody else took it
        content = os.read(descriptor, DOCUMENT_BYTES_MAX)
        path.unlink()
        return [Mark.model_validate_json(content)]
    except ValidationError:
        return []  # it died before the mark was whole, so before the load
    finally:
        os.close(descriptor)


def judged(verdict: Verdict, deaths_wanted: int, how: str, now: float) -> Verdict:
    """`verdict` after one more death. `deaths_wanted`: how many make the version failed. Pure."""
    deaths = verdict.load_deaths + 1
    after = verdict.model_copy(update={"load_deaths": deaths})
    if deaths < deaths_wanted or after.failed:
        return after
    reason = (
        f"{deaths} processes died while they loaded it, the last {how}: it is not loaded any more; "
        "upload another version, or activate or load this one to have it tried again"
    )
    return after.with_failure(reason, now)


def blame(
    repository: Repository, marks: Sequence[Mark], how: str, now: float, *, certain: bool, busy: bool = False
) -> list[str]:
    """Count the death of one process against what it was loading; returns the content ids.

    `certain`: it ended by itself. `busy`: a run was under way, which may have been the cause. Raises Failure when the
    verdicts cannot be written.
    """
    for mark in marks:
        wanted = DEATHS_MAX
        if len(marks) == 1 and not busy:
            wanted = DEATHS_CERTAIN if certain else DEATHS_ALONE if mark.alone else DEATHS_MAX

        def change(verdict: Verdict, wanted: int = wanted) -> Verdict:
            return judged(verdict, wanted, how, now)

        verdict = repository.verdicts.change(mark.manifest, change)
        name = f"version {mark.manifest.version} of {mark.manifest.model}"
        log.warning("%s: a process that was loading it %s (%d in a row)", name, how, verdict.load_deaths)
    return [mark.manifest.content_id for mark in marks]
