"""infer: bytes of a v2 infer request in, bytes of its reply out. Both HTTP adapters call this; it knows neither.

route look-up ─> decode ─> RestRequest ─> lane ……… RestResponder ─> HttpReply
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from gateway.inbound import Inbound
from gateway.infer_types import Cancel, InferHeaders
from gateway.lanes import Lanes
from gateway.refusals import error_reply, unexpected
from gateway.rest_responder import Done, RestRequest
from gateway.v2.compression import decompress
from gateway.v2.decode import parse_header_length
from services.errors import Failure

log = logging.getLogger("millrace.infer")


class _Deferred:
    """A request whose body is being decompressed in a thread."""

    __slots__ = ("cancelled", "ticket")

    def __init__(self) -> None:
        self.cancelled = False
        self.ticket: Cancel | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self.ticket is not None:
            self.ticket.cancel()


class _Nothing:
    """Already answered: nothing to cancel."""

    def cancel(self) -> None:
        return


_NOTHING = _Nothing()


class Infer:
    """The InferHandler of a gateway."""

    def __init__(self, lanes: Lanes, inbound: Inbound, body_bytes_max: int, timeout_s_max: float) -> None:
        self._lanes = lanes
        self._inbound = inbound
        self._body_bytes_max = body_bytes_max
        self._timeout_s_max = timeout_s_max
        self._tasks: set[asyncio.Future[None]] = set()

    def submit(self, model: str, version: str | None, headers: InferHeaders, body: bytes, done: Done) -> Cancel:
        """Take a request; `done` is called once, maybe before this returns."""
        encoding, accept_encoding, length = headers
        if encoding is not None and encoding != b"identity":
            return self._submit_packed(encoding, model, version, headers, body, done)
        route = self._lanes.routes.get((model, version))
        try:
            if route is None:
                route = self._lanes.find(model, version)
            lane = route.lane
            inputs, options = route.decoder.decode(body, None if length is None else parse_header_length(length))
            rows, _, _, _, timeout_s, priority, _, held_bytes = options
            timeout_s = route.timeout_s if timeout_s is None else min(timeout_s, self._timeout_s_max)
            now = time.monotonic()
            request = RestRequest(inputs, rows, priority, now, now + timeout_s, route.responder)
            request.options = options
            request.accept_encoding = accept_encoding
            request.done_with = done
            request.lane = lane
            lane.add(request, len(body) + held_bytes)
        except Failure as failure:
            if route is not None:
                route.lane.turned_away(failure.code)
            done(error_reply(failure))
            return _NOTHING
        except Exception as error:
            done(error_reply(unexpected(f"an infer request for {model!r}", error)))
            return _NOTHING
        return request

    def _submit_packed(
        self, encoding: bytes, model: str, version: str | None, headers: InferHeaders, body: bytes, done: Done
    ) -> Cancel:
        deferred = _Deferred()
        self._spawn(self._decompress(deferred, encoding, model, version, headers, body, done))
        return deferred

    async def _decompress(
        self,
        deferred: _Deferred,
        encoding: bytes,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes,
        done: Done,
    ) -> None:
        """In a thread: a small body can become a large one, and the neighbours must not wait for it."""
        failure = None
        try:
            with self._inbound.holding() as held:
                held.grow(len(body))  # what it becomes is bounded by the number of threads
                plain = await asyncio.to_thread(decompress, body, encoding, self._body_bytes_max)
        except Failure as error:
            failure = error
        except Exception as error:
            failure = unexpected("a body could not be decompressed", error)
        if deferred.cancelled:
            return
        if failure is not None:
            route = self._lanes.routes.get((model, version))
            if route is not None:
                route.lane.turned_away(failure.code)
            done(error_reply(failure))
        else:
            deferred.ticket = self.submit(model, version, headers._replace(content_encoding=None), plain, done)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
