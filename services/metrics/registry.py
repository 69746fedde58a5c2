"""Counters, gauges and histograms of one process, in memory that outlives it.

    add / set / observe -> a float64 in a mapped file -> `MetricsRegistry.totals`, with the files of the other processes

An update is one store into mapped memory: no lock, no system call, and nothing to flush when the process is killed.
A series is written by one thread; making and removing series is safe from any.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

from millstream.services.metrics import files
from millstream.services.metrics.catalogue import SERIES_REFUSED, Kind, Metric
from millstream.services.metrics.merge import OTHER, Totals
from millstream.services.metrics.read_cache import ReadCache
from millstream.services.metrics.record import (
    CHUNK_BYTES,
    HEADER_BYTES,
    LABEL_CHARACTERS_MAX,
    MAGIC,
    Key,
    free_record,
    record_bytes,
    records,
    values_offset,
    write_record,
)

log = logging.getLogger("millstream.metrics")

SERIES_MAX = 20_000
_ALONE = "until it is started again, the metrics of this process are on its own page only"


class Counter:
    """Only grows."""

    __slots__ = ("_slot", "_values")

    def __init__(self, values: memoryview[float], slot: int) -> None:
        self._values = values
        self._slot = slot

    def add(self, v: float = 1.0) -> None:
        self._values[self._slot] += v


class Gauge:
    """Goes up and down."""

    __slots__ = ("_slot", "_values")

    def __init__(self, values: memoryview[float], slot: int) -> None:
        self._values = values
        self._slot = slot

    def set(self, v: float) -> None:
        self._values[self._slot] = v

    def add(self, v: float) -> None:
        self._values[self._slot] += v

    def detach(self) -> None:
        """Let further updates go nowhere: the place will be another series'."""
        self._values, self._slot = memoryview(bytearray(8)).cast("d"), 0


class Histogram:
    """How often which magnitude was seen."""

    __slots__ = ("_bounds", "_slot", "_sum", "_values")

    def __init__(self, values: memoryview[float], slot: int, bounds: tuple[float, ...]) -> None:
        self._values = values
        self._slot = slot
        self._sum = slot + len(bounds) + 1
        self._bounds = bounds

    def observe(self, v: float, n: int = 1) -> None:
        """Count `v`, `n` times."""
        values = self._values
        values[self._slot + bisect_left(self._bounds, v)] += n
        values[self._sum] += v * n


class CounterVector:
    """Several counters of one subject; `values[slot + field]` is for those who add to some of them only."""

    __slots__ = ("slot", "values")

    def __init__(self, values: memoryview[float], slot: int) -> None:
        self.values = values
        self.slot = slot

    def add(self, *amounts: float) -> None:
        """Add to the fields in their order, from the first on."""
        values, at = self.values, self.slot
        for amount in amounts:
            values[at] += amount
            at += 1

    def add_to(self, field: int, v: float = 1.0) -> None:
        self.values[self.slot + field] += v


_Series = Counter | Gauge | Histogram | CounterVector


class MetricsRegistry:
    """The metrics of one process: in a file of `directory`, or with None in its own memory."""

    def __init__(self, directory: Path | None, role: str, series_max: int = SERIES_MAX) -> None:
        """Take a new file. `role` is a word for its name (gateway, worker).

        Where no file can be had, since the memory file system is full, the process counts for itself alone.
        """
        self._directory = directory
        self._series_max = series_max
        self._lock = threading.Lock()
        self._series: dict[tuple[str, tuple[str, ...]], _Series] = {}  # by name and label values
        self._places: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}  # of gauges: chunk, offset
        self._free: dict[int, list[tuple[int, int]]] = {}  # record size -> places
        self._chunks: list[mmap.mmap] = []
        self._end = HEADER_BYTES  # of what is written in the last chunk
        self._descriptor: int | None = None
        if directory is not None:
            self._open(directory, role)
        self._shared = self._descriptor is not None
        if not self._chunks:
            self._grow()
        self._chunks[0][: len(MAGIC)] = MAGIC
        self._readings = ReadCache()
        self._reading = threading.Lock()
        self._refused = self.counter(SERIES_REFUSED)

    @property
    def directory(self) -> Path | None:
        """Where the files are; None for a tally that is alone."""
        return self._directory

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """The counter with these label values, made if it is not there."""
        series = self._get(metric, labels)
        assert isinstance(series, Counter)
        return series

    def gauge(self, metric: Metric, *labels: str) -> Gauge:
        """The gauge with these label values, made if it is not there."""
        series = self._get(metric, labels)
        assert isinstance(series, Gauge)
        return series

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram with these label values, made if it is not there."""
        series = self._get(metric, labels)
        assert isinstance(series, Histogram)
        return series

    def sums(self, metric: Metric, *labels: str) -> CounterVector:
        """The sums with these label values, made if they are not there."""
        series = self._get(metric, labels)
        assert isinstance(series, CounterVector)
        return series

    def latest(self, metric: Metric, *labels: str) -> Gauge:
        """The instant with these label values, made if it is not there; `set` alone makes sense for it."""
        series = self._get(metric, labels)
        assert isinstance(series, Gauge)
        return series

    def remove(self, metric: Metric, *labels: str) -> None:
        """Take a gauge away whose subject is gone. Its object may still be used, to no effect.

        Counters and histograms stay: what was counted has happened.
        """
        name = (metric.name, labels)
        with self._lock:
            series = self._series.get(name)
            if not isinstance(series, Gauge) or name not in self._places:
                return
            del self._series[name]
            series.detach()
            chunk, record = place = self._places.pop(name)
            size = free_record(memoryview(self._chunks[chunk]), record)
            self._free.setdefault(size, []).append(place)

    def totals(self) -> Totals:
        """What this process and its neighbours counted. Reads files: call it off the event loop. Raises OSError."""
        totals = Totals()
        if self._directory is not None:
            with suppress(OSError):  # what the dead counted stays in their files until there is room
                files.retire(self._directory)
            with self._reading:
                totals = files.read(self._directory, self._readings)
        if not self._shared:
            with self._lock:
                content = b"".join(chunk[:] for chunk in self._chunks)
            totals.merge(records(memoryview(content)), alive=True)
        return totals

    def close(self) -> None:
        """Say that this process is done: what it counted stays, its gauges go."""
        if self._descriptor is not None:
            # Closing is not enough: every mapping holds a duplicate of the descriptor, and with it the lock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, directory: Path, role: str) -> None:
        """Take a file with room for a first piece, if there is room."""
        with suppress(OSError):  # first, since it makes room
            files.retire(directory)
        try:
            self._descriptor, self.path = files.claim(directory, role)
        except OSError as error:
            log.warning("no metric file in %s: %s; %s", directory, error, _ALONE)
            return
        try:
            self._grow()
        except OSError as error:
            log.warning("no room for metrics in %s: %s; %s", directory, error, _ALONE)
            self.close()
            self.path.unlink(missing_ok=True)

    def _get(self, metric: Metric, labels: tuple[str, ...]) -> _Series:
        series = self._series.get((metric.name, labels))  # no lock: a look into a dict is one step
        if series is not None:
            return series
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {len(labels)} of them")
        with self._lock:
            if len(self._series) >= self._series_max and labels and (metric.name, labels) not in self._series:
                self._refused.add()
                labels = (OTHER,) * len(labels)
            return self._series.get((metric.name, labels)) or self._make(metric, labels)

    def _make(self, metric: Metric, labels: tuple[str, ...]) -> _Series:
        shown = tuple(label[:LABEL_CHARACTERS_MAX] for label in labels)
        key = Key(metric.kind, metric.name, shown, metric.slots).encode()
        try:
            index, record = self._place(record_bytes(key, metric.slots))
        except OSError:  # the disk is full: requests go on, uncounted
            self._refused.add()
            return _object(metric, memoryview(bytearray(8 * metric.slots)).cast("d"), 0)
        chunk = memoryview(self._chunks[index])
        write_record(chunk, record, key, metric.slots)
        made = _object(metric, chunk.cast("d"), values_offset(record) // 8)
        self._series[metric.name, labels] = made
        if (
            isinstance(made, Gauge) and not metric.kind.lasting and set(labels) != {OTHER}
        ):  # what shares a series cannot take it away
            self._places[metric.name, labels] = index, record
        return made

    def _place(self, size: int) -> tuple[int, int]:
        free = self._free.get(size)
        if free:
            return free.pop()
        if self._end + size > CHUNK_BYTES:
            self._grow()
            self._end = 0
        self._end += size
        return len(self._chunks) - 1, self._end - size

    def _grow(self) -> None:
        """Map one more piece; earlier ones stay where they are, so that nobody's memoryview moves."""
        if self._descriptor is None:
            self._chunks.append(mmap.mmap(-1, CHUNK_BYTES))
            return
        start = len(self._chunks) * CHUNK_BYTES
        # Real blocks, now: a store into a hole of a full disk would be a SIGBUS.
        os.posix_fallocate(self._descriptor, start, CHUNK_BYTES)
        self._chunks.append(mmap.mmap(self._descriptor, CHUNK_BYTES, offset=start))


def _object(metric: Metric, values: memoryview[float], slot: int) -> _Series:
    if metric.kind is Kind.COUNTER:
        return Counter(values, slot)
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(values, slot, metric.buckets)
    if metric.kind is Kind.SUMS:
        return CounterVector(values, slot)
    return Gauge(values, slot)
