"""Triton's statistics of versions, over all gateways of this machine, including those that have ended.

GET …/stats (REST), ModelStatistics (gRPC) ─> of() ─> the metric files ─> Statistics
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from millstream.gateway.catalog.snapshot import Snapshot, VersionView, name_excerpt, version_number, visible
from millstream.plugins.compat.triton.schemas import MemoryUsage, StatisticDuration, Statistics, VersionStatistics
from millstream.services.errors import Failure, invalid
from millstream.services.metrics.inference import Field, Recorded, recorded
from millstream.services.metrics.registry import MetricsRegistry


class MachineStatistics:
    """Reads the statistics of versions in the metric files. `snapshot` returns the current snapshot."""

    def __init__(self, registry: MetricsRegistry, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = registry
        self._snapshot = snapshot

    async def of(self, model: str | None, version: str | None) -> Statistics:
        """Return the statistics of a version, of a model's loaded versions, or of all. Raises Failure(INVALID)."""
        views = loaded(self._snapshot(), model, version)
        by_content_id = recorded(await asyncio.to_thread(self._registry.totals))
        found = [_statistics(view, by_content_id.get(view.manifest.content_id, Recorded())) for view in views]
        return {"model_stats": found}


def loaded(snapshot: Snapshot, model: str | None = None, version: str | None = None) -> list[VersionView]:
    """Return the versions that answer requests, of all models or of one model, or one version, by name and number.

    Raises:
        Failure: INVALID (not available), NOT_FOUND (`version` is not a number).
    """
    if model is not None and model not in snapshot.models:
        raise invalid(f"requested model '{name_excerpt(model)}' is not available{snapshot.did_you_mean(model)}")
    number = None if model is None or version is None else version_number(model, version)
    views = [
        view
        for name, model_view in sorted((visible(snapshot) if model is None else snapshot).models.items())
        if model in {None, name}
        for _, view in sorted(model_view.versions.items())
        if view.available and number in {None, view.manifest.version}
    ]
    if model is not None and not views:
        raise _not_available(model, number)
    return views


def _not_available(model: str, number: int | None) -> Failure:
    which = "" if number is None else f" version {number}"
    return invalid(f"requested model '{name_excerpt(model)}'{which} is not available")


def _statistics(view: VersionView, sums: Recorded) -> VersionStatistics:
    """Return the statistics of a version. There is no response cache, and no model is decoupled: zero, and empty."""
    values = sums.values
    success = int(values[Field.SUCCESS])
    return {
        "name": view.manifest.model,
        "version": str(view.manifest.version),
        "last_inference": int(sums.last * 1000),
        "inference_count": int(values[Field.ROWS]),
        "execution_count": int(values[Field.EXECUTIONS]),
        "inference_stats": {
            "success": _duration(success, values[Field.SUCCESS_S]),
            "fail": _duration(sums.failed, values[Field.FAIL_S]),
            "queue": _duration(success, values[Field.QUEUE_S]),
            "compute_input": _duration(success, values[Field.INPUT_S]),
            "compute_infer": _duration(success, values[Field.INFER_S]),
            "compute_output": _duration(success, values[Field.OUTPUT_S]),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(count, input_s),
                "compute_infer": _duration(count, infer_s),
                "compute_output": _duration(count, output_s),
            }
            for rows, (count, input_s, infer_s, output_s) in sorted(sums.runs.items())
        ],
        "memory_usage": _memory(view),
    }


def _duration(count: float, seconds: float) -> StatisticDuration:
    return {"count": int(count), "ns": round(seconds * 1e9)}


def _memory(view: VersionView) -> list[MemoryUsage]:
    """Return the memory of the instances, by device."""
    sizes: Counter[tuple[str, int]] = Counter()
    for at in view.replicas:
        kind, _, number = at.worker.device.partition(":")
        sizes[("CPU", 0) if kind == "cpu" else ("GPU", int(number or 0))] += at.instance.resident_bytes
    return [{"type": kind, "id": number, "byte_size": size} for (kind, number), size in sorted(sizes.items())]
