"""Counters, gauges and histograms of one process, in memory that outlives it.

    add / set / observe -> a float64 in a mapped file -> `MetricsRegistry.totals`, with the files of the other processes

An update is one store into mapped memory: no lock, no system call, and nothing to flush when the process is killed.
Each series is written by one thread; any thread may create and remove series.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import threading
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path

from millstream.services.metrics import files
from millstream.services.metrics.catalogue import SERIES_REFUSED, Kind, Metric
from millstream.services.metrics.files import Part, ReadCache
from millstream.services.metrics.label_limit import Exists, all_exist, is_about_model, subject
from millstream.services.metrics.page_totals import MODELS_MAX, PageTotals
from millstream.services.metrics.record import (
    CHUNK_BYTES,
    HEADER_BYTES,
    LABEL_CHARACTERS_MAX,
    MAGIC,
    OTHER,
    Key,
    Totals,
    free_record,
    record_bytes,
    records,
    values_offset,
    write_record,
)

log = logging.getLogger("millstream.metrics")

SERIES_MAX = 40_000
#: From the deletion of a version until its series end: its last requests are over by then, and pages know of it.
ENDED_S = 600.0
_ALONE = "until this process is restarted, only its own metrics page shows its metrics"


class Counter:
    """A value that only grows."""

    __slots__ = ("_slot", "_values")

    def __init__(self, values: memoryview[float], slot: int) -> None:
        self._values = values
        self._slot = slot

    def move(self, values: memoryview[float], slot: int) -> None:
        """Count in other memory from now on."""
        self._values, self._slot = values, slot

    def add(self, v: float = 1.0) -> None:
        self._values[self._slot] += v

    @property
    def value(self) -> float:
        """The value, of this process and of earlier ones whose series it continues."""
        return self._values[self._slot]

    def cell(self) -> tuple[memoryview[float], int]:
        """Return the memory of the value and its index there, for callers that save the call of `add`."""
        return self._values, self._slot


class Gauge:
    """A value that can grow and fall."""

    __slots__ = ("_slot", "_values")

    def __init__(self, values: memoryview[float], slot: int) -> None:
        self._values = values
        self._slot = slot

    def set(self, v: float) -> None:
        self._values[self._slot] = v

    def add(self, v: float) -> None:
        self._values[self._slot] += v

    def move(self, values: memoryview[float], slot: int) -> None:
        """Show the value in other memory from now on."""
        self._values, self._slot = values, slot


class Histogram:
    """Counts observations by buckets."""

    __slots__ = ("_bounds", "_slot", "_sum", "_values")

    def __init__(self, values: memoryview[float], slot: int, bounds: tuple[float, ...]) -> None:
        self._values = values
        self._slot = slot
        self._sum = slot + len(bounds) + 1
        self._bounds = bounds

    def move(self, values: memoryview[float], slot: int) -> None:
        """Count in other memory from now on."""
        self._values, self._slot, self._sum = values, slot, slot + len(self._bounds) + 1

    def observe(self, v: float, n: int = 1) -> None:
        """Count `v`, `n` times."""
        values = self._values
        values[self._slot + bisect_left(self._bounds, v)] += n
        values[self._sum] += v * n


def quantile(counts: Sequence[float], share: float, bounds: Sequence[float]) -> float | None:
    """Return a quantile of a histogram as Prometheus' `histogram_quantile` does; None if it is empty.

    Args:
        counts: of observations in each bucket.
        share: of the observations, from 0 to 1.
        bounds: the inclusive upper bound of each bucket, the last one infinite.

    Within a bucket, observations count as evenly spread. Beyond the last finite bound, that bound is returned.
    """
    if not any(counts) or len(counts) != len(bounds):
        return None
    upto = list(accumulate(counts))
    rank = share * upto[-1]
    for (lower, upper), (below, above) in zip(pairwise((0.0, *bounds)), pairwise((0.0, *upto)), strict=True):
        if above >= rank and above > below:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (above - below)
    return bounds[-2]


class CounterVector:
    """Several counters of one subject. Callers that add to a few fields may write `values[slot + field]` directly."""

    __slots__ = ("slot", "values")

    def __init__(self, values: memoryview[float], slot: int) -> None:
        self.move(values, slot)

    def move(self, values: memoryview[float], slot: int) -> None:
        """Count in other memory from now on."""
        self.values, self.slot = values, slot

    def add(self, *amounts: float) -> None:
        """Add to the fields in their order, beginning with the first."""
        values, at = self.values, self.slot
        for amount in amounts:
            values[at] += amount
            at += 1

    def add_to(self, field: int, v: float = 1.0) -> None:
        self.values[self.slot + field] += v


_Series = Counter | Gauge | Histogram | CounterVector


class MetricsRegistry:
    """The metrics of one process, in a new file of `directory`.

    If no file can be created, because the memory file system is full, the metrics are in the process' own memory, and
    other processes do not see them.

    Args:
        directory: the folder that all processes of the installation share; None: use the process' own memory.
        role: gateway or worker, and its name; the file's name begins with it, and it is the label value `process`.
        series_max: series of this process; further ones share the label value `other`.
        models_max: models with series of their own on the metrics page.
    """

    def __init__(
        self, directory: Path | None, role: str, series_max: int = SERIES_MAX, models_max: int = MODELS_MAX
    ) -> None:
        self.process = role
        self._directory = directory
        self._series_max = series_max
        self._lock = threading.Lock()
        self._series: dict[tuple[str, tuple[str, ...]], _Series] = {}  # by name and label values
        self._records: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}  # of series that may end: chunk, offset
        self._gone: dict[tuple[str, tuple[str, ...]], float] = {}  # of deleted versions: since when
        self._free: dict[int, list[tuple[int, int]]] = {}  # record size -> free records
        self._chunks: list[mmap.mmap] = []
        self._end = HEADER_BYTES  # of the records in the last chunk
        self._descriptor: int | None = None
        if directory is not None:
            self._open(directory, role)
        self._shared = self._descriptor is not None
        self._page_totals = PageTotals(directory if self._shared else None, self.totals, models_max)
        if not self._chunks:
            self._grow()
        self._chunks[0][: len(MAGIC)] = MAGIC
        self._cache = ReadCache()
        self._reading = threading.Lock()
        self._refused = self.counter(SERIES_REFUSED)

    @property
    def directory(self) -> Path | None:
        """The folder of the files; None: the metrics are of this process alone."""
        return self._directory

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """Return the counter with these label values; created at first use."""
        series = self._get(metric, labels)
        assert isinstance(series, Counter)
        return series

    def gauge(self, metric: Metric, *labels: str) -> Gauge:
        """Return the gauge with these label values; created at first use."""
        series = self._get(metric, labels)
        assert isinstance(series, Gauge)
        return series

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """Return the histogram with these label values; created at first use."""
        series = self._get(metric, labels)
        assert isinstance(series, Histogram)
        return series

    def counter_vector(self, metric: Metric, *labels: str) -> CounterVector:
        """Return the counter vector with these label values; created at first use."""
        series = self._get(metric, labels)
        assert isinstance(series, CounterVector)
        return series

    def latest(self, metric: Metric, *labels: str) -> Gauge:
        """Return the instant with these label values, to be changed by `set` only; created at first use."""
        series = self._get(metric, labels)
        assert isinstance(series, Gauge)
        return series

    def remove(self, metric: Metric, *labels: str) -> None:
        """Remove a gauge whose subject no longer exists. Its object may still be used, without effect.

        Counters and histograms are not removed, as their events did happen, until their version is deleted.
        """
        with self._lock:
            if not metric.kind.lasting:
                self._remove((metric.name, labels))

    def _remove(self, name: tuple[str, tuple[str, ...]]) -> None:
        if name not in self._records:
            return
        series = self._series.pop(name)
        chunk, offset = self._records.pop(name)
        size = free_record(memoryview(self._chunks[chunk]), offset)
        series.move(memoryview(bytearray(size)).cast("d"), 0)
        self._free.setdefault(size, []).append((chunk, offset))

    def end_series(self, exists: Exists, now: float) -> None:
        """End the series of versions that were deleted ENDED_S ago and more; their memory is used for others.

        Pages leave them out before (`page_totals`): what they counted is on the page as it was when they end.

        Args:
            exists: says whether a version exists.
            now: seconds on the caller's clock.
        """
        with self._lock:
            gone = [name for name in self._records if is_about_model(*name) and not exists(*subject(*name))]
            self._gone = {name: self._gone.get(name, now) for name in gone}
            for name, since in self._gone.items():
                if now - since >= ENDED_S:
                    self._remove(name)

    def counts(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return the values of a counter in this process, by label values."""
        with self._lock:
            found = {labels: series for (name, labels), series in self._series.items() if name == metric.name}
        return {labels: series.value for labels, series in found.items() if isinstance(series, Counter)}

    def totals(self) -> Totals:
        """Return the counts of all processes of the folder. Reads files: must be called off the event loop.

        Raises OSError.
        """
        totals = Totals()
        if self._directory is not None:
            with suppress(OSError):  # without space, the counts of ended processes stay in their files
                files.retire(self._directory)
        with self._reading:
            parts = self.parts(self._cache)
        for part in parts.values():
            totals.merge(part.series, alive=part.alive)
        return totals

    def parts(self, cache: ReadCache) -> dict[tuple[str, int], Part]:
        """Return the counts of all processes of the folder in parts, which are named as the last time.

        A part that did not change since the last call with the same `cache` is the same object. Reads files: must be
        called off the event loop.

        Raises OSError.
        """
        parts = {} if self._directory is None else files.read(self._directory, cache)
        if not self._shared:
            with self._lock:
                content = b"".join(chunk[:] for chunk in self._chunks)
            parts[self.process, 0] = Part(True, list(records(memoryview(content))))
        return parts

    def page_totals(self, exists: Exists = all_exist) -> tuple[Totals, frozenset[str] | None]:
        """Return what a page shows of `totals`, and the models with series of their own on it; None: all.

        The counts of further models are under the label value `other`; versions of which `exists` says that there are
        none have no series. Not thread-safe. Raises OSError.
        """
        return self._page_totals.read(exists)

    def close(self) -> None:
        """Release the file: the counts of this process remain, its gauges disappear."""
        self._release()

    def _release(self) -> None:
        """Release the file of the counts, if there is one."""
        if self._descriptor is not None:
            # Closing is not enough: every mapping has a duplicate of the descriptor, which keeps the lock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, directory: Path, role: str) -> None:
        """Create a file and its first chunk, if there is space."""
        with suppress(OSError):  # first, because it frees space
            files.retire(directory)
        try:
            self._descriptor, self.path = files.claim(directory, role)
        except OSError as error:
            log.warning("no metric file in %s: %s; %s", directory, error, _ALONE)
            return
        try:
            self._grow()
        except OSError as error:
            log.warning("no space for metrics in %s: %s; %s", directory, error, _ALONE)
            self._release()
            self.path.unlink(missing_ok=True)

    def _get(self, metric: Metric, labels: tuple[str, ...]) -> _Series:
        series = self._series.get((metric.name, labels))  # without the lock: reading a dict is atomic
        if series is not None:
            return series
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {len(labels)} of them")
        with self._lock:
            if len(self._series) >= self._series_max and labels and (metric.name, labels) not in self._series:
                self._refused.add()
                labels = (OTHER,) * len(labels)
            return self._series.get((metric.name, labels)) or self._create(metric, labels)

    def _create(self, metric: Metric, labels: tuple[str, ...]) -> _Series:
        shortened = tuple(label[:LABEL_CHARACTERS_MAX] for label in labels)
        key = Key(metric.kind, metric.name, shortened, metric.slots).encode()
        try:
            index, offset = self._allocate(record_bytes(key, metric.slots))
        except OSError:  # the disk is full: requests are served, but not counted
            self._refused.add()
            return _object(metric, memoryview(bytearray(8 * metric.slots)).cast("d"), 0)
        chunk = memoryview(self._chunks[index])
        write_record(chunk, offset, key, metric.slots)
        series = _object(metric, chunk.cast("d"), values_offset(offset) // 8)
        self._series[metric.name, labels] = series
        # Subjects beyond the limit share the series `other`: none of them may remove it.
        if set(labels) != {OTHER} and (not metric.kind.lasting or is_about_model(metric.name, labels)):
            self._records[metric.name, labels] = index, offset
        return series

    def _allocate(self, size: int) -> tuple[int, int]:
        """Return chunk and offset of a free record."""
        free = self._free.get(size)
        if free:
            return free.pop()
        if self._end + size > CHUNK_BYTES:
            self._grow()
            self._end = 0
        self._end += size
        return len(self._chunks) - 1, self._end - size

    def _grow(self) -> None:
        """Map one more chunk. Earlier chunks stay where they are, because series have views of them."""
        if self._descriptor is None:
            self._chunks.append(mmap.mmap(-1, CHUNK_BYTES))
            return
        start = len(self._chunks) * CHUNK_BYTES
        # Blocks are reserved now: writing to a sparse file on a full disk would raise SIGBUS.
        os.posix_fallocate(self._descriptor, start, CHUNK_BYTES)
        self._chunks.append(mmap.mmap(self._descriptor, CHUNK_BYTES, offset=start))


def _object(metric: Metric, values: memoryview[float], slot: int) -> _Series:
    if metric.kind is Kind.COUNTER:
        return Counter(values, slot)
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(values, slot, metric.buckets)
    if metric.kind is Kind.VECTOR:
        return CounterVector(values, slot)
    return Gauge(values, slot)
