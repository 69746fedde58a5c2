"""Renders the metrics page: all series, the lines of plug-ins, and the depths of the streams in Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.label_limit import Exists
from millstream.services.metrics.page import GaugeSample, MetricsPage
from millstream.services.metrics.record import Totals
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.plugin.registry import contributions
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.repository.disk import disk_space

STREAMS_AT_ONCE = 100  # streams whose depths one call reads: between calls the event loop serves requests
DEPTHS_S_MAX = 1.0  # time for reading all depths; then the page shows the depths that were read

#: further lines of the page, each with its end; the second argument says whether the format is OpenMetrics
AddedLines = Callable[[Totals, bool], str]


class GatewayMetricsPage:
    """Renders the metrics page of one gateway, one page at a time.

    Args:
        snapshot: returns the current snapshot, for the lines of plug-ins.
        exists: says whether a version exists: those that were deleted have no series.
    """

    def __init__(
        self,
        registry: MetricsRegistry,
        snapshot: Callable[[], Snapshot],
        cluster_state: ClusterState,
        lanes: LaneTable,
        repository: Path,
        exists: Exists,
    ) -> None:
        self._repository = repository
        self._registry = registry
        self._exists = exists
        self._page = MetricsPage(registry)
        self._added: list[AddedLines] = [build(snapshot) for build in contributions("metrics_page", FunctionType)]
        self._cluster_state = cluster_state
        self._lanes = lanes
        self._records_unreadable = registry.gauge(catalogue.WORKER_RECORDS_UNREADABLE)
        self._lock = asyncio.Lock()

    async def render(self, accept: str | None) -> tuple[bytes, str]:
        """Return the page and its content type. `accept`: the Accept header of the request."""
        async with self._lock:
            self._records_unreadable.set(len(self._cluster_state.unreadable))
            depths: list[GaugeSample] = []
            with suppress(Failure, TimeoutError):
                async with asyncio.timeout(DEPTHS_S_MAX):
                    await self._read_depths(depths)
            return await asyncio.to_thread(self._render, accept, depths)

    def _render(self, accept: str | None, depths: list[GaugeSample]) -> tuple[bytes, str]:
        with suppress(OSError):
            size_bytes, free_bytes = disk_space(self._repository)
            self._registry.gauge(catalogue.REPOSITORY_DISK_BYTES).set(size_bytes)
            self._registry.gauge(catalogue.REPOSITORY_FREE_BYTES).set(free_bytes)
        self._registry.end_series(self._exists, time.monotonic())
        return self._page.render(accept, self._added_lines, depths, self._exists)

    def _added_lines(self, totals: Totals, openmetrics: bool) -> str:
        return "".join([lines(totals, openmetrics) for lines in self._added])

    async def _read_depths(self, depths: list[GaugeSample]) -> None:
        """Append the depth of each lane's stream to `depths`."""
        by_pool: dict[str, list[Lane]] = {}
        for lane in self._lanes.all():
            by_pool.setdefault(lane.pool, []).append(lane)
        for pool, of_pool in by_pool.items():
            for start in range(0, len(of_pool), STREAMS_AT_ONCE):
                lanes = of_pool[start : start + STREAMS_AT_ONCE]
                entries = await self._cluster_state.stream_entries(pool, [lane.content_id for lane in lanes])
                for lane, count in zip(lanes, entries, strict=True):
                    labels = (lane.manifest.model, str(lane.manifest.version), pool)
                    depths.append(GaugeSample(catalogue.STREAM_ENTRIES, labels, count))
