"""A batch that was put and has no reply yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.services.wire.batch import Place

if TYPE_CHECKING:
    from millstream.gateway.scheduling.lane import Lane


class InFlightBatch:
    """`put`: when, in seconds of the lane's clock. `run_s`: how long it runs by its lane's profile.

    `inputs`: those of its only request, kept after that was answered. `losses`: how often it, or its reply, was lost on its way before.
    """

    __slots__ = (
        "attempt",
        "earliest",
        "inputs",
        "lane",
        "latest",
        "losses",
        "name",
        "places",
        "put",
        "requests",
        "run_s",
    )

    def __init__(
        self,
        name: str,
        lane: Lane,
        requests: list[Request],
        places: list[Place],
        attempt: int,
        put: float,
        run_s: float,
        losses: int = 0,
    ) -> None:
        self.name = name
        self.lane = lane
        self.requests = requests
        self.places = places
        self.attempt = attempt
        self.put = put
        self.run_s = run_s
        self.losses = losses
        self.inputs: Sequence[InputTensor] = ()
        deadlines = [request.deadline for request in requests]
        self.earliest = min(deadlines)
        self.latest = max(deadlines)
