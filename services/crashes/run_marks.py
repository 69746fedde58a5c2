"""Run marks: record which batches a worker is running, in a page of shared memory that outlives the process.

main loop: begin ─> run ─> end          two stores into a mapped page; no system call
after its death (the supervisor, or the next worker of that name): take_fatal_run ─> exactly these batches were running

<segments>/<prefix>.runs/<worker>   u8: 1 during a run, then lines: lane, names of its batches; locked by its process
                                    until that ends
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from millstream.services.installation import shm_prefix
from millstream.services.settings import Settings

PAGE_BYTES = 8192


class FatalRun(NamedTuple):
    """The run during which a worker died.

    Args:
        lane: the content id; "" if the worker was not running anything.
        batches: the names of its batches; empty if they did not fit into the page.
    """

    lane: str
    batches: tuple[str, ...]


class RunMark:
    """The mark of one worker, for use by one thread. Raises OSError if there is no space for the page."""

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / worker
        self._descriptor = descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Reserve the space now: writing to a sparse file on a full tmpfs would kill this process with SIGBUS.
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
        except OSError:
            self._path.unlink(missing_ok=True)
            os.close(descriptor)
            raise

    def begin(self, lane: str, batches: Sequence[str]) -> None:
        """Record the start of a run of these batches of `lane`."""
        text = "\n".join((lane, *batches, "")).encode()
        if len(text) >= PAGE_BYTES:
            text = f"{lane}\n".encode()
        page = self._page
        page[1 : len(text) + 2] = text + b"\0"
        page[0] = 1

    def end(self) -> None:
        """Record the end of the run."""
        self._page[0] = 0

    def close(self) -> None:
        """Remove the mark: the worker ends as planned."""
        with suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()
        os.close(self._descriptor)


def runs_dir(settings: Settings) -> Path:
    """Return the folder of an installation's run marks: in memory, since a store to a disk's page may block."""
    memory = settings.shm_dir if settings.shm_dir.is_dir() else settings.home / "run"
    return memory / f"{shm_prefix(settings)}.runs"


def take_fatal_run(folder: Path, worker: str) -> FatalRun | None:
    """Remove a dead worker's mark and return its last run; None if there is no mark or the worker is alive."""
    path = folder / worker
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the worker is alive
            page = file.read(PAGE_BYTES)
            path.unlink()
    except OSError:
        return None
    if not page or page[0] != 1:
        return FatalRun("", ())
    lane, *batches = page[1:].partition(b"\0")[0].decode(errors="replace").split("\n")
    return FatalRun(lane, tuple(filter(None, batches)))


def marked_workers(folder: Path, name: str) -> list[str]:
    """Return the ids of all workers, dead or alive, that have a mark and whose id begins with `name`."""
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir() if path.name.startswith(name))
    return []
