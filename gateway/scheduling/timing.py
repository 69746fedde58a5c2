"""timing: how long the parts of a request took, as the header Server-Timing of its reply. Pure.

lane: until the request's batch left the gateway │ queue: until its run began │ run: of the model, with its inputs
Source: W3C, "Server Timing": metrics of one header are separated by commas, durations are milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.services.wire.batch import ReplyHeader


class BatchTiming(NamedTuple):
    """The timing of a batch, which its requests share."""

    put_at: float  # when the batch left the lane, in seconds on the monotonic clock
    worker: bytes  # the part of the header that all of its requests share


def batch_timing(header: ReplyHeader, put_at: float) -> BatchTiming:
    """Return the timing of the batch whose reply has this `header` and that was put at `put_at`."""
    queue_ms = max(0.0, header.queue_s) * 1000
    run_ms = (header.input_s + header.infer_s + header.output_s) * 1000
    return BatchTiming(put_at, b", queue;dur=%.3f, run;dur=%.3f" % (queue_ms, run_ms))


def server_timing(timing: BatchTiming, arrival: float) -> bytes:
    """Return the value of Server-Timing for a request that arrived at `arrival`."""
    return b"lane;dur=%.3f%b" % ((timing[0] - arrival) * 1000, timing[1])
