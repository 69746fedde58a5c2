"""statistics: Triton's statistics of versions, over all gateways of this machine, including those that have ended.

GET …/stats (REST), ModelStatistics (gRPC) ─> of() ─> the metric files ─> ModelStatistics ─> stats_document
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.gateway.catalog.snapshot import Snapshot, VersionView, name_excerpt, version_number, visible
from millstream.services.errors import Failure, invalid
from millstream.services.metrics.inference import Field, Recorded, recorded
from millstream.services.metrics.registry import MetricsRegistry


@dataclass(frozen=True, slots=True)
class Duration:
    """A number of events, and their total time."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size (rows)."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Counts and times of one version since it was loaded, over all gateways."""

    name: str
    version: str
    last_inference_ms: int = 0  # since the epoch; 0: never
    inference_count: int = 0  # rows of successful requests
    execution_count: int = 0  # runs of the model
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    batches: Sequence[BatchStatistics] = ()
    memory_bytes: Mapping[tuple[str, int], int] = field(default_factory=dict)  # (CPU | GPU, device number) -> bytes


#: fields of ModelStatistics; the last three are also those of BatchStatistics
DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


class MachineStatistics:
    """Reads the statistics of versions in the metric files. `snapshot` returns the current snapshot."""

    def __init__(self, registry: MetricsRegistry, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = registry
        self._snapshot = snapshot

    async def of(self, model: str | None, version: str | None) -> list[ModelStatistics]:
        """Return the statistics of a version, of a model's loaded versions, or of all. Raises Failure(INVALID)."""
        views = loaded(self._snapshot(), model, version)
        by_content_id = recorded(await asyncio.to_thread(self._registry.totals))
        return [_statistics(view, by_content_id.get(view.manifest.content_id, Recorded())) for view in views]


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


def _statistics(view: VersionView, sums: Recorded) -> ModelStatistics:
    values = sums.values
    success = int(values[Field.SUCCESS])
    return ModelStatistics(
        name=view.manifest.model,
        version=str(view.manifest.version),
        last_inference_ms=int(sums.last * 1000),
        inference_count=int(values[Field.ROWS]),
        execution_count=int(values[Field.EXECUTIONS]),
        success=_duration(success, values[Field.SUCCESS_S]),
        fail=_duration(sums.failed, values[Field.FAIL_S]),
        queue=_duration(success, values[Field.QUEUE_S]),
        compute_input=_duration(success, values[Field.INPUT_S]),
        compute_infer=_duration(success, values[Field.INFER_S]),
        compute_output=_duration(success, values[Field.OUTPUT_S]),
        batches=[
            BatchStatistics(rows, *(_duration(count, seconds) for seconds in times))
            for rows, (count, *times) in sorted(sums.runs.items())
        ],
        memory_bytes=_memory(view),
    )


def _duration(count: float, seconds: float) -> Duration:
    return Duration(int(count), round(seconds * 1e9))


def _memory(view: VersionView) -> dict[tuple[str, int], int]:
    """Return the memory of the instances, by device."""
    sizes: Counter[tuple[str, int]] = Counter()
    for at in view.replicas:
        kind, _, number = at.worker.device.partition(":")
        sizes[("CPU", 0) if kind == "cpu" else ("GPU", int(number or 0))] += at.instance.resident_bytes
    return dict(sizes)


def stats_document(statistics: list[ModelStatistics]) -> dict[str, Any]:
    """Return the statistics in JSON form. Fields of the response cache and of decoupled models are zero or empty."""
    return {"model_stats": [_document(version) for version in statistics]}


def _document(version: ModelStatistics) -> dict[str, Any]:
    return {
        "name": version.name,
        "version": version.version,
        "last_inference": version.last_inference_ms,
        "inference_count": version.inference_count,
        "execution_count": version.execution_count,
        "inference_stats": {name: _json_duration(getattr(version, name)) for name in DURATIONS}
        | {"cache_hit": _json_duration(Duration()), "cache_miss": _json_duration(Duration())},
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": batch.batch_size,
                "compute_input": _json_duration(batch.compute_input),
                "compute_infer": _json_duration(batch.compute_infer),
                "compute_output": _json_duration(batch.compute_output),
            }
            for batch in version.batches
        ],
        "memory_usage": [
            {"type": kind, "id": number, "byte_size": size}
            for (kind, number), size in sorted(version.memory_bytes.items())
        ],
    }


def _json_duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
