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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.services.metrics.catalogue import Kind
from millstream.services.metrics.record import (
    CHUNK_BYTES,
    Key,
    Series,
    Totals,
    has_series,
    name_of,
    parse_chunk,
    parse_key,
    records,
    values_at,
)

VALUES_SUFFIX = ".values"
NEW_SUFFIX = ".new"
_RETIRED = "retired"
_LOCK = "lock"
_RETIRED_SERIES_MAX = 40_000
_READ_ATTEMPTS = 20


@dataclass(slots=True)
class _Retired:
    """The counts of ended processes."""

    token: str = ""  # changes with every write
    absorbed: frozenset[str] = frozenset()  # files whose counts are included; they may still exist
    totals: Totals = field(default_factory=Totals)


class Part(NamedTuple):
    """Some series of a process, or of all that ended. While nothing of it changes, it is the same object.

    `alive`: whether gauges count.
    """

    alive: bool
    series: list[Series]


class _Chunk:
    """The series of a chunk of a metric file. Where only values changed, keys are not parsed again."""

    def __init__(self) -> None:
        self.part = Part(False, [])
        self._words = np.zeros(0, np.uint64)  # the content
        self._owners = np.zeros(0, np.int16)  # the number of the series that each word is a value of, or one of these:
        self._places: list[int] = []  # offset of the values of each series

    def read(self, content: bytes, wants: Callable[[str], bool], *, first: bool, alive: bool) -> Part:
        """Return the series of this content."""
        before, self._words = self._words, np.frombuffer(content, np.uint64, len(content) // 8)
        series, same = self.part.series, len(before) == len(self._words)
        owners = np.unique(self._owners[before != self._words]).tolist() if same else [_FORM]
        if _FORM in owners:
            series = self._parsed(content, wants, first)
        elif owners and owners != [_UNWANTED]:
            series = self._updated(content, [number for number in owners if number != _UNWANTED])
        if series is not self.part.series or alive is not self.part.alive:
            self.part = Part(alive, series)
        return self.part

    def _parsed(self, content: bytes, wants: Callable[[str], bool], first: bool) -> list[Series]:
        known = {key: key for key, _ in self.part.series}  # the same object: what holds it needs no other
        found: list[Series] = []
        self._places = []
        self._owners = np.full(len(self._words), _FORM, np.int16)
        for stored, at, slots in parse_chunk(memoryview(content), first):
            takes = wants(name_of(stored))
            self._owners[at // 8 : at // 8 + slots] = len(found) if takes else _UNWANTED
            if takes:
                key = parse_key(stored, slots)
                found.append((known.get(key, key), values_at(content, at, slots)))
                self._places.append(at)
        return found

    def _updated(self, content: bytes, numbers: list[int]) -> list[Series]:
        series = self.part.series.copy()
        for number in numbers:
            key = series[number][0]
            series[number] = key, values_at(content, self._places[number], key.slots)
        return series


_FORM, _UNWANTED = -1, -2  # a word of a head or key, or of no record; a value of a series that is not wanted


class ReadCache:
    """Stores the series of each chunk of each file. Not thread-safe. `wanted`: names of metrics; None: all."""

    def __init__(self, wanted: Collection[str] | None = None) -> None:
        self._wanted = wanted
        self._chunks: dict[str, list[_Chunk]] = {}
        self.retired = _Retired()
        self.retired_part = Part(False, [])

    def wants(self, name: str) -> bool:
        """Whether the series of a metric are wanted."""
        return self._wanted is None or name in self._wanted

    def parts(self, name: str, content: bytes, *, alive: bool) -> Iterator[tuple[tuple[str, int], Part]]:
        """Yield the parts of the file `name` with this content, with what identifies each."""
        chunks = self._chunks.setdefault(name, [])
        starts = range(0, len(content), CHUNK_BYTES) if has_series(content) else range(0)
        chunks[len(starts) :] = [_Chunk() for _ in range(len(starts) - len(chunks))]
        for number, (start, chunk) in enumerate(zip(starts, chunks, strict=True)):
            part = content[start : start + CHUNK_BYTES]
            yield (name, number), chunk.read(part, self.wants, first=start == 0, alive=alive)

    def keep_only(self, names: set[str]) -> None:
        """Forget all other files: they no longer exist."""
        for name in self._chunks.keys() - names:
            del self._chunks[name]


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


def read(directory: Path, cache: ReadCache) -> dict[tuple[str, int], Part]:
    """Return the counts of all processes of this folder, including those that ended, in parts. Raises OSError.

    What did not change since the last call with the same `cache` is not parsed again.
    """
    parts: dict[tuple[str, int], Part] = {}
    for _ in range(_READ_ATTEMPTS):
        if _token(directory) != cache.retired.token:
            cache.retired = _load(directory)
            series: list[Series] = [one for one in cache.retired.totals.items() if cache.wants(one[0].name)]
            cache.retired_part = Part(False, series)
        retired = cache.retired
        parts = {(_RETIRED, 0): cache.retired_part}
        files = [path for path in _files(directory, VALUES_SUFFIX) if path.name not in retired.absorbed]
        for path in files:
            parts |= _parts_of_file(path, cache)
        cache.keep_only({path.name for path in files})
        if _token(directory) == retired.token:
            break
    return parts


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


def _parts_of_file(path: Path, cache: ReadCache) -> dict[tuple[str, int], Part]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}  # retired meanwhile: `read` notices by the token
    try:
        alive = not _unowned(descriptor)
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
    return dict(cache.parts(path.name, content, alive=alive))


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
