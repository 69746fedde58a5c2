"""What is recorded of a request when its reply was written, and when the parts of its batch took place. Pure data.

connection, route or gRPC call ─> Finished, with a Run for each batch that it needed ─> Tracer, AccessLog
BatchTiming, for spans and the header Server-Timing:
lane: until the request's batch left the gateway │ queue: until its run began │ run: of the model, with its inputs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from millstream.services.traceparent import Trace
from millstream.services.wire.batch import ReplyHeader

CANCELLED_STATUS = 499  # in place of an HTTP status: the caller went away
#: HTTP statuses for which a request counts as failed: overload, and errors of the server
FAILED_HTTP = frozenset({429, *range(500, 600)})
#: the same for gRPC: UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE, DATA_LOSS
FAILED_GRPC = frozenset({2, 4, 8, 13, 14, 15})
RUNS_MAX = 64  # runs of one call that are recorded
SERVER_TIMING_BYTES_MAX = 2048  # of the header: further steps of a graph are left out, as proxies refuse long heads
PATH_MAX = 1024  # characters of a path that are kept: a head may have 64 KiB, and thousands of requests wait

#: the inference requests that the current task began, for calls that are observed; None: not observed
TICKETS: ContextVar[list[Any] | None] = ContextVar("TICKETS", default=None)


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

    @property
    def run_s(self) -> float:
        """The time of the run, with its inputs and outputs."""
        return self.header.input_s + self.header.infer_s + self.header.output_s

    def waited_s(self, arrival: float) -> float:
        """Return how long a request that arrived at `arrival` waited for the run, in the lane and in the queue."""
        return max(0.0, self.put_at - arrival) + max(0.0, self.header.queue_s)


def server_timing(request: Any, now: float) -> bytes:
    """Return the value of Server-Timing for a request that is answered `now`; empty: it is not shown.

    That of a graph has the whole time, and how long each step waited and ran: total, detect.queue, detect.run.

    Source: W3C, "Server Timing": metrics of one header are separated by commas, durations are milliseconds.
    """
    timing = request.timing
    if timing is not None:
        return b"lane;dur=%.3f%b" % ((timing.put_at - request.arrival) * 1000, timing.worker) if timing.shown else b""
    metrics, size_bytes = [], 0
    for name, step in _steps_of(request, ""):
        if not step.timing.shown:
            return b""
        times = name, step.timing.waited_s(step.arrival) * 1000, name, step.timing.run_s * 1000
        metric = b", %b.queue;dur=%.3f, %b.run;dur=%.3f" % times
        size_bytes += len(metric)
        if size_bytes > SERVER_TIMING_BYTES_MAX:
            break
        metrics.append(metric)
    return b"total;dur=%.3f%b" % ((now - request.arrival) * 1000, b"".join(metrics)) if metrics else b""


def _steps_of(request: Any, above: str) -> Iterator[tuple[bytes, Any]]:
    """Yield the steps that ran for a request, also of graphs within, by their names: "read.crop"."""
    for step in request.steps:
        name = above + step.step
        if step.timing is not None:
            yield name.encode(), step
        yield from _steps_of(step, f"{name}.")


class Run(NamedTuple):
    """An inference request of a call. Instants are seconds on the monotonic clock."""

    model: str
    version: str
    pool: str
    protocol: str
    rows: int
    arrival: float  # when it was admitted
    timing: BatchTiming | None  # its last batch's; None: it was in none
    step: str = ""  # its name in the graph that it ran for


class Finished(NamedTuple):
    """A call that has its reply, or whose caller went away. Instants are seconds on the monotonic clock."""

    protocol: str  # http or grpc
    method: str  # HTTP's, or the name of the gRPC method
    route: str  # template of the path; of gRPC the service; "": no route has the path
    path: str  # without the query, which may hold keys; its first PATH_MAX characters
    status: int  # HTTP's, or the number of gRPC's status code
    started: float  # when the request was read
    ended: float
    request_id: str
    trace: Trace | None
    client: str
    reply_bytes: int
    key: str = ""  # name of the caller's key; "": it has none
    runs: tuple[Run, ...] = ()  # the last field: Observer.finish adds it, and the key

    @property
    def failed(self) -> bool:
        """Whether the server failed, or refused because of overload."""
        return self.status in (FAILED_HTTP if self.protocol == "http" else FAILED_GRPC)


def key_of(tickets: Iterable[Any]) -> str:
    """Return the name of the key of handles as of `runs_of`; "": no key was needed."""
    for ticket in tickets:
        key = getattr(getattr(ticket, "ticket", ticket), "key", None)
        if key is not None:
            return str(key.name)
    return ""


def runs_of(tickets: Iterable[Any]) -> tuple[Run, ...]:
    """Return the runs of handles that InferHandler.submit or a Caller made; none for requests that were refused."""
    found: list[Run] = []
    for ticket in tickets:
        request = getattr(ticket, "ticket", ticket)  # one that was decoded in a thread has a ticket itself
        lane = getattr(request, "lane", None)
        if lane is not None and len(found) < RUNS_MAX:
            manifest = lane.manifest
            found.append(
                Run(
                    manifest.model,
                    str(manifest.version),
                    lane.pool,
                    str(request.responder.protocol),
                    request.rows,
                    request.arrival,
                    request.timing,
                    request.step,
                )
            )
            if request.steps:
                found += runs_of(request.steps)[: RUNS_MAX - len(found)]
    return tuple(found)
