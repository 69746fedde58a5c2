"""When the parts of a batch took place: for spans, and as the header Server-Timing of a reply.

lane: until the request's batch left the gateway │ queue: until its run began │ run: of the model, with its inputs
Source: W3C, "Server Timing": metrics of one header are separated by commas, durations are milliseconds.
"""

from __future__ import annotations

from typing import Any

from millstream.services.wire.batch import ReplyHeader


class BatchTiming:
    """The times of a batch, which its requests share. Instants are seconds on the monotonic clock of this process.

    Args:
        header: the header of the batch's reply.
        put_at: when the batch left the lane.
        replied_at: when its reply came.
        requests: how many requests it had.
        shown: whether replies have the header Server-Timing.
    """

    __slots__ = ("header", "put_at", "replied_at", "requests", "shown", "span", "worker")

    def __init__(
        self, header: ReplyHeader, put_at: float, replied_at: float, requests: int, *, shown: bool = False
    ) -> None:
        self.header = header
        self.put_at = put_at
        self.replied_at = replied_at
        self.requests = requests
        self.shown = shown
        self.span: Any = None  # context of the batch's span; set by what makes spans, in its thread
        queue_ms = max(0.0, header.queue_s) * 1000
        run_ms = (header.input_s + header.infer_s + header.output_s) * 1000
        #: the part of the header Server-Timing that all requests of the batch share
        self.worker = b", queue;dur=%.3f, run;dur=%.3f" % (queue_ms, run_ms) if shown else b""


def server_timing(timing: BatchTiming, arrival: float) -> bytes:
    """Return the value of Server-Timing for a request that arrived at `arrival`."""
    return b"lane;dur=%.3f%b" % ((timing.put_at - arrival) * 1000, timing.worker)
