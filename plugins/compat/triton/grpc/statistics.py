"""statistics: ModelConfig and ModelStatistics, the configuration and the statistics of versions."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.methods.infer import check_version
from millstream.gateway.http.deps import Deps
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.interfaces import Duration, ModelStatistics

_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_BATCH_DURATIONS = ("compute_input", "compute_infer", "compute_output")


class StatisticsCalls:
    """Handles unary calls: each method takes a request message and returns the reply message, or raises Failure."""

    def __init__(self, deps: Deps) -> None:
        self._triton = deps.part(Triton)

    async def model_config(self, request: Any, _: Any) -> Any:
        check_version(request.version)
        document = self._triton.config_of(request.name, request.version or None)
        response = pb.ModelConfigResponse()
        json_format.ParseDict(document, response.config, ignore_unknown_fields=True)
        return response

    async def model_statistics(self, request: Any, _: Any) -> Any:
        check_version(request.version)
        versions = await self._triton.statistics.of(request.name or None, request.version or None)
        return pb.ModelStatisticsResponse(model_stats=[_message(statistics) for statistics in versions])


def _message(of: ModelStatistics) -> Any:
    message = pb.ModelStatistics(
        name=of.name,
        version=of.version,
        last_inference=of.last_inference_ms,
        inference_count=of.inference_count,
        execution_count=of.execution_count,
        inference_stats={name: _duration(getattr(of, name)) for name in _DURATIONS},
        memory_usage=[
            pb.MemoryUsage(type=kind, id=number, byte_size=size) for (kind, number), size in of.memory_bytes.items()
        ],
    )
    for batch in of.batches:
        durations = {name: _duration(getattr(batch, name)) for name in _BATCH_DURATIONS}
        message.batch_stats.add(batch_size=batch.batch_size, **durations)
    return message


def _duration(of: Duration) -> Any:
    return pb.StatisticDuration(count=of.count, ns=of.ns)
