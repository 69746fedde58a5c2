"""observed_infer: FastInfer with an observer. A gateway without observer has the plain class.

submit: instant, trace ─> lane ……… ended, gave_up: status, bytes, the lane's times ─> Observer.finish
"""

from __future__ import annotations

from time import monotonic
from typing import Any

import grpc

from millstream.gateway.grpc.connections.fast_call import FastCall
from millstream.gateway.grpc.fast_infer import FastInfer, InferRequest
from millstream.gateway.observing.finished import FAILED_GRPC, Finished
from millstream.gateway.observing.observer import Observer
from millstream.services.process.request_id import new_request_id
from millstream.services.traceparent import Trace

_SERVICE, _METHOD = "inference.GRPCInferenceService", "ModelInfer"
_PATH = f"/{_SERVICE}/{_METHOD}"


class ObservedInfer(FastInfer):
    """Passes each call to the observer when it ends. The other arguments are those of FastInfer.

    Args:
        observer: the gateway's.
    """

    def __init__(self, observer: Observer, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._observer = observer

    def trace_of(self, call: FastCall) -> Trace | None:
        """Return the trace that a call belongs to: its caller's, else a new one if traces are on."""
        return self._observer.trace(call.head.traceparent)

    def ended(self, request: InferRequest, status: grpc.StatusCode, reply_bytes: int) -> None:
        """Count and observe a request that was answered."""
        self._count(status)
        self._observe(request.call, request, request.trace, request.arrival, status, reply_bytes)

    def gave_up(self, call: FastCall, request: InferRequest | None = None) -> None:
        """Count and observe a call that ended without an answer."""
        self._count(grpc.StatusCode.CANCELLED)
        if request is None:
            self._observe(call, None, self.trace_of(call), monotonic() - call.age_s, grpc.StatusCode.CANCELLED, 0)
        else:
            self._observe(call, request, request.trace, request.arrival, grpc.StatusCode.CANCELLED, 0)

    def _observe(
        self,
        call: FastCall,
        request: InferRequest | None,
        trace: Trace | None,
        started: float,
        status: grpc.StatusCode,
        reply_bytes: int,
    ) -> None:
        ended = monotonic()
        number: int = status.value[0]
        takers = self._observer.takers(trace, started, ended, failed=number in FAILED_GRPC)
        if not takers:
            return
        finished = Finished(
            "grpc",
            _METHOD,
            _SERVICE,
            _PATH,
            number,
            started,
            ended,
            (new_request_id() if request is None else request.request_id).decode("ascii"),
            trace,
            call.address,
            reply_bytes,
        )
        self._observer.finish(takers, finished, () if request is None else (request,))
