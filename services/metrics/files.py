"""The metric files of a host: which owners live, what all of them add up to, and where the dead are gathered.

    owner:   <name>.new --flock, rename--> <name>.values      (the lock says that the owner lives)
    retire:  counts of the dead --rename--> retired           (names what it took in, in the same rename), then unlink
    read:    retired + files it did not take in               (again if `retired` changed meanwhile)

Nothing here waits: readers take no lock, and retiring is left to whoever holds the folder's lock already. So a process
that is frozen anywhere holds up nobody, and one killed anywhere loses or doubles nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from millstream.services.metrics.catalogue import Kind
from millstream.services.metrics.merge import Totals
from millstream.services.metrics.read_cache import ReadCache
from millstream.services.metrics.record import Key, records

VALUES_SUFFIX = ".values"
NEW_SUFFIX = ".new"
_RETIRED = "retired"
_LOCK = "lock"
_RETIRED_SERIES_MAX = 40_000
_READ_ATTEMPTS = 20


@dataclass(slots=True)
class _Retired:
    """What dead processes counted, and the files (perhaps still there) whose counts it holds."""

    token: str = ""
    absorbed: frozenset[str] = frozenset()
    totals: Totals = field(default_factory=Totals)


def claim(directory: Path, role: str) -> tuple[int, Path]:
    """Make an empty metric file that this process owns while the descriptor is open. Returns descriptor and path.

    Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        new = directory / f"{role}-{os.getpid()}-{secrets.token_hex(6)}{NEW_SUFFIX}"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor, new.rename(new.with_suffix(VALUES_SUFFIX))
        except (BlockingIOError, FileNotFoundError):
            # `retire` took it for the file of a process that died before it locked it: another one, then.
            os.close(descriptor)
            new.unlink(missing_ok=True)


def read(directory: Path, readings: ReadCache) -> Totals:
    """Everything that the processes of this folder counted, dead ones included. Raises OSError.

    `readings`: of the caller; what did not change since its last call is not parsed again.
    """
    totals = Totals()
    for _ in range(_READ_ATTEMPTS):
        retired = _load(directory)
        totals = retired.totals
        files = [path for path in _files(directory, VALUES_SUFFIX) if path.name not in retired.absorbed]
        for path in files:
            _merge_file(totals, path, readings)
        readings.keep({path.name for path in files})
        if _token(directory) == retired.token:
            break
    return totals


def retire(directory: Path) -> None:
    """Gather the counts of dead processes into one file and remove theirs. Raises OSError."""
    with _folder_lock(directory) as mine:
        if not mine:
            return
        for path in _files(directory, NEW_SUFFIX):
            if not _alive(path):
                path.unlink(missing_ok=True)
        dead = [path for path in _files(directory, VALUES_SUFFIX) if not _alive(path)]
        if not dead:
            return
        retired = _load(directory)
        fresh = [path for path in dead if path.name not in retired.absorbed]
        for path in dead:
            if path.name in retired.absorbed:  # whoever took it in was killed before it could remove it
                path.unlink(missing_ok=True)
        if not fresh:
            return
        for path in fresh:
            content = memoryview(path.read_bytes())
            retired.totals.merge(records(content), alive=False, series_max=_RETIRED_SERIES_MAX)
        _store(directory, retired.totals, [path.name for path in fresh])
        for path in fresh:
            path.unlink(missing_ok=True)


def _files(directory: Path, suffix: str) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix == suffix)


@contextmanager
def _folder_lock(directory: Path) -> Iterator[bool]:
    """Yield whether this process may retire now; never waits."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _unowned(descriptor: int) -> bool:
    """Whether nobody holds the owner's lock. Shared, so that two who look at once do not take each other for it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _alive(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True  # renamed or gone meanwhile: in any case not ours to retire
    try:
        return not _unowned(descriptor)
    finally:
        os.close(descriptor)


def _merge_file(totals: Totals, path: Path, readings: ReadCache) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # retired meanwhile: the token tells `read`
    try:
        alive = not _unowned(descriptor)
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
    totals.merge(readings.series(path.name, content), alive=alive)


def _token(directory: Path) -> str:
    try:
        with (directory / _RETIRED).open("rb") as file:
            return file.readline(64).partition(b" ")[0].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _load(directory: Path) -> _Retired:
    """What is retired; nothing when the file is torn (a power cut can do that, and counters may start again)."""
    try:
        content = (directory / _RETIRED).read_bytes()
    except FileNotFoundError:
        return _Retired()
    head, _, body = content.partition(b"\n")
    token, _, crc = head.decode(errors="replace").partition(" ")
    if crc != f"{zlib.crc32(body):08x}":
        return _Retired(token)
    document = json.loads(body)
    totals = Totals()
    for kind, name, labels, values in document["series"]:
        totals[Key(Kind(kind), name, tuple(labels), len(values))] = values
    return _Retired(token, frozenset(document["absorbed"]), totals)


def _store(directory: Path, totals: Totals, absorbed: list[str]) -> None:
    series = [[key.kind, key.name, key.labels, values] for key, values in totals.items()]
    body = json.dumps({"absorbed": absorbed, "series": series}, separators=(",", ":")).encode()
    temporary = directory / f"{_RETIRED}.tmp"
    try:
        temporary.write_bytes(f"{secrets.token_hex(8)} {zlib.crc32(body):08x}\n".encode() + body)
    except OSError:
        temporary.unlink(missing_ok=True)  # half of it helps nobody, and takes room
        raise
    temporary.rename(directory / _RETIRED)
