"""Removes what killed test runs left in shared memory, and nothing of a process that runs.

Every installation marks its files with a prefix (services/installation.py). Its processes map or lock some of them from
their start to their end, so an installation of which no process has a file open or mapped has ended.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from millstream.services.queue.reply_listener import remove_dead_sockets
from millstream.services.queue.reply_protocol import SUFFIX
from millstream.services.segments.segment import remove_segments

#: `up` creates folders before its first process maps a file of them.
AGE_S_MIN = 600.0
_PREFIX = re.compile(r"(millstream-[0-9a-f]{12}-[0-9a-f]{8})\.")


def remove_leftovers(folder: Path, age_s_min: float = AGE_S_MIN) -> int:
    """Remove the files of installations that have ended, if all are older than `age_s_min`; return their number."""
    prefixes = {found[1] for path in folder.glob("millstream-*") if (found := _PREFIX.match(path.name))}
    removed = 0
    for prefix in prefixes - prefixes_in_use(folder) if prefixes else ():
        newest = max(map(_changed_at, _files(folder, prefix)), default=0.0)
        if newest < time.time() - age_s_min:
            removed += remove_segments(folder, prefix)
    for installation in {path.name.partition(".")[0] for path in folder.glob(f"*{SUFFIX}")}:
        removed += remove_dead_sockets(folder, installation)
    return removed


def _files(folder: Path, prefix: str) -> Iterator[Path]:
    for path in folder.glob(f"{prefix}.*"):
        yield path
        yield from path.rglob("*")


def _changed_at(path: Path) -> float:
    """Return the time of the last change; the present if that is unknown or another user's, so that it is kept."""
    try:
        status = path.lstat()
    except OSError:
        return time.time()
    return status.st_mtime if status.st_uid == os.geteuid() else time.time()


def prefixes_in_use(folder: Path) -> set[str]:
    """Return the prefixes of which a process has a file open or mapped."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for name in _opened(process):
                if name.startswith(f"{folder}/") and (prefix := _PREFIX.match(name.removeprefix(f"{folder}/"))):
                    found.add(prefix[1])
    return found


def _opened(process: Path) -> Iterator[str]:
    with suppress(OSError):  # it has ended, or is another user's
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield "/" + line.partition("/")[2]
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(descriptor.readlink())
