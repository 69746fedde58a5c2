"""Puts one request of a version that is being loaded: its worker takes it as soon as it serves the lane.

cold lane ─> one small request ahead ─> its stream ─(a worker has loaded the version)─> run ─> reply
Without this, a first call would wait until the gateway has read in the worker's record that the version is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.gateway.scheduling.lane_state import LaneState
from millstream.gateway.scheduling.pool_context import PoolContext
from millstream.gateway.scheduling.request import Request
from millstream.services.wire.batch import INLINE_BYTES_MAX

#: Cold lanes of a pool with a request ahead, in one gateway; beyond it requests wait in the gateway. The queue's
#: scripts look at each lane that has batches, also if no worker serves it.
EARLY_LANES_MAX = 16


class EarlyPut:
    """The request that one lane has ahead while no instance is ready.

    `served`: a worker has answered it, and no record that the gateway has read says that the version is ready.
    """

    __slots__ = ("_arrivals", "_context", "_put_at", "_state", "served")

    def __init__(self, state: LaneState, context: PoolContext) -> None:
        self.served = False
        self._state = state
        self._context = context
        self._arrivals: Sequence[float] = ()  # of the requests ahead whose wait for the load was not counted
        self._put_at = 0.0

    def allows(self, first: Request) -> bool:
        """Return whether `first`, which waits, may be put now: one at a time, and only what its entry contains."""
        context, lane = self._context, self._state
        if lane.failed is not None or not lane.alone or lane.in_flight:
            return False
        if not context.owner.reads_newest(lane.pool) or not lane.link.writable:
            return False
        if sum([tensor.size_bytes for tensor in first.inputs]) > INLINE_BYTES_MAX:
            return False
        early = context.early
        if len(early) >= EARLY_LANES_MAX:
            early.intersection_update([one for one in early if one.in_flight and not one.instances])
        return len(early) < EARLY_LANES_MAX

    def put(self, requests: Sequence[Request], now: float) -> None:
        """Note that these requests are put now."""
        self._context.early.add(self._state)
        self._put_at = now
        self._arrivals = [request.arrival for request in requests]

    def loaded(self, waiting: Iterable[float], now: float, *, ready: bool) -> list[float]:
        """Return for how many seconds requests waited for a load that has ended; [] if none has, or they are counted.

        Args:
            waiting: arrivals of the requests that wait in the gateway.
            now: the current instant.
            ready: whether the gateway reads now in a record that the version is ready.
        """
        lane = self._state
        if self.served:
            self.served = not ready
            return []
        answered = bool(self._arrivals) and not lane.in_flight and lane.replied_at >= self._put_at
        if not ready and not answered:
            return []
        waits = [now - arrival for arrival in (*self._arrivals, *waiting)]
        self._arrivals, self.served = (), not ready
        return waits

    def forget(self) -> None:
        """Forget what was put: no instance can serve."""
        self._arrivals, self.served = (), False
