"""What is recorded of a request when its reply was written. Pure data.

connection, route or gRPC call ─> Finished, with a Run for each batch that it needed ─> Tracer, AccessLog
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

from millstream.gateway.observing.timing import BatchTiming
from millstream.services.traceparent import Trace

CANCELLED_STATUS = 499  # in place of an HTTP status: the caller went away
#: HTTP statuses for which a request counts as failed: overload, and errors of the server
FAILED_HTTP = frozenset({429, *range(500, 600)})
#: the same for gRPC: UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE, DATA_LOSS
FAILED_GRPC = frozenset({2, 4, 8, 13, 14, 15})
RUNS_MAX = 64  # runs of one call that are recorded
PATH_MAX = 1024  # characters of a path that are kept: a head may have 64 KiB, and thousands of requests wait

#: the inference requests that the current task began, for calls that are observed; None: not observed
TICKETS: ContextVar[list[Any] | None] = ContextVar("TICKETS", default=None)


class Run(NamedTuple):
    """An inference request of a call. Instants are seconds on the monotonic clock."""

    model: str
    version: str
    pool: str
    protocol: str
    rows: int
    arrival: float  # when it was admitted
    timing: BatchTiming | None  # of its last batch; None: it was in none


class Finished(NamedTuple):
    """A call that has its reply, or whose caller went away. Instants are seconds on the monotonic clock."""

    protocol: str  # http or grpc
    method: str  # of HTTP; of gRPC the method
    route: str  # template of the path; of gRPC the service; "": no route has the path
    path: str  # without the query, which may hold keys; its first PATH_MAX characters
    status: int  # of HTTP, or the number of gRPC's status code
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
        request = getattr(ticket, "ticket", ticket)  # of a request that was decoded in a thread
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
                )
            )
    return tuple(found)
