"""span: one operation of a trace, and the places that its ids come from. Pure data."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class SpanKind(IntEnum):
    """As in opentelemetry/proto/trace/v1/trace.proto."""

    INTERNAL = 1
    SERVER = 2
    PRODUCER = 4
    CONSUMER = 5


Value = str | int | float | bool


class Span(NamedTuple):
    """A span. Instants are seconds on the monotonic clock of the process that made it."""

    name: str
    trace_id: bytes  # 16 bytes
    span_id: bytes  # 8 bytes
    parent_id: bytes  # 8 bytes; b"": none
    kind: SpanKind
    start: float
    end: float
    attributes: dict[str, Value]
    links: tuple[bytes, ...] = ()  # trace id and span id of other spans
    error: str = ""  # what kind of error it ended with; "": none
    worker: str = ""  # name of the worker that it took place in; "": in this process
