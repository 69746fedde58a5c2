"""A request on its way through the gateway, and the responder that takes its answer. Pure data.

An adapter builds a Request with its Responder. The lane answers it once: with its batch, alone, or with a Failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from millstream.gateway.access.principal import LIMITED, KeyCounters, Principal
from millstream.gateway.observing.timing import BatchTiming
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.access.limits import Account
from millstream.services.errors import Failure

if TYPE_CHECKING:
    from millstream.gateway.scheduling.lane import Lane
    from millstream.gateway.scheduling.split_requests import SplitRequest

LATE = "the deadline passed before the model answered"

#: What `served_by` says of the calling task's last request that a compiled form answered; for replies without headers.
FORM: ContextVar[str] = ContextVar("FORM", default="")
FORM_HEADER = b"millstream-form"  # of the reply over HTTP, and of the metadata that ends a gRPC call


class Request:
    """One caller's unit of work. Times are seconds on the monotonic clock of this process."""

    permit_bytes = 0  # what admission counts for it
    done = False  # answered or cancelled
    taken = False  # no longer waits: it left the lane in a batch, or expired
    request_id = b""  # X-Request-Id as the caller got it; b"": unknown
    timing: BatchTiming | None = None  # of its last batch; None: there was none, or timing is off
    form = ""  # key of the compiled form that answered; "": the version's own file
    counted = True  # False: a readiness probe, which the metrics of requests leave out
    part = False  # True: some rows of a request, which alone is admitted, counted and answered
    split: SplitRequest | None = None  # of a request that runs in parts until it is answered, and of its parts
    turn: float | None = None  # orders a part among the waiting requests; None: the deadline does
    level = 0  # priority level; a version's queue rules set this and the next two (scheduling/queue_policy.py)
    wait_until = 0.0  # end of the wait in the queue
    answer_by = 0.0  # deadline of the answer
    account: Account | None = None  # of its caller's key, which pays for its run; None: there is no limit
    key: KeyCounters | None = None  # of its caller's key; None: no key is needed
    lane: Lane  # that took it, or refused it last

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


def served_by(request: Request) -> bytes:
    """Return the value of FORM_HEADER: the compiled form that answered, with its version and pool."""
    lane = request.lane
    return f"{request.form}; version={lane.manifest.version}; pool={lane.pool}".encode()


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


class Responder(Protocol):
    """Turns answers into replies of a protocol. One method is called, once per request, after the request is done."""

    @property
    def protocol(self) -> str:
        """The label under which the metrics count the requests."""

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """Answer all requests of a batch. The common parts of their replies are made once."""

    def answer_one(self, request: Request, reply: Reply) -> None: ...

    def fail(self, request: Request, failure: Failure) -> None: ...
