"""The slowest and the failed calls of the last minutes of all gateways, while a console looks at them.

a console looks ─> `console_looked` in Redis (expires) ─> each gateway attaches its CallLog to the observer
Observer ─Finished─> CallLog ─> `console_calls` in Redis ─> merged: what a caller may see
Nobody looks: a gateway asks Redis once in IDLE_S, and requests cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from heapq import heappop, heappush, nlargest
from typing import Any

import orjson

from millstream.gateway.observing.finished import Finished, Run
from millstream.gateway.observing.observer import Wants
from millstream.gateway.parts import GatewayParts
from millstream.services.errors import Failure
from millstream.services.process.cancellation import cancel_all
from millstream.services.queue.limited_client import reaching_redis
from millstream.services.queue.url import async_client
from millstream.services.traceparent import Trace

log = logging.getLogger("millstream.console")

KEPT_S = 600.0
KEPT_MAX = 50  # of the slowest, of those that the server failed, and of those that it refused as invalid
_PERIOD_S = 60.0  # the slowest calls are kept for each period, so that they can be forgotten after KEPT_S
LOOKED_S = 600.0  # after the last look, calls are recorded for so long
IDLE_S, EXCHANGE_S = 15.0, 3.0  # between two looks at Redis, without and with somebody who looks


class CallLog:
    """Takes finished calls (gateway/observing/observer.py: CallSink), in the event loop. `gateway`: its name."""

    traces = False

    def __init__(self, gateway: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._clock = clock
        self._failed: deque[Finished] = deque(maxlen=KEPT_MAX)
        self._invalid: deque[Finished] = deque(maxlen=KEPT_MAX)  # a caller of many wrong ones hides no failed one
        self._slowest: dict[int, list[tuple[float, int, Finished]]] = {}  # heaps, by number of the period
        self._count = 0  # orders calls that took equally long
        self._slow_s, self._slow_until = 0.0, 0.0  # shorter calls are none of the slowest until then
        self.wants: Wants | None = self._wanted

    def _wanted(
        self, trace: Trace | None, seconds: float, now: float, *, failed: bool, invalid: bool, reads: bool
    ) -> bool:
        """Whether a call may be one of those that are kept. It runs for each call, so it builds nothing."""
        return seconds > self._slow_s or failed or (invalid and not reads) or now >= self._slow_until

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Forget all calls."""
        self._failed.clear()
        self._invalid.clear()
        self._slowest.clear()
        self._slow_s, self._slow_until = 0.0, 0.0

    def add(self, request: Finished) -> None:
        """Take a call."""
        if request.route.startswith("/console"):
            return
        if request.failed:
            self._failed.append(request)
        elif not _succeeded(request) and (request.runs or request.protocol != "http" or _model_of(request)):
            self._invalid.append(request)
        if not request.runs:
            return
        period = int(request.ended // _PERIOD_S)
        if period not in self._slowest:
            oldest = int((request.ended - KEPT_S) // _PERIOD_S)
            kept = {number: heap for number, heap in self._slowest.items() if number > oldest}
            self._slowest = kept | {period: []}
        heap = self._slowest[period]
        self._count += 1
        heappush(heap, (request.ended - request.started, self._count, request))
        if len(heap) > KEPT_MAX:
            heappop(heap)
            self._slow_s, self._slow_until = heap[0][0], (period + 1) * _PERIOD_S

    def document(self) -> dict[str, Any]:
        """Return the calls in JSON form."""
        now, at = self._clock(), time.time()  # noqa: TID251 - instants for people
        slow = [one for heap in self._slowest.values() for _, _, one in heap]

        def documents(calls: Iterable[Finished]) -> list[dict[str, Any]]:
            return [_document(one, at - now, self._gateway) for one in calls if now - one.ended < KEPT_S]

        slowest = nlargest(KEPT_MAX, slow, key=lambda one: one.ended - one.started)
        return {"at": at, "slowest": documents(slowest), "failed": documents([*self._failed, *self._invalid])}


def merged(documents: Iterable[dict[str, Any]], sees: Callable[[str], bool] | None) -> dict[str, Any]:
    """Return the calls of several gateways that a caller may see: the slowest, and the last that failed.

    `sees`: says of a model whether the caller may read it; None: the caller sees all calls, and who made them.
    """
    found: dict[str, list[dict[str, Any]]] = {"slowest": [], "failed": []}
    for document in documents:
        for name, calls in found.items():
            calls += document[name]
    if sees is not None:
        found = {
            name: [one | {"key": ""} for one in calls if one["models"] and all(map(sees, one["models"]))]
            for name, calls in found.items()
        }
    return {
        "slowest": nlargest(KEPT_MAX, found["slowest"], key=lambda one: float(one["seconds"])),
        "failed": nlargest(2 * KEPT_MAX, found["failed"], key=lambda one: float(one["at"])),
    }


def _succeeded(request: Finished) -> bool:
    return request.status < 400 if request.protocol == "http" else request.status == 0


def _model_of(request: Finished) -> str | None:
    """Return the model that the path of a call names."""
    named = zip(request.route.split("/"), request.path.split("/"), strict=False)
    return next((name for place, name in named if place == "{model}"), None)


def _document(request: Finished, epoch: float, gateway: str) -> dict[str, Any]:
    """Return a call in JSON form. `epoch`: what added to the monotonic clock gives seconds since the epoch."""
    named = _model_of(request)
    models = [run.model for run in request.runs] or ([] if named is None else [named])
    return {
        "at": request.started + epoch,
        "gateway": gateway,
        "protocol": request.protocol,
        "method": request.method,
        "route": request.route,
        "path": request.path,
        "status": request.status,
        "seconds": request.ended - request.started,
        "model": models[0] if models else None,
        "models": models,
        "version": request.runs[0].version if request.runs else None,
        "request_id": request.request_id,
        "key": request.key,
        "runs": [_run(one) for one in request.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    timing = run.timing
    header = None if timing is None else timing.header
    return {
        "model": run.model,
        "version": run.version,
        "step": run.step,
        "pool": run.pool,
        "rows": run.rows,
        "lane_s": None if timing is None else max(0.0, timing.put_at - run.arrival),
        "queue_s": None if header is None else max(0.0, header.queue_s),
        "run_s": None if header is None else header.input_s + header.infer_s + header.output_s,
    }


class CallShare:
    """What one gateway has of that. `start` and `stop` it in the event loop."""

    def __init__(self, parts: GatewayParts) -> None:
        self._gateway = parts.unique_name
        self._keys = parts.keys
        self._redis: Any = async_client(parts.address, retries=0)  # what is lost is told again soon
        self._observer = parts.observer
        self._log = CallLog(parts.name)
        self._since: float | None = None  # seconds since the epoch: calls are recorded from then on; None: they are not
        self._look = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="console calls")

    async def stop(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])
        await self._redis.aclose()

    def look(self) -> None:
        """Have calls recorded from now on, until LOOKED_S after the last look."""
        if self._since is None:
            self._record(time.time())  # noqa: TID251 - an instant for people
        self._look.set()

    async def calls(self, sees: Callable[[str], bool] | None) -> dict[str, Any]:
        """Return the slowest and the failed calls of all gateways that a caller may see (`merged`).

        `since`: they are recorded from then on, in seconds since the epoch. While Redis is away: of this gateway alone.
        """
        self.look()
        documents = [self._log.document()]
        with suppress(Failure):
            documents += await self._of_others()
        return merged(documents, sees) | {"since": self._since}

    async def _of_others(self) -> list[dict[str, Any]]:
        """Return what other gateways recorded. Raises Failure."""
        now, found = time.time(), []  # noqa: TID251 - the instants of calls are those of clocks for people
        with reaching_redis():
            stored = await self._redis.hgetall(self._keys.console_calls)
            for gateway, value in stored.items():
                document = orjson.loads(value)
                if abs(now - document["at"]) > LOOKED_S:  # it ended since
                    await self._redis.hdel(self._keys.console_calls, gateway)
                elif gateway.decode() != self._gateway:
                    found.append(document)
        return found

    async def _run(self) -> None:
        while True:
            try:
                await self._exchange()
            except Failure as failure:
                log.debug("calls were not exchanged with other gateways: %s", failure.message)
            except Exception:
                log.exception("calls could not be exchanged with other gateways; trying again")
            if self._since is not None:
                await asyncio.sleep(EXCHANGE_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._look.wait()

    async def _exchange(self) -> None:
        """Begin or end to record as others look, and tell what was recorded. Raises Failure."""
        looked, calls, life_s = self._keys.console_looked, self._keys.console_calls, round(LOOKED_S)
        pipeline = self._redis.pipeline(transaction=False)
        if self._look.is_set():
            self._look.clear()
            pipeline.set(looked, repr(self._since), nx=True)
            pipeline.expire(looked, life_s)
        if self._since is not None:
            pipeline.hset(calls, self._gateway, orjson.dumps(self._log.document()))
            pipeline.expire(calls, life_s)
        pipeline.get(looked)
        with reaching_redis():
            *_, since = await pipeline.execute()
        self._record(None if since is None else float(since))

    def _record(self, since: float | None) -> None:
        """Record calls, or stop to do so. `since`: the first look; None: the last one is too long ago."""
        if since is not None and self._since is None:
            self._observer.attach(self._log)
        elif since is None and self._since is not None:
            self._observer.detach(self._log)
            self._log.clear()
        self._since = since
