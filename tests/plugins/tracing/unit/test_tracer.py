"""The tracer with real collectors: what it exports, tries again, drops and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from millstream.gateway.observing.finished import BatchTiming, Finished, Run
from millstream.plugins.tracing.gateway import tracer as module
from millstream.plugins.tracing.gateway.request_spans import SpanMaker
from millstream.plugins.tracing.gateway.tracer import Tracer
from millstream.services.metrics.catalogue import TRACED_REQUESTS_DROPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.wire.batch import ReplyHeader
from tests.kit.otlp import Collector, grpc_collector, http_collector
from tests.kit.wait import wait_until

HEADER = ReplyHeader("b", "worker-1", 0.1, 0.01, 0.2, 0.01, 3, [3], {}, [], "")


def finished(number: int, timing: BatchTiming | None = None, status: int = 200) -> Finished:
    runs = (Run("m", "1", "cpu", "v2", 1, 10.1, timing),)
    return Finished("http", "POST", "/r", "/r", status, 10.0, 11.0, f"r{number}", number, "", 5, "", runs)


def made(collector: Collector, registry: MetricsRegistry, *, protocol: str = "http/protobuf") -> Tracer:
    def resource_of(worker: str) -> Resource:
        return Resource({"service.name": "w", "service.instance.id": worker} if worker else {"service.name": "g"})

    exporter: SpanExporter = (
        GrpcExporter(collector.url, timeout=3)
        if protocol == "grpc"
        else HttpExporter(f"{collector.url}/v1/traces", timeout=3)
    )
    return Tracer(exporter, SpanMaker(resource_of, RandomIdGenerator()).spans_of, registry)


def dropped(registry: MetricsRegistry) -> dict[str, float]:
    return {labels[0]: value for labels, value in registry.counts(TRACED_REQUESTS_DROPPED).items() if value}


@pytest.mark.parametrize(("collect", "protocol"), [(http_collector, "http/protobuf"), (grpc_collector, "grpc")])
def test_spans_reach_a_collector(collect: Callable[[], Collector], protocol: str) -> None:
    registry = MetricsRegistry(None, "test")
    timing = BatchTiming(HEADER, 10.2, 10.9, 3)
    with collect() as collector:  # type: ignore[attr-defined]
        tracer = made(collector, registry, protocol=protocol)
        tracer.start()
        for number in (1, 2, 3):
            tracer.add(finished(number, timing))
        tracer.close()
        (batch,) = [span for span in collector.spans if span.name == "batch"]
        assert [trace_id for trace_id, _ in batch.links] == [f"{number:032x}" for number in (1, 2, 3)]
        runs = [span for span in collector.spans if span.name == "run" and span.trace_id != batch.trace_id]
        assert len(runs) == 3
        assert all(span.end_ns - span.start_ns == pytest.approx(2e8, rel=1e-3) for span in runs)
        assert {span.resource["service.instance.id"] for span in runs} == {"worker-1"}
        assert dropped(registry) == {}


def test_overloaded_collector_is_asked_again() -> None:
    registry = MetricsRegistry(None, "test")
    with http_collector() as collector:
        collector.statuses += [503]
        tracer = made(collector, registry)
        tracer.start()
        tracer.add(finished(1))
        collector.of(f"{1:032x}")
        tracer.close()
    assert dropped(registry) == {}


def test_refusal_of_a_collector_is_counted_and_not_repeated() -> None:
    registry = MetricsRegistry(None, "test")
    with http_collector() as collector:
        collector.statuses += [400]
        tracer = made(collector, registry)
        tracer.start()
        tracer.add(finished(1))
        wait_until(lambda: dropped(registry) == {"export_failed": 1.0}, what="the refusal is counted")
        tracer.add(finished(2))
        collector.of(f"{2:032x}")
        tracer.close()
        assert len(collector.headers) == 2


def test_collector_that_comes_back_gets_later_traces(caplog: pytest.LogCaptureFixture) -> None:
    registry = MetricsRegistry(None, "test")
    with http_collector() as collector:
        port = int(collector.url.rpartition(":")[2])
    tracer = made(collector, registry)
    tracer._away = True  # as after a first failure
    tracer.start()
    tracer.add(finished(1))
    wait_until(lambda: dropped(registry) == {"export_failed": 1.0}, what="the trace is dropped")
    with http_collector(port) as again, caplog.at_level("INFO", "millstream.tracing"):
        tracer.add(finished(2))
        again.of(f"{2:032x}")
        tracer.close()
    own = [record.message for record in caplog.records if record.name == "millstream.tracing"]
    assert own[-1] == "traces are exported again"


def test_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER_MAX", 10)
    registry = MetricsRegistry(None, "test")
    with http_collector() as collector:
        tracer = made(collector, registry)  # not started: a thread that never gets the processor
        for number in range(25):
            tracer.add(finished(number + 1))
        assert dropped(registry) == {"buffer_full": 15.0}
        tracer.start()
        tracer.close()
        assert len({span.attributes.get("millstream.request_id") for span in collector.spans} - {None}) == 10


def test_failed_request_is_a_failed_span() -> None:
    registry = MetricsRegistry(None, "test")
    with http_collector() as collector:
        tracer = made(collector, registry)
        tracer.start()
        tracer.add(finished(2, status=503))
        tracer.close()
        assert {span.trace_id for span in collector.spans} == {f"{2:032x}"}
        assert next(span for span in collector.spans if span.kind == 2).failed


def test_defect_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = MetricsRegistry(None, "test")
    with http_collector() as collector:
        tracer = made(collector, registry)
        tracer.start()
        tracer.add(finished(1)._replace(runs=(None,)))  # type: ignore[arg-type]
        wait_until(lambda: dropped(registry) == {"export_failed": 1.0}, what="the defect is counted")
        tracer.add(finished(2))
        collector.of(f"{2:032x}")
        tracer.close()


def test_times_that_cannot_be_are_exported_as_none() -> None:
    """A worker of another release, or one with a defect, takes no trace away: all requests of an export share it."""
    registry = MetricsRegistry(None, "test")
    times = [math.nan, -5.0, math.inf, 1e300]
    with http_collector() as collector:
        tracer = made(collector, registry)
        tracer.start()
        for number, seconds in enumerate(times, 1):
            header = ReplyHeader("b", "worker-1", seconds, seconds, seconds, seconds, 3, [3], {}, [], "")
            tracer.add(finished(number, BatchTiming(header, 10.2, 10.9, 3)))
        for number in range(1, len(times) + 1):
            collector.of(f"{number:032x}")
        tracer.close()
        assert all(span.start_ns <= span.end_ns for span in collector.spans)
    assert dropped(registry) == {}


def test_a_defect_is_logged_once_a_minute_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    registry = MetricsRegistry(None, "test")

    def broken(*_: object) -> list[ReadableSpan]:
        raise ValueError("cannot be made")

    def lost(count: float) -> bool:
        return dropped(registry) == {"export_failed": count}

    with http_collector() as collector:
        tracer = Tracer(HttpExporter(f"{collector.url}/v1/traces"), broken, registry)
        tracer.start()
        for number in range(1, 4):
            tracer.add(finished(number))
            wait_until(partial(lost, float(number)), what="the trace is dropped")
        tracer.close()
    assert len(caplog.records) == 1
