"""service: bytes of a v2 infer request in, bytes of its reply out. The fast path and the ASGI route both call it.

route look-up ─> decode ─> RestRequest ─> lane ……… RestResponder ─> HttpReply
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from millstream.gateway.connection.error_reply import error_reply, internal_failure
from millstream.gateway.connection.infer_handler import Cancel, InferHeaders
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.protocols.http.compression import decompress
from millstream.gateway.protocols.v2.decode import InferCall, parse_header_length
from millstream.gateway.protocols.v2.example import infer_body
from millstream.gateway.protocols.v2.responder import Done, RestRequest
from millstream.gateway.scheduling.router import ModelRoute, Router
from millstream.services.errors import Code, Failure
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.process.offload import run_in_thread_if_large

log = logging.getLogger("millstream.infer")

#: a larger JSON document is decoded in a thread: decoding it would block the event loop
JSON_INLINE_BYTES_MAX = 256 * 1024
_DECODINGS_MAX = 3  # attempts to decode a request: its version may be replaced meanwhile


class _Deferred:
    """A request whose body is being decompressed or decoded in a thread."""

    __slots__ = ("cancelled", "ticket")

    def __init__(self) -> None:
        self.cancelled = False
        self.ticket: Cancel | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self.ticket is not None:
            self.ticket.cancel()


class _AnsweredHandle:
    """The handle on a request that is already answered."""

    def cancel(self) -> None:
        return


_ANSWERED = _AnsweredHandle()


class InferService:
    """The InferHandler of a gateway.

    Args:
        router: finds the route of a request.
        receive_budget: bounds bodies that are decompressed or decoded in threads.
        body_bytes_max: limit on a decompressed body.
        timeout_s_max: the longest timeout that a request may set.
    """

    def __init__(
        self, router: Router, receive_budget: ReceiveBudget, body_bytes_max: int, timeout_s_max: float
    ) -> None:
        self._router = router
        self._receive_budget = receive_budget
        self._body_bytes_max = body_bytes_max
        self._timeout_s_max = timeout_s_max
        self._tasks: set[asyncio.Future[None]] = set()

    def submit(self, model: str, version: str | None, headers: InferHeaders, body: bytes, done: Done) -> Cancel:
        """Submit a request and return its handle. `done` is called once with the reply, perhaps before that."""
        encoding, accept_encoding, length = headers
        if encoding is not None and encoding != b"identity":
            return self._submit_compressed(encoding, model, version, headers, body, done)
        route = self._router.routes.get((model, version))
        try:
            if route is None:
                route = self._router.find(model, version)
            header_bytes = None if length is None else parse_header_length(length)
            if len(body) > JSON_INLINE_BYTES_MAX and (header_bytes is None or header_bytes > JSON_INLINE_BYTES_MAX):
                return self._submit_large(model, version, header_bytes, accept_encoding, body, done)
            lane = route.lane
            call: InferCall = route.decoder.decode(body, header_bytes)
            inputs, options = call
            rows, _, _, _, timeout_s, priority, _, shared_memory_bytes = options
            timeout_s = route.timeout_s if timeout_s is None else min(timeout_s, self._timeout_s_max)
            now = time.monotonic()
            request = RestRequest(inputs, rows, priority, now, now + timeout_s, route.responder)
            request.options = options
            request.accept_encoding = accept_encoding
            request.done_with = done
            request.lane = lane
            lane.add(request, len(body) + shared_memory_bytes)
        except Failure as failure:
            if route is not None:
                route.lane.record_rejection(RequestProtocol.V2, failure.code)
                route.plans.advise(failure, infer_body)
            done(error_reply(failure))
            return _ANSWERED
        except Exception as error:
            done(error_reply(internal_failure(f"an infer request for {model!r}", error)))
            return _ANSWERED
        return request

    def _submit_large(
        self,
        model: str,
        version: str | None,
        header_bytes: int | None,
        accept_encoding: bytes | None,
        body: bytes,
        done: Done,
    ) -> Cancel:
        """Submit a request whose large JSON document is decoded in a thread."""
        arrival = time.monotonic()
        deferred = _Deferred()

        async def read() -> None:
            try:
                with self._receive_budget.reserve() as reservation:
                    reservation.grow(len(body))
                    route, call = await self._decoded(model, version, body, header_bytes)
                if not deferred.cancelled:
                    deferred.ticket = self._add(route, call, len(body), arrival, accept_encoding, done)
            except Failure as failure:
                self._refused(deferred, model, version, failure, done)
            except Exception as error:
                self._refused(
                    deferred, model, version, internal_failure(f"an infer request for {model!r}", error), done
                )

        self._spawn(read())
        return deferred

    async def _decoded(
        self, model: str, version: str | None, body: bytes, header_bytes: int | None
    ) -> tuple[ModelRoute, InferCall]:
        """Return the request in `body`, and the route that serves after it was decoded. Raises Failure."""
        for _ in range(_DECODINGS_MAX):
            route = self._router.find(model, version)
            call = await run_in_thread_if_large(len(body), route.decoder.decode, body, header_bytes)
            if self._router.find(model, version) is route:
                return route, call
        raise Failure(Code.UNAVAILABLE, f"model '{model}' is being replaced: try again", retry_after_s=1)

    def _add(
        self,
        route: ModelRoute,
        call: InferCall,
        body_bytes: int,
        arrival: float,
        accept_encoding: bytes | None,
        done: Done,
    ) -> Cancel:
        """Add a request that was decoded in a thread to its lane. Raises Failure."""
        inputs, options = call
        timeout_s = route.timeout_s if options.timeout_s is None else min(options.timeout_s, self._timeout_s_max)
        request = RestRequest(inputs, options.rows, options.priority, arrival, arrival + timeout_s, route.responder)
        request.options = options
        request.accept_encoding = accept_encoding
        request.done_with = done
        request.lane = route.lane
        # Numbers may be larger in raw form than as text.
        size_bytes = max(body_bytes, sum(tensor.size_bytes for tensor in inputs))
        route.lane.add(request, size_bytes + options.shared_memory_bytes)
        return request

    def _refused(self, deferred: _Deferred, model: str, version: str | None, failure: Failure, done: Done) -> None:
        if deferred.cancelled:
            return
        route = self._router.routes.get((model, version))
        if route is not None:
            route.lane.record_rejection(RequestProtocol.V2, failure.code)
            route.plans.advise(failure, infer_body)
        done(error_reply(failure))

    def _submit_compressed(
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
        """Decompress the body in a thread, because a small body can have large content, and submit the request."""
        failure = None
        try:
            with self._receive_budget.reserve() as reservation:
                reservation.grow(len(body))  # decompressed bodies are bounded by the number of threads
                plain = await asyncio.to_thread(decompress, body, encoding, self._body_bytes_max)
        except Failure as error:
            failure = error
        except Exception as error:
            failure = internal_failure("a body could not be decompressed", error)
        if failure is not None:
            self._refused(deferred, model, version, failure, done)
        elif not deferred.cancelled:
            deferred.ticket = self.submit(model, version, headers._replace(content_encoding=None), plain, done)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
