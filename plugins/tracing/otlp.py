"""otlp: spans -> an ExportTraceServiceRequest of OTLP.

The messages are written as bytes here: a sampled request has eight spans, and building them as objects of protobuf
takes four times as long. Fields are written in the order of their numbers, as protobuf does.
Source: opentelemetry-proto, opentelemetry/proto/trace/v1/trace.proto; protobuf.dev, Encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct

from millstream.plugins.tracing.span import Span, Value
from millstream.services.version import VERSION

ATTRIBUTES_MAX = 1024  # encoded attributes that are remembered: of at most some KiB each
_SHORT = tuple(bytes((length,)) for length in range(128))
_FROM_TO = Struct("<BQBQ").pack  # start_time_unix_nano = 7 and end_time_unix_nano = 8, both fixed64
_DOUBLE = Struct("<Bd").pack
_START, _END, _DOUBLE_VALUE = 7 << 3 | 1, 8 << 3 | 1, 4 << 3 | 1
_SAMPLED = b"\x85\x01\x01\x00\x00\x00"  # flags = 16, fixed32: the sampled bit of the trace
_LINK_SAMPLED = b"\x35\x01\x00\x00\x00"  # flags = 6 of a link
_ERROR = b"\x7a\x02\x18\x02"  # status = 15, whose code = 3 is STATUS_CODE_ERROR
_INT64 = range(-(1 << 63), 1 << 63)


def encode(spans: Iterable[Span], offset_ns: int, *, resource: Mapping[str, str], worker_service: str) -> bytes:
    """Return the encoded request.

    Args:
        spans: at least one.
        offset_ns: what Unix time is ahead of the clock of the spans.
        resource: attributes of this process.
        worker_service: `service.name` of the workers, whose spans have a resource of their own.
    """
    by_worker: dict[str, list[bytes]] = {}
    for span in spans:
        by_worker.setdefault(span.worker, []).append(_span(span, offset_ns))
    scope = _field(1, _text(1, "millstream") + _text(2, VERSION))
    request: list[bytes] = []
    for worker, encoded in by_worker.items():
        attributes = dict(resource)
        if worker:
            attributes |= {"service.name": worker_service, "service.instance.id": worker}
        of_resource = b"".join([_attribute(1, key, value) for key, value in attributes.items()])
        request.append(_field(1, _field(1, of_resource) + _field(2, scope + b"".join(encoded))))
    return b"".join(request)


def rejected_spans(reply: bytes) -> int:
    """Return how many spans a collector rejected, of its reply to an export."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        return int(ExportTraceServiceResponse.FromString(reply).partial_success.rejected_spans)
    except DecodeError:
        return 0  # some collectors answer in JSON whatever the request was


def _span(span: Span, offset_ns: int) -> bytes:
    """Return a span as a field of its scope."""
    parts = [b"\x0a\x10", span.trace_id, b"\x12\x08", span.span_id]
    if span.parent_id:
        parts += b"\x22\x08", span.parent_id
    parts += (
        _name_and_kind(span.name, span.kind),
        _FROM_TO(_START, offset_ns + int(span.start * 1e9), _END, offset_ns + int(span.end * 1e9)),
    )
    for key, value in span.attributes.items():
        parts.append(_attribute(9, key, value))
    if span.error:
        parts.append(_attribute(9, "error.type", span.error))
    for link in span.links:
        parts += b"\x6a\x21\x0a\x10", link[:16], b"\x12\x08", link[16:], _LINK_SAMPLED
    if span.error:
        parts.append(_ERROR)
    parts.append(_SAMPLED)
    return _field(2, b"".join(parts))


@lru_cache(ATTRIBUTES_MAX)
def _name_and_kind(name: str, kind: int) -> bytes:
    return _text(5, name) + _tag(6, 0) + _varint(kind)


@lru_cache(ATTRIBUTES_MAX, typed=True)
def _attribute(number: int, key: str, value: Value) -> bytes:
    """Return a KeyValue as a field. Most are those of many spans: a model, a route, a worker."""
    if isinstance(value, str):
        any_value = _text(1, value)
    elif isinstance(value, bool):
        any_value = b"\x10\x01" if value else b"\x10\x00"
    elif isinstance(value, int):
        if value not in _INT64:
            raise ValueError(f"{key} is no 64-bit number")
        any_value = b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    else:
        any_value = _DOUBLE(_DOUBLE_VALUE, value)
    return _field(number, _text(1, key) + _field(2, any_value))


def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode("utf-8", "backslashreplace"))


def _field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, a string or a message."""
    return _tag(number, 2) + _varint(len(content)) + content


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(number: int) -> bytes:
    if number < 128:
        return _SHORT[number]
    encoded = bytearray()
    while number >= 128:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
