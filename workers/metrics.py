"""The metrics of a worker. Only the main loop writes its series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from millstream.services.metrics import catalogue
from millstream.services.metrics.label_limit import Exists
from millstream.services.metrics.registry import Counter, Histogram, MetricsRegistry

if TYPE_CHECKING:
    from millstream.services.model.manifest import Manifest
    from millstream.workers.models.loaded_models import LoadedModel


class WorkerMetrics:
    """Counters and histograms of one worker; a run takes three updates."""

    def __init__(self, registry: MetricsRegistry, pool: str, worker: str, device: str) -> None:
        self._registry = registry
        self._pool = pool
        self._worker = worker
        #: run times and rows of each version by content id; a lookup by labels takes longer than both updates
        self._runs: dict[str, tuple[Histogram, Histogram]] = {}
        self._busy = registry.counter(catalogue.WORKER_BUSY_SECONDS, pool, worker)
        self._redis = registry.counter(catalogue.REDIS_BYTES, "worker_out")
        self._by_redis = registry.counter(catalogue.BATCH_REPLIES, pool, "redis")
        self._by_socket = registry.counter(catalogue.BATCH_REPLIES, pool, "socket")
        self._by_tcp = registry.counter(catalogue.BATCH_REPLIES, pool, "tcp")
        self._by_direct = registry.counter(catalogue.BATCH_REPLIES, pool, "direct")
        self._segment = registry.counter(catalogue.SEGMENT_BYTES, "worker_out")
        self._too_large = registry.counter(catalogue.REPLIES_REFUSED, "too_large")
        self._unreadable = registry.counter(catalogue.BATCHES_UNREADABLE, pool)
        self._refused = registry.counter(catalogue.REPLIES_REFUSED, "redis")
        self._redis_up = registry.gauge(catalogue.REDIS_UP, registry.process)
        self._redis_reconnects = registry.counter(catalogue.REDIS_RECONNECTS, registry.process)
        self._quotas: frozenset[str] = frozenset()  # keys with a memory quota
        self._redis_answered: bool | None = None  # the last heartbeat; None: Redis was never reached
        registry.gauge(catalogue.WORKER_INFO, worker, pool, device).set(1)

    def _labels(self, manifest: Manifest) -> tuple[str, str, str]:
        return manifest.model, str(manifest.version), self._pool

    def ran(self, model: LoadedModel, seconds: float, rows: int) -> None:
        manifest = model.manifest
        series = self._runs.get(manifest.content_id)
        if series is None:
            registry, labels = self._registry, self._labels(manifest)
            series = self._runs[manifest.content_id] = (
                registry.histogram(catalogue.EXECUTION_DURATION, *labels),
                registry.histogram(catalogue.BATCH_ROWS, *labels),
            )
        self._busy.add(seconds)
        series[0].observe(seconds)
        series[1].observe(rows)

    def out_of_memory(self, model: LoadedModel) -> None:
        manifest = model.manifest
        self._registry.counter(catalogue.RUNS_OUT_OF_MEMORY, *self._labels(manifest)).add()

    def terminated(self, model: LoadedModel) -> None:
        manifest = model.manifest
        self._registry.counter(catalogue.RUNS_TERMINATED, *self._labels(manifest)).add()

    def sent(
        self, redis_bytes: int, segment_bytes: int, too_large: int, *, redis: int, socket: int, tcp: int, direct: int
    ) -> None:
        """Count bytes, requests whose outputs were too large, and replies by the way that they took."""
        self._redis.add(redis_bytes)
        self._segment.add(segment_bytes)
        self._too_large.add(too_large)
        self._by_redis.add(redis)
        self._by_socket.add(socket)
        self._by_tcp.add(tcp)
        self._by_direct.add(direct)

    def memory(self, budget_bytes: int, used_bytes: int) -> None:
        """Set the memory of this worker: what it may use, 0 without a limit, and what is in use or promised."""
        self._registry.gauge(catalogue.WORKER_MEMORY_BUDGET_BYTES, self._pool, self._worker).set(budget_bytes)
        self._registry.gauge(catalogue.WORKER_MEMORY_USED_BYTES, self._pool, self._worker).set(used_bytes)

    def device_memory(self, budget_bytes: int, used_bytes: int) -> None:
        """Set the memory of this worker's accelerator, as `memory` does that of its process."""
        self._registry.gauge(catalogue.WORKER_DEVICE_MEMORY_BUDGET_BYTES, self._pool, self._worker).set(budget_bytes)
        self._registry.gauge(catalogue.WORKER_DEVICE_MEMORY_USED_BYTES, self._pool, self._worker).set(used_bytes)

    def taken_of_quotas(self, taken: Mapping[str, int]) -> None:
        """Set the bytes that models of keys with a memory quota take in this worker."""
        for key in self._quotas - taken.keys():
            self._registry.remove(catalogue.KEY_MEMORY_BYTES, key)
        self._quotas = frozenset(taken)
        for key, size_bytes in taken.items():
            self._registry.gauge(catalogue.KEY_MEMORY_BYTES, key).set(size_bytes)

    def batch_checked(self, manifest: Manifest, outcome: str) -> None:
        """Count a live batch that was compared with runs of one row."""
        self._registry.counter(catalogue.BATCH_CHECKS, manifest.model, str(manifest.version), outcome).add()

    def reply_refused(self) -> None:
        """Count a batch whose outputs Redis refused."""
        self._refused.add()

    def batch_unreadable(self) -> None:
        """Count a batch that this worker could not read and passed on."""
        self._unreadable.add()

    def redis_answers(self, answers: bool) -> None:
        """Show whether Redis answers the heartbeat, which calls this after each beat and each failure."""
        self._redis_up.set(answers)
        if answers and self._redis_answered is False:
            self._redis_reconnects.add()
        if answers or self._redis_answered is not None:
            self._redis_answered = answers

    def loading(self, manifest: Manifest) -> None:
        """Show the failed loads of a version before the first, so that a query sees the count grow from 0."""
        self._load_failures(manifest)

    def loaded(self, manifest: Manifest, seconds: float) -> None:
        """Count a load that succeeded, and its time."""
        self._registry.histogram(catalogue.MODEL_LOAD_DURATION, *self._labels(manifest)).observe(seconds)

    def load_failed(self, manifest: Manifest) -> None:
        """Count a load that failed."""
        self._load_failures(manifest).add()

    def _load_failures(self, manifest: Manifest) -> Counter:
        return self._registry.counter(catalogue.MODEL_LOAD_FAILURES, *self._labels(manifest))

    def unload_ended(self, manifest: Manifest, seconds: float) -> None:
        """Count the time until the memory of a version was free."""
        self._registry.histogram(catalogue.MODEL_UNLOAD_DURATION, *self._labels(manifest)).observe(seconds)

    def evicted(self, manifest: Manifest, reason: str, age_s: float | None) -> None:
        """Count a version that was unloaded although it is served, `age_s` after its last call; None: it had none."""
        self._registry.counter(catalogue.EVICTIONS, *self._labels(manifest), reason).add()
        if age_s is not None:
            self._registry.histogram(catalogue.EVICTION_AGE, *self._labels(manifest), reason).observe(age_s)

    def race_ended(self, outcome: str, seconds: float = 0.0) -> None:
        """Count a race that ended; `seconds`: how long it took until its verdict, 0 without one."""
        self._registry.counter(catalogue.RACES_ENDED, outcome).add()
        if seconds:
            self._registry.histogram(catalogue.RACE_DURATION).observe(seconds)

    def races_waiting(self, queued: int, running: int) -> None:
        """Show how many races of the repository wait for a worker, and run."""
        self._registry.gauge(catalogue.RACES_WAITING, "queued").set(queued)
        self._registry.gauge(catalogue.RACES_WAITING, "running").set(running)

    def variant_swapped(self, manifest: Manifest) -> None:
        """Count a version that compiled forms serve from now on."""
        self._registry.counter(catalogue.VARIANTS_SWAPPED, *self._labels(manifest)).add()

    def variant_undone(self, manifest: Manifest) -> None:
        """Count a verdict that this worker took back."""
        self._registry.counter(catalogue.VARIANTS_UNDONE, *self._labels(manifest)).add()

    def instances(self, ready: int) -> None:
        """Show how many versions this worker has ready."""
        self._registry.gauge(catalogue.WORKER_INSTANCES, self._pool, self._worker).set(ready)

    def bytes_of(self, model: LoadedModel, size_bytes: int) -> None:
        manifest = model.manifest
        gauge = self._registry.gauge(catalogue.INSTANCE_MEMORY_BYTES, *self._labels(manifest), self._worker)
        gauge.set(size_bytes)

    def end_series(self, exists: Exists, now: float) -> None:
        """End the series of versions that were deleted, as MetricsRegistry does."""
        self._registry.end_series(exists, now)

    def unloaded(self, model: LoadedModel) -> None:
        manifest = model.manifest
        self._registry.remove(catalogue.INSTANCE_MEMORY_BYTES, *self._labels(manifest), self._worker)
