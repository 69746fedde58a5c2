"""Run marks: which batches a worker is running, in a page of shared memory that outlives the process.

main loop: begin ─> run ─> end          two stores into a mapped page; no system call
after its death (its supervisor, or the next worker of its name): take ─> Run: these batches, and no others, were running

<segments>/<prefix>.runs/<worker>   u8: 1 while a run is under way, then lines: lane, names of its batches; locked by
                                    its process for as long as that lives
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
    """A run that its worker did not survive. `lane`: its content id; "": none. `batches`: empty if there were too
    many to note.
    """

    lane: str
    batches: tuple[str, ...]


class RunMark:
    """The mark of one worker. Not shared between threads. Raises OSError where there is no room for the page."""

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / worker
        self._descriptor = descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Reserved now: on a memory file system that is full, a sparse file would kill its writer with SIGBUS.
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
        except OSError:
            self._path.unlink(missing_ok=True)
            os.close(descriptor)
            raise

    def begin(self, lane: str, batches: Sequence[str]) -> None:
        """A run of these batches of `lane` begins."""
        text = "\n".join((lane, *batches, "")).encode()
        if len(text) >= PAGE_BYTES:
            text = f"{lane}\n".encode()
        page = self._page
        page[1 : len(text) + 2] = text + b"\0"
        page[0] = 1

    def end(self) -> None:
        """It is over."""
        self._page[0] = 0

    def close(self) -> None:
        """The worker leaves by itself."""
        with suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()
        os.close(self._descriptor)


def runs_dir(settings: Settings) -> Path:
    """The folder of all marks of an installation: in memory, since a store to a page of a disk may wait for it."""
    memory = settings.shm_dir if settings.shm_dir.is_dir() else settings.home / "run"
    return memory / f"{shm_prefix(settings)}.runs"


def take(folder: Path, worker: str) -> FatalRun | None:
    """The run that a dead worker did not survive; None if that is not known. Its mark is removed."""
    path = folder / worker
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while it lives
            page = file.read(PAGE_BYTES)
            path.unlink()
    except OSError:
        return None
    if not page or page[0] != 1:
        return FatalRun("", ())
    lane, *batches = page[1:].partition(b"\0")[0].decode(errors="replace").split("\n")
    return FatalRun(lane, tuple(filter(None, batches)))


def left_behind(folder: Path, name: str) -> list[str]:
    """Ids of workers that begin with `name` and have a mark, dead or alive."""
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir() if path.name.startswith(name))
    return []
