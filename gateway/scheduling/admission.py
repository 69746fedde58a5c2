"""Admits requests, or refuses them: 429 for a lane, 503 for a whole gateway.

request ─> LaneAdmission (waiting rows of one lane, time until the answer) ─> Admission (requests and bytes in flight)

The permit travels with the request as `permit_bytes` and is released exactly once, when the request is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.gateway.scheduling.batching.batcher import Batcher
from millstream.gateway.scheduling.batching.dispatch import DispatchPolicy
from millstream.gateway.scheduling.circuit import Circuit
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.lane_state import LaneState
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter, Gauge

CANNOT_SERVE_RETRY_S = 10.0  # hint to clients of a version that no worker tries again: operators take longer to mend it
RETRY_S_MIN = 1.0  # hint to clients of a version that a worker tries again now


class Admission:
    """Counts the requests and bytes in flight of one gateway. Refuses with UNAVAILABLE (503) when it is full.

    Args:
        requests_max: limit on the requests in flight.
        bytes_max: limit on the bytes of their messages.
        in_flight: shows the number of requests in flight.
        refused: counts refused requests.
    """

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


class LaneRefusal(Failure):
    """OVERLOADED: a lane refuses a request. `counter` counts it if no lane of another pool takes the request."""

    def __init__(self, message: str, retry_after_s: float, counter: Counter) -> None:
        super().__init__(Code.OVERLOADED, message, retry_after_s=retry_after_s)
        self.counter = counter


class LaneAdmission:
    """Refuses with OVERLOADED (429) when a lane is full, or would answer a request after its deadline.

    Args:
        state: of the lane.
        rows_waiting_max: limit on the waiting rows of the lane, unless one request has more.
        policy: the lane's batch sizes and estimates.
        batcher: the lane's waiting requests.
        circuit: refuses the version while it is open.
        quarantine: refuses requests that killed workers, or whose runs were endless.
        metrics: has the counters of refusals.
    """

    __slots__ = ("_batcher", "_circuit", "_metrics", "_policy", "_quarantine", "_rows_waiting_max", "_state")

    def __init__(
        self,
        state: LaneState,
        rows_waiting_max: int,
        policy: DispatchPolicy,
        batcher: Batcher,
        circuit: Circuit,
        quarantine: Quarantine,
        metrics: LaneMetrics,
    ) -> None:
        self._state = state
        self._circuit = circuit
        self._quarantine = quarantine
        self._rows_waiting_max = rows_waiting_max
        self._policy = policy
        self._batcher = batcher
        self._metrics = metrics

    def check(self, request: Request) -> None:
        """Raise LaneRefusal, with a time after which to retry, if the lane cannot take a request."""
        rows_waiting = self._batcher.rows
        if rows_waiting and rows_waiting + request.rows > self._rows_waiting_max:
            raise self._full(rows_waiting)
        # A cheap upper bound: the request waits behind all others for a full batch. If that is late, estimate exactly.
        policy = self._policy
        estimator = policy.estimator
        behind_s = rows_waiting // policy.batch_rows * estimator.step_s + estimator.full_s + estimator.margin_s
        # An idle lane refuses none: its answers correct the estimate.
        if max(estimator.free_at, request.arrival) + behind_s > request.deadline and (
            rows_waiting or self._state.in_flight
        ):
            self._check_time(request)

    def check_split(self, request: Request, rows_ahead: int) -> None:
        """Raise LaneRefusal, as `check` does, for a request of which one part after another enters the lane.

        `rows_ahead`: rows outside of the lane, its own included, that run before its last part.
        """
        rows_waiting = self._batcher.rows
        if rows_waiting and rows_waiting + self._policy.batch_rows > self._rows_waiting_max:
            raise self._full(rows_waiting)
        if rows_waiting or self._state.in_flight:
            self._check_time(request, rows_ahead)

    def check_served(self, request: Request) -> None:
        """Raise Failure: UNAVAILABLE (no instance can serve, or the circuit is open), MODEL (in quarantine)."""
        if self._state.failed is not None:
            raise self.cannot_serve()
        if self._circuit.open_until:
            self._circuit.check()
        if not self._quarantine.empty:
            self._quarantine.check(self._state.content_id, request)

    def cannot_serve(self) -> Failure:
        """Return the refusal of a version that no instance can serve. A worker says when it tries again, or none."""
        state = self._state
        left_s = state.retry_at - state.link.clock.now_ms() / 1000
        return Failure(
            Code.UNAVAILABLE,
            f"model '{state.manifest.model}' cannot serve: {state.failed}",
            retry_after_s=max(RETRY_S_MIN, left_s) if state.retry_at else CANNOT_SERVE_RETRY_S,
        )

    def _full(self, rows_waiting: int) -> LaneRefusal:
        return LaneRefusal(
            f"the queue of model '{self._state.manifest.model}' is full: {rows_waiting} rows wait; try again later",
            max(rows_waiting / self._policy.batch_rows * self._policy.estimator.step_s, 0.1),
            self._metrics.refused_full,
        )

    def _check_time(self, request: Request, rows_outside: int = 0) -> None:
        """Raise LaneRefusal if the request would be answered after its deadline, behind `rows_outside` more rows."""
        rows_ahead = self._batcher.rows_ahead(request.priority, request.deadline) + rows_outside
        late_s = self._policy.estimator.answer_at(rows_ahead, request) - request.deadline
        if late_s <= 0:
            return
        behind_s = request.deadline + late_s - request.arrival
        model = self._state.manifest.model
        raise LaneRefusal(
            f"model '{model}' would answer in about {behind_s:.3f} s, later than the request may wait",
            late_s,
            self._metrics.refused_late,
        )
