"""The route of one version: its lanes, one per pool, and which of them requests try first.

snapshot, circuit ─> choose ─> `lane`: the first that can answer; requests leave lanes that cannot
a lane refuses a request ─> overflow ─> the next lane that takes it, or the refusal with the shortest wait
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

from millstream.gateway.placement.decision import PassedOn
from millstream.gateway.scheduling.batching.queue_policy import QueueRules
from millstream.gateway.scheduling.lane import OVERFLOWING, Lane
from millstream.gateway.scheduling.request import Request, Responder, RouteLane
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.output_options import Extensions
from millstream.services.errors import Code, Failure

log = logging.getLogger("millstream.lane")


class ModelRoute:
    """A version that takes requests: its lanes, and the parts that read requests and write replies.

    `lane`: requests are added to it; it passes those that it refuses on to the other lanes. `lanes`: one per pool, the
    preferred pool's first; of a composed version none.

    Args:
        decoder, responder: those of the fast path's protocol, which alone knows what its decoder takes and returns.
        rules: the queue rules that its lanes share; None: it needs none.
    """

    __slots__ = ("decoder", "extensions", "lane", "lanes", "plans", "responder", "rules", "timeout_s")

    def __init__(
        self,
        plans: InputPlans,
        extensions: Extensions,
        decoder: Any,
        responder: Responder,
        timeout_s: float,
        rules: QueueRules | None = None,
    ) -> None:
        self.lane: RouteLane
        self.lanes: tuple[Lane, ...] = ()
        self.plans = plans
        self.extensions = extensions
        self.decoder = decoder
        self.responder = responder
        self.timeout_s = timeout_s
        self.rules = rules

    def set_lanes(self, lanes: Sequence[Lane]) -> None:
        """Replace the lanes, at least one. Requests in lanes that are no longer there stay: `move_from` moves them."""
        added = not self.lanes or self.lane not in lanes
        self.lanes = tuple(lanes)
        for lane in lanes:
            lane.state.alone = len(lanes) == 1
        if added:
            self.lane = self._first()

    def choose(self) -> None:
        """Choose `lane` anew, and move requests to it from lanes that cannot answer them."""
        if not self.lanes:  # of a composed version
            return
        first = self._first()
        if first is not self.lane:
            log.info("%s: requests go to pool %s, no longer to %s", first.content_id, first.pool, self.lane.pool)
            self.lane = first
        if first.can_serve:
            for lane in self.lanes:
                if not lane.can_serve and not lane.idle:
                    _move(lane, first)

    def move_from(self, lane: Lane) -> None:
        """Move the requests of a lane that was removed from the route, but not what a worker still answers."""
        lane.state.alone = True
        _move(lane, self._first())

    def overflow(self, refused_by: Lane, request: Request, size_bytes: int, refusal: Failure) -> None:
        """Add a request that a lane refused to the next lane that takes it.

        Raises:
            Failure: no lane takes it: the refusal after which a retry makes sense soonest. MODEL: it is in quarantine.
        """
        passed_on = isinstance(refusal, PassedOn)
        for lane in self._after(refused_by):
            try:
                lane.take(request, size_bytes)
            except Failure as other:
                if other.code not in OVERFLOWING:
                    raise
                if isinstance(refusal, PassedOn) or _retry_s(other) < _retry_s(refusal):
                    refusal = other
            else:
                refused_by.metrics.overflowed(1)
                return
        if not passed_on or refusal.code is Code.OVERLOADED:  # the other pool loads it, for a later request
            raise refusal
        refused_by.take(request, size_bytes)

    def pass_on(self, refused_by: Lane, requests: Sequence[Request]) -> list[Request]:
        """Move requests that waited in a lane to the next one that takes them; return those that none takes."""
        left: list[Request] = []
        for request in requests:
            for lane in self._after(refused_by):
                try:
                    lane.check(request)
                except Failure:
                    continue
                lane.receive((request,))
                refused_by.metrics.overflowed(1)
                break
            else:
                left.append(request)
        return left

    def _first(self) -> Lane:
        """Return the first lane that can answer now, else the first whose pool has workers to load the version."""
        serving = next((lane for lane in self.lanes if lane.can_serve), None)
        if serving is not None:
            return serving
        loadable = next((lane for lane in self.lanes if lane.loadable), None)
        return loadable or next((lane for lane in self.lanes if not lane.refuses), self.lanes[0])

    def _after(self, refused_by: Lane) -> Iterator[Lane]:
        """Yield the other lanes: those that can answer now before those whose version must be loaded first."""
        others = [lane for lane in self.lanes if lane is not refused_by]
        yield from (lane for lane in others if lane.can_serve)
        yield from (lane for lane in others if not lane.can_serve and lane.has_workers)


def _move(lane: Lane, to: Lane) -> None:
    moved = lane.move_to(to)
    if moved:
        log.warning("%s: %d requests moved from pool %s to %s", lane.content_id, moved, lane.pool, to.pool)


def _retry_s(refusal: Failure) -> float:
    return math.inf if refusal.retry_after_s is None else refusal.retry_after_s
