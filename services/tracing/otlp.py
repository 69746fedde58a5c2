"""otlp: spans -> an ExportTraceServiceRequest of OTLP.

Source: opentelemetry-proto, opentelemetry/proto/trace/v1/trace.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from millstream.services.tracing.span import Span, Value
from millstream.services.version import VERSION

_ERROR = trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR)
_SAMPLED = 1  # flags of a span: the sampled bit of the trace


def encode(spans: Iterable[Span], offset_ns: int, *, resource: Mapping[str, str], worker_service: str) -> bytes:
    """Return the encoded request.

    Args:
        spans: at least one.
        offset_ns: what Unix time is ahead of the clock of the spans.
        resource: attributes of this process.
        worker_service: `service.name` of the workers, whose spans have a resource of their own.
    """
    by_worker: dict[str, list[Any]] = {}
    for span in spans:
        by_worker.setdefault(span.worker, []).append(_encoded(span, offset_ns))
    scope = InstrumentationScope(name="millstream", version=VERSION)
    request = ExportTraceServiceRequest()
    for worker, encoded in by_worker.items():
        attributes = dict(resource)
        if worker:
            attributes |= {"service.name": worker_service, "service.instance.id": worker}
        of_resource = request.resource_spans.add(resource=Resource(attributes=_attributes(attributes)))
        of_resource.scope_spans.add(scope=scope, spans=encoded)
    serialized: bytes = request.SerializeToString()
    return serialized


def rejected_spans(reply: bytes) -> int:
    """Return how many spans a collector rejected, of its reply to an export."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        return int(ExportTraceServiceResponse.FromString(reply).partial_success.rejected_spans)
    except DecodeError:
        return 0  # some collectors answer in JSON whatever the request was


def _encoded(span: Span, offset_ns: int) -> Any:
    return trace_pb2.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        flags=_SAMPLED,
        name=span.name,
        kind=int(span.kind),  # type: ignore[arg-type]
        start_time_unix_nano=offset_ns + int(span.start * 1e9),
        end_time_unix_nano=offset_ns + int(span.end * 1e9),
        attributes=_attributes(span.attributes | {"error.type": span.error} if span.error else span.attributes),
        links=[trace_pb2.Span.Link(trace_id=link[:16], span_id=link[16:], flags=_SAMPLED) for link in span.links],
        status=_ERROR if span.error else None,
    )


def _attributes(attributes: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value.encode("utf-8", "backslashreplace").decode())
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(double_value=value)
