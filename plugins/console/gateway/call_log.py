"""The slowest and the failed calls of the last minutes, while a console looks. Other calls cost a comparison."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappushpop, nlargest
from typing import Any

from millstream.gateway.observing.finished import Finished, Run
from millstream.gateway.observing.observer import Wants

KEPT_S = 600.0
KEPT_MAX = 50
_PERIOD_S = 60.0  # the slowest calls are kept for each period, so that they can be forgotten after KEPT_S


class CallLog:
    """Takes finished calls (gateway/observing/observer.py: CallSink), in the event loop."""

    wants: Wants | None = None

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: deque[Finished] = deque(maxlen=KEPT_MAX)
        self._slowest: dict[int, list[tuple[float, int, Finished]]] = {}  # heaps, by number of the period
        self._count = 0  # orders calls that took equally long

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Forget all calls."""
        self._failed.clear()
        self._slowest.clear()

    def add(self, request: Finished) -> None:
        """Take a call."""
        if request.route.startswith("/console"):
            return
        if request.failed or (request.runs and not _succeeded(request)):
            self._failed.append(request)
        if not request.runs:
            return
        period = int(request.ended // _PERIOD_S)
        heap = self._slowest.get(period)
        if heap is None:
            oldest = int((request.ended - KEPT_S) // _PERIOD_S)
            self._slowest = {number: kept for number, kept in self._slowest.items() if number > oldest}
            heap = self._slowest[period] = []
        self._count += 1
        entry = request.ended - request.started, self._count, request
        if len(heap) < KEPT_MAX:
            heap.append(entry)
            heap.sort()
        elif entry > heap[0]:
            heappushpop(heap, entry)

    def document(self, sees: Callable[[str], bool] | None) -> dict[str, Any]:
        """Return the calls that a caller may see.

        `sees`: says of a model whether the caller may read it; None: the caller sees all calls, and who made them.
        """
        now, at = self._clock(), time.time()  # noqa: TID251 - instants for people
        slowest = [one for heap in self._slowest.values() for _, _, one in heap]

        def shown(calls: Iterable[Finished]) -> list[Finished]:
            return [
                one
                for one in calls
                if now - one.ended < KEPT_S
                and (sees is None or (one.runs and all(sees(run.model) for run in one.runs)))
            ]

        def documents(calls: Iterable[Finished]) -> list[dict[str, Any]]:
            return [_document(one, at - now, with_key=sees is None) for one in calls]

        found = nlargest(KEPT_MAX, shown(slowest), key=lambda one: one.ended - one.started)
        return {"slowest": documents(found), "failed": documents(reversed(shown(self._failed)))}


def _succeeded(request: Finished) -> bool:
    return request.status < 400 if request.protocol == "http" else request.status == 0


def _document(request: Finished, epoch: float, *, with_key: bool) -> dict[str, Any]:
    """Return a call in JSON form. `epoch`: what added to the monotonic clock gives seconds since the epoch."""
    first = request.runs[0] if request.runs else None
    return {
        "at": request.started + epoch,
        "protocol": request.protocol,
        "method": request.method,
        "route": request.route,
        "path": request.path,
        "status": request.status,
        "seconds": request.ended - request.started,
        "model": None if first is None else first.model,
        "version": None if first is None else first.version,
        "request_id": request.request_id,
        "key": request.key if with_key else "",
        "runs": [_run(one) for one in request.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    timing = run.timing
    header = None if timing is None else timing.header
    return {
        "model": run.model,
        "version": run.version,
        "pool": run.pool,
        "rows": run.rows,
        "lane_s": None if timing is None else max(0.0, timing.put_at - run.arrival),
        "queue_s": None if header is None else max(0.0, header.queue_s),
        "run_s": None if header is None else header.input_s + header.infer_s + header.output_s,
    }
