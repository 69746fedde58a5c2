"""traceparent: the header by which a request belongs to a trace. Pure.

client's traceparent, or a new root ─> InferHeaders ─> log records, spans, the access log
Source: W3C, "Trace Context", level 2: https://www.w3.org/TR/trace-context-2/#traceparent-header
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEADER = b"traceparent"
#: in place of a parent's id, in a traceparent that this server made: the request begins the trace
NO_PARENT = b"0" * 16
_LENGTH = 55
_FORM = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = b"13579bdf"  # last digits of flags with the bit that says so


class TraceContext(NamedTuple):
    """The trace that a request belongs to."""

    trace_id: bytes  # 16 bytes
    parent_id: bytes  # 8 bytes: the span of the caller; b"": the request begins the trace


def usable_traceparent(sent: bytes) -> bytes | None:
    """Return a `traceparent` in the form of version 00, whatever its version; None unless it is valid."""
    sent = sent.strip()
    form = sent[:_LENGTH]
    if not _FORM.fullmatch(form) or form.startswith(b"ff"):
        return None
    if len(sent) > _LENGTH and (form.startswith(b"00") or sent[_LENGTH : _LENGTH + 1] != b"-"):
        return None
    if form[3:35] == b"0" * 32 or form[36:52] == NO_PARENT:
        return None
    return b"00" + form[2:]


def new_traceparent(trace_id: int) -> bytes:
    """Return the traceparent of a request that begins a trace. `trace_id`: 128 random bits."""
    return b"00-%032x-%b-00" % (trace_id or 1, NO_PARENT)


def trace_id_of(traceparent: bytes | None) -> str:
    """Return the trace id as 32 hexadecimal digits; "" without a traceparent."""
    return "" if traceparent is None else traceparent[3:35].decode("ascii")


def context_of(traceparent: bytes) -> TraceContext:
    """Return the parts of a traceparent that one of these functions returned."""
    parent = traceparent[36:52]
    parent_id = b"" if parent == NO_PARENT else bytes.fromhex(parent.decode("ascii"))
    return TraceContext(bytes.fromhex(traceparent[3:35].decode("ascii")), parent_id)


def has_parent(traceparent: bytes) -> bool:
    """Whether a caller sent the traceparent."""
    return traceparent[36:52] != NO_PARENT


def is_sampled(traceparent: bytes) -> bool:
    """Whether the caller records the trace."""
    return traceparent[-1] in _SAMPLED
