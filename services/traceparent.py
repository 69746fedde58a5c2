"""The header by which a request belongs to a trace. Pure.

client's traceparent, or a new trace id ─> InferHeaders ─> log records, spans, the access log
Source: W3C, "Trace Context", level 2: https://www.w3.org/TR/trace-context-2/#traceparent-header
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEADER = b"traceparent"
_NO_ID = b"0" * 16  # of a span: no caller may send it
_LENGTH = 55
_FORM = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = b"13579bdf"  # last digits of flags with the bit that says so

#: The trace of a request: the traceparent of its caller, or the trace id, as a number of 128 random bits, of a trace
#: that the request begins. A number costs a request little: its text is made where something is exported or logged.
Trace = bytes | int


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
    if form[3:35] == b"0" * 32 or form[36:52] == _NO_ID:
        return None
    return b"00" + form[2:]


def trace_id_of(trace: Trace | None) -> str:
    """Return the trace id as 32 hexadecimal digits; "" without a trace."""
    if trace is None:
        return ""
    return f"{trace:032x}" if isinstance(trace, int) else trace[3:35].decode("ascii")


def context_of(trace: Trace) -> TraceContext:
    """Return the ids of a trace."""
    if isinstance(trace, int):
        return TraceContext(trace.to_bytes(16), b"")
    return TraceContext(bytes.fromhex(trace[3:35].decode("ascii")), bytes.fromhex(trace[36:52].decode("ascii")))


def is_sampled(traceparent: bytes) -> bool:
    """Whether the caller records the trace."""
    return traceparent[-1] in _SAMPLED
