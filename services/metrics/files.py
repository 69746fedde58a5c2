"""The metric files of a host: one for each live process, and one with the counts of processes that ended.

    owner:   <name>.new --flock, rename--> <name>.values      (the lock shows that the owner lives)
    retire:  counts of ended processes --rename--> retired    (which lists the files that it absorbed), then unlink
    read:    retired + files that it did not absorb           (again if `retired` changed meanwhile)

Nothing here waits: readers take no lock, and a process that finds the folder's lock taken does not retire. So a process
that is frozen at any point blocks no other, and a process that is killed at any point loses or doubles no count.
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
from millstream.services.metrics.record import CHUNK_BYTES, Key, Totals, has_series, parse_chunk, records

VALUES_SUFFIX = ".values"
NEW_SUFFIX = ".new"
_RETIRED = "retired"
_LOCK = "lock"
_RETIRED_SERIES_MAX = 40_000
_READ_ATTEMPTS = 20


Series = tuple[Key, list[float]]


class ReadCache:
    """Stores the series of each chunk of each file. Not thread-safe."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[tuple[bytes, list[Series]]]] = {}
        self._keys: dict[bytes, Key] = {}

    def series(self, name: str, content: bytes) -> Iterator[Series]:
        """Yield the live series of the file `name` with this content."""
        known = self._chunks.get(name, [])
        chunks: list[tuple[bytes, list[Series]]] = []
        if has_series(content):
            for index, start in enumerate(range(0, len(content), CHUNK_BYTES)):
                chunk = content[start : start + CHUNK_BYTES]
                if index < len(known) and known[index][0] == chunk:
                    chunks.append(known[index])
                else:
                    chunks.append((chunk, list(parse_chunk(memoryview(chunk), start == 0, self._keys))))
        self._chunks[name] = chunks
        for _, series in chunks:
            yield from series

    def keep_only(self, names: set[str]) -> None:
        """Forget all other files: they no longer exist."""
        for name in self._chunks.keys() - names:
            del self._chunks[name]
        live = sum(len(series) for chunks in self._chunks.values() for _, series in chunks)
        if len(self._keys) > 2 * live + 1000:  # keys of series that no longer exist
            self._keys.clear()


@dataclass(slots=True)
class _Retired:
    """The counts of ended processes."""

    token: str = ""  # changes with every write
    absorbed: frozenset[str] = frozenset()  # files whose counts are included; they may still exist
    totals: Totals = field(default_factory=Totals)


def claim(directory: Path, role: str) -> tuple[int, Path]:
    """Create an empty metric file, which this process owns while the descriptor is open; returns descriptor and path.

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
            # `retire` mistook it for the file of a process that died before locking it: create another.
            os.close(descriptor)
            new.unlink(missing_ok=True)


def read(directory: Path, cache: ReadCache) -> Totals:
    """Return the counts of all processes of this folder, including those that ended. Raises OSError.

    Files that did not change since the last call with the same `cache` are not parsed again.
    """
    totals = Totals()
    for _ in range(_READ_ATTEMPTS):
        retired = _load(directory)
        totals = retired.totals
        files = [path for path in _files(directory, VALUES_SUFFIX) if path.name not in retired.absorbed]
        for path in files:
            _merge_file(totals, path, cache)
        cache.keep_only({path.name for path in files})
        if _token(directory) == retired.token:
            break
    return totals


def retire(directory: Path) -> None:
    """Move the counts of ended processes into one file and remove their files. Raises OSError."""
    with _folder_lock(directory) as locked:
        if not locked:
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
            if path.name in retired.absorbed:  # the process that absorbed it was killed before removing it
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
    """Yield whether this process got the lock; never waits."""
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
    """Return whether the owner's lock is free, by taking a shared lock: two readers do not block each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _alive(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True  # renamed or removed meanwhile: another process retires it
    try:
        return not _unowned(descriptor)
    finally:
        os.close(descriptor)


def _merge_file(totals: Totals, path: Path, cache: ReadCache) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # retired meanwhile: `read` notices by the token
    try:
        alive = not _unowned(descriptor)
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
    totals.merge(cache.series(path.name, content), alive=alive)


def _token(directory: Path) -> str:
    try:
        with (directory / _RETIRED).open("rb") as file:
            return file.readline(64).partition(b" ")[0].decode(errors="replace")
    except FileNotFoundError:
        return ""


def _load(directory: Path) -> _Retired:
    """Return the retired counts; none if the file is torn: after a power cut counters may start from 0 again."""
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
        temporary.unlink(missing_ok=True)  # a partial file is useless and takes space
        raise
    temporary.rename(directory / _RETIRED)
