"""Spans as OTLP, for any span: OpenTelemetry's own messages read back what was written, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from millstream.plugins.tracing.otlp import encode
from millstream.plugins.tracing.span import Span, SpanKind

OFFSET_NS = 1_795_000_000_000_000_000
texts = st.text(max_size=300)
values = texts | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
ids = st.binary(min_size=8, max_size=8)
spans = st.builds(
    Span,
    st.text(min_size=1, max_size=200),
    st.binary(min_size=16, max_size=16),
    ids,
    ids | st.just(b""),
    st.sampled_from(SpanKind),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.dictionaries(st.text(min_size=1, max_size=150), values, max_size=12),
    st.lists(st.binary(min_size=24, max_size=24), max_size=4).map(tuple),
    texts,
    st.sampled_from(["", "worker-1", "worker-2"]),
)


def plain(text: str) -> str:
    """Return a text without lone surrogates, which UTF-8 cannot have."""
    return text.encode("utf-8", "backslashreplace").decode()


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def assert_same(found: trace_pb2.Span, span: Span) -> None:
    assert (found.trace_id, found.span_id, found.parent_span_id) == (span.trace_id, span.span_id, span.parent_id)
    assert (found.name, found.kind, found.flags) == (plain(span.name), int(span.kind), 1)
    assert found.start_time_unix_nano == OFFSET_NS + int(span.start * 1e9)
    assert found.end_time_unix_nano == OFFSET_NS + int(span.end * 1e9)
    expected = [(plain(key), plain(one) if isinstance(one, str) else one) for key, one in span.attributes.items()]
    expected += [("error.type", plain(span.error))] if span.error else []
    attributes = [(one.key, value_of(one.value)) for one in found.attributes]
    assert [(key, type(one), one) for key, one in attributes] == [(key, type(one), one) for key, one in expected]
    assert [link.trace_id + link.span_id for link in found.links] == list(span.links)
    assert all(link.flags == 1 for link in found.links)
    error = trace_pb2.Status.STATUS_CODE_ERROR if span.error else trace_pb2.Status.STATUS_CODE_UNSET
    assert found.status.code == error


@given(st.lists(spans, min_size=1, max_size=6))
def test_what_is_written_is_read(some: list[Span]) -> None:
    body = encode(some, OFFSET_NS, resource={"service.name": "g", "a": "ü"}, worker_service="w")
    request = ExportTraceServiceRequest.FromString(body)
    assert request.SerializeToString() == body
    workers = list(dict.fromkeys(span.worker for span in some))
    assert len(request.resource_spans) == len(workers)
    for worker, of_resource in zip(workers, request.resource_spans, strict=True):
        resource = {one.key: value_of(one.value) for one in of_resource.resource.attributes}
        expected = {"service.name": "w", "service.instance.id": worker} if worker else {"service.name": "g"}
        assert resource == expected | {"a": "ü"}
        (scope,) = of_resource.scope_spans
        assert scope.scope.name == "millstream"
        mine = [span for span in some if span.worker == worker]
        for found, span in zip(scope.spans, mine, strict=True):
            assert_same(found, span)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_a_number_beyond_64_bits_is_refused(number: int) -> None:
    span = Span("a", bytes(16), bytes(8), b"", SpanKind.SERVER, 0.0, 0.0, {"n": number})
    with pytest.raises(ValueError, match="64-bit"):
        encode([span], OFFSET_NS, resource={}, worker_service="w")
