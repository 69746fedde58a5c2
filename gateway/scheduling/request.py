"""A request on its way through the gateway, its permit to be in flight, and the responder that takes its answer.

An adapter builds a Request with its Responder. The lane answers it once: with its batch, alone, or with a Failure.
The permit travels with the request as `permit_bytes` and is released exactly once, when the request is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from millstream.gateway.access.principal import LIMITED, KeyCounters, Principal
from millstream.gateway.observing.finished import BatchTiming
from millstream.gateway.scheduling.load_report import LaneLoad
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.access.limits import Account
from millstream.services.errors import Code, Failure
from millstream.services.metrics.inference import Reason
from millstream.services.metrics.registry import Counter, Gauge
from millstream.services.model.manifest import Manifest
from millstream.services.wire.batch import ReplyHeader

LATE = "the deadline passed before the model answered"

#: What `served_by` says of the calling task's last request that a compiled form answered; for replies without headers.
FORM: ContextVar[str] = ContextVar("FORM", default="")
FORM_HEADER = b"millstream-form"  # in replies over HTTP, and in the metadata that ends a gRPC call


class Request:
    """One caller's unit of work. Times are seconds on the monotonic clock of this process."""

    permit_bytes = 0  # what admission counts for it
    done = False  # answered or cancelled
    taken = False  # no longer waits: it left the lane in a batch, or expired
    request_id = b""  # X-Request-Id as the caller got it; b"": unknown
    timing: BatchTiming | None = None  # its last batch's; None: there was none, or timing is off
    form = ""  # key of the compiled form that answered; "": the version's own file
    counted = True  # False: a readiness probe, which the metrics of requests leave out
    part = False  # True: some rows of a request, which alone is admitted, counted and answered
    split: Splitting | None = None  # a request in parts, and its parts, have it; and one that runs step by step
    turn: float | None = None  # orders a part among the waiting requests; None: the deadline does
    level = 0  # priority level; a version's queue rules set this and the next two (scheduling/queue_policy.py)
    wait_until = 0.0  # end of the wait in the queue
    answer_by = 0.0  # deadline of the answer
    account: Account | None = None  # the caller's key pays for the run; None: there is no limit
    key: KeyCounters | None = None  # counts for the caller's key; None: no key is needed
    steps: Sequence[Request] = ()  # those that ran for it, of a composed version
    step = ""  # of the request of a step: its name
    window = 0  # bytes of parts of its answer that may be on their way (streams.py); 0: it has one answer
    begun = False  # whether a part of its answer has come: it cannot run again
    lane: RequestLane  # the one that took it, or refused it last

    def __init__(
        self,
        inputs: Sequence[InputTensor],
        rows: int,
        priority: int,
        arrival: float,
        deadline: float,
        responder: Responder,
    ) -> None:
        self.inputs = inputs  # in the signature's order, one per input; ABSENT for optional inputs left out
        self.rows = rows  # dimension 0 of a batching version; 1 otherwise
        self.priority = priority  # 0: default; 1: highest; larger numbers come later
        self.arrival = arrival
        self.deadline = deadline
        self.responder = responder

    @property
    def id(self) -> str:
        """The request id from the caller; "" if the caller sent none."""
        return ""

    @property
    def said(self) -> dict[str, Any]:
        """What the caller said beside the tensors, for models that are told it: `id`, `timeout` in us, `parameters`."""
        return {}

    @property
    def late(self) -> str:
        """What its caller is told when its deadline passes."""
        return LATE

    @property
    def lost(self) -> str:
        """What its caller is told where its answer has begun and cannot go on."""
        return "the worker was lost"

    @property
    def wanted(self) -> Sequence[int] | None:
        """The outputs that the reply needs, by index; None: all but those that are only answered on request."""
        return None


def served_by(request: Request) -> bytes:
    """Return the value of FORM_HEADER: the compiled form that answered, with its version and pool."""
    lane = request.lane
    return f"{request.form}; version={lane.manifest.version}; pool={lane.pool}".encode()


def said_of(request_id: str, timeout_s: float | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what models are told of a request, without what is not set (Request.said)."""
    said = {"id": request_id, "timeout": round((timeout_s or 0.0) * 1e6), "parameters": dict(parameters)}
    return {key: value for key, value in said.items() if value}


def bill(request: Request, principal: Principal) -> None:
    """Charge the rows of a request to its caller's key, bound its priority, and have its run charged, too.

    Raises Failure: TOO_LARGE; LimitReached.
    """
    request.priority = principal.capped(request.priority)
    account = principal.account
    if account is not None:
        try:
            account.add_rows(request.rows, request.arrival)
        except Failure:
            principal.count(LIMITED)
            raise
        request.account = account
    principal.counters.rows.add(request.rows)
    request.key = principal.counters


class Admission:
    """Counts the requests and bytes in flight of one gateway. Refuses with UNAVAILABLE (503) when it is full."""

    __slots__ = ("_bytes_max", "_gauge", "_refused", "_requests_max", "bytes", "closed", "requests")

    def __init__(self, requests_max: int, bytes_max: int, in_flight: Gauge, refused: Counter) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._gauge = in_flight
        self._refused = refused
        self.requests = 0
        self.bytes = 0
        self.closed = False  # True while draining: requests in flight are answered, new ones refused

    def admit(self, request: Request, size_bytes: int) -> None:
        """Give a request its permit, or raise Failure(UNAVAILABLE) with a time after which to retry."""
        if self.requests >= self._requests_max or self.bytes + size_bytes > self._bytes_max or self.closed:
            if self.closed:
                self._refused.add()
                raise Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1)
            raise self._full()
        self.requests += 1
        self.bytes += size_bytes
        request.permit_bytes = size_bytes
        self._gauge.set(self.requests)

    def extend(self, request: Request, size_bytes: int) -> None:
        """Add bytes to the permit of a request, or raise Failure(UNAVAILABLE); a request alone may have any number."""
        if self.bytes + size_bytes > self._bytes_max and self.requests > 1:
            raise self._full()
        self.bytes += size_bytes
        request.permit_bytes += size_bytes

    def give_back(self, request: Request, size_bytes: int) -> None:
        """Take bytes off the permit of a request."""
        self.bytes -= size_bytes
        request.permit_bytes -= size_bytes

    def _full(self) -> Failure:
        self._refused.add()
        return Failure(
            Code.UNAVAILABLE,
            f"the gateway is full: {self.requests} requests of {self.bytes} bytes are in flight; try again later",
            retry_after_s=1,
        )

    def release(self, requests: Sequence[Request]) -> None:
        """Release the permits of requests."""
        self.requests -= len(requests)
        self.bytes -= sum([request.permit_bytes for request in requests])
        self._gauge.set(self.requests)


class RequestLane(Protocol):
    """The lane of a request, as the request's protocol sees it."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def pool(self) -> str: ...

    @property
    def load(self) -> LaneLoad:
        """What load balancers are told."""

    def cancel(self, request: Request) -> None:
        """Drop a request whose caller went away."""


class RunTimes(Protocol):
    """How long runs of a version take."""

    def run_s(self, rows: int) -> float:
        """Return the measured seconds of a run of `rows`; 0 while nothing was measured."""


class RouteLane(RequestLane, Protocol):
    """What takes the requests of a version: a lane, or what runs a composed version (scheduling/composed.py)."""

    @property
    def content_id(self) -> str: ...

    @property
    def can_serve(self) -> bool:
        """Whether it answers requests now."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""

    @property
    def policy(self) -> RunTimes:
        """What knows how long runs take."""

    def add(self, request: Request, size_bytes: int, *, single: bool = False) -> None:
        """Admit a request, or raise Failure."""

    def record_rejection(self, protocol: str, code: Code) -> None:
        """Count a request that was refused, or could not be read, before it was admitted."""

    def close(self, *, version_removed: bool = True) -> None:
        """Take no more requests: the version was removed."""


class Responder(Protocol):
    """Turns answers into replies of a protocol. One method is called, once per request, after the request is done."""

    @property
    def protocol(self) -> str:
        """The label under which the metrics count the requests."""

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """Answer all requests of a batch. The common parts of their replies are made once."""

    def answer_one(self, request: Request, reply: Reply) -> None: ...

    def fail(self, request: Request, failure: Failure) -> None: ...


class Splitting(Protocol):
    """How a request runs that needs several: in parts, or step by step."""

    def cancel(self) -> None:
        """Drop the request: its caller went away."""


class RequestInParts(Responder, Splitting, Protocol):
    """A request that runs in parts: the responder of its parts (split_requests.py).

    `whole`: the request. `next_row`: first row of the next part.
    """

    whole: Request
    next_row: int

    def fail(self, request: Request, failure: Failure, reason: Reason | None = None) -> None:
        """Fail the request, because a part of it failed. `reason`: as in Answers.fail."""


class Part(Request):
    """Some rows of a request. It has no permit and is not counted: its request is."""

    part = True
    split: RequestInParts
    ran: tuple[ReplyHeader, float, float]  # header of the reply to its batch; when that was put; when the reply came

    def __init__(self, split: RequestInParts, inputs: Sequence[InputTensor], rows: int, now: float) -> None:
        whole = split.whole
        super().__init__(inputs, rows, whole.priority, now, whole.deadline, split)
        self.split = split
        self.lane = whole.lane
        self.first_row = split.next_row
        timeout_s = min(whole.deadline - whole.arrival, whole.lane.manifest.config.timeout_ms_default / 1000)
        self.turn = now + timeout_s  # a long timeout is no reason to let each part wait long
        self.request_id = whole.request_id
        self.account, self.key = whole.account, whole.key
        self.level, self.answer_by = whole.level, whole.answer_by
        self.wait_until = min(whole.answer_by, now + whole.wait_until - whole.arrival)
        self.permit_bytes = sum([tensor.size_bytes for tensor in inputs])  # bounds the bytes of its batch

    @property
    def said(self) -> dict[str, Any]:
        return self.split.whole.said
