"""A request on its way through the gateway, and who is told of its answer. Pure data.

An adapter builds a Request with its Responder; the lane answers it exactly once: with its batch, alone, or with a Failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Failure


class Request:
    """One caller's unit of work. Times are seconds on the monotonic clock of this process."""

    permit_bytes = 0
    done = False  # answered or cancelled
    taken = False  # left the lane in a batch
    counted = True  # False: a canary, which no metric of the users' requests shows
    level = 0  # these three: where the version says how its requests wait (millstream.gateway.scheduling.queue_policy)
    wait_until = 0.0
    answer_by = 0.0

    def __init__(
        self,
        inputs: Sequence[InputTensor],
        rows: int,
        priority: int,
        arrival: float,
        deadline: float,
        responder: Responder,
    ) -> None:
        self.inputs = inputs  # in the signature's order, one for every input; ABSENT for optional ones left out
        self.rows = rows  # dimension 0 of a batching version; 1 otherwise
        self.priority = priority  # 0: default; 1: highest; larger numbers come later
        self.arrival = arrival
        self.deadline = deadline
        self.responder = responder

    @property
    def id(self) -> str:
        """What its caller calls it; "" where it gave no name."""
        return ""


class Responder(Protocol):
    """Turns what came of requests into replies of a protocol. A method is called once for a request, and it is done then."""

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """All requests of a batch, which share this responder: what is alike in their replies is made once."""

    def answer_one(self, request: Request, reply: Reply) -> None: ...

    def fail(self, request: Request, failure: Failure) -> None: ...
