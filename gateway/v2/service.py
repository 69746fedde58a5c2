"""Bytes of a v2 infer request in, bytes of its reply out. The fast path and the ASGI route both call it.

route look-up ─> decode ─> RestRequest ─> lane ……… RestResponder ─> HttpReply
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from millstream.gateway.access.principal import CALLER, Principal
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.error_reply import error_reply, internal_failure
from millstream.gateway.connection.infer_handler import Cancel, InferHeaders
from millstream.gateway.http.compression import decompress
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.request import bill
from millstream.gateway.scheduling.router import Codec, Router
from millstream.gateway.tensors.examples import infer_body
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.output_options import ClientRegions, Extensions, LabelledOutputs
from millstream.gateway.tensors.prepared import prepared_for
from millstream.gateway.v2.decode import V2Decoder, decode_prepared, parse_header_length
from millstream.gateway.v2.options import InferCall
from millstream.gateway.v2.responder import Done, RestRequest, RestResponder, V2Encoder
from millstream.services.errors import Code, Failure
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.model.manifest import Manifest
from millstream.services.model.version_files import overwritten, read_label_names
from millstream.services.process.request_id import request_context
from millstream.services.traceparent import Trace

log = logging.getLogger("millstream.infer")

#: a larger JSON document is decoded in a thread: decoding it would block the event loop
JSON_INLINE_BYTES_MAX = 256 * 1024
_DECODINGS_MAX = 3  # attempts to decode a request: its version may be replaced meanwhile


class _Deferred:
    """A request whose body is being decompressed or decoded, or whose inputs are being prepared."""

    __slots__ = (
        "body",
        "cancelled",
        "done",
        "headers",
        "model",
        "principal",
        "request_id",
        "ticket",
        "trace",
        "version",
    )

    def __init__(  # noqa: PLR0913 - as of `submit`
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes | memoryview,
        done: Done,
        request_id: bytes,
        principal: Principal | None,
        trace: Trace | None,
    ) -> None:
        self.model = model
        self.version = version
        self.headers = headers
        self.body = body
        self.done = done
        self.request_id = request_id
        self.principal = principal
        self.trace = trace
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

    `receive_budget`: bounds bodies that are decompressed or decoded in threads; `body_bytes_max`: of a decompressed
    body; `timeout_s_max`: the longest timeout that a request may set.
    """

    def __init__(
        self,
        router: Router,
        receive_budget: ReceiveBudget,
        body_bytes_max: int,
        timeout_s_max: float,
    ) -> None:
        self._router = router
        self._receive_budget = receive_budget
        self._body_bytes_max = body_bytes_max
        self._timeout_s_max = timeout_s_max
        self._tasks: set[asyncio.Future[None]] = set()

    def submit(  # noqa: PLR0913 - as in InferHandler
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes | memoryview,
        done: Done,
        request_id: bytes = b"",
        principal: Principal | None = None,
        trace: Trace | None = None,
    ) -> Cancel:
        """Submit a request and return its handle. `done` is called once with the reply, perhaps before that."""
        encoding, accept_encoding, length, _, _, load_format, _, traceparent = headers
        trace = trace or traceparent
        if encoding is not None and encoding != b"identity":
            return self._defer(_Deferred(model, version, headers, body, done, request_id, principal, trace))
        route = self._router.routes.get((model, version))
        try:
            if route is None:
                route = self._find(model, version, principal)
            header_bytes = None if length is None else parse_header_length(length)
            if len(body) > JSON_INLINE_BYTES_MAX and (header_bytes is None or header_bytes > JSON_INLINE_BYTES_MAX):
                return self._defer(_Deferred(model, version, headers, body, done, request_id, principal, trace))
            call = self._decode_for(principal, route, body, header_bytes)
            inputs, options = call
            rows, _, _, _, timeout_s, priority, _, shared_memory_bytes, _ = options
            timeout_s = route.timeout_s if timeout_s is None else min(timeout_s, self._timeout_s_max)
            now = time.monotonic()
            request = RestRequest(inputs, rows, priority, now, now + timeout_s, route.responder)
            request.options = options
            request.accept_encoding = accept_encoding
            request.done_with = done
            request.request_id = request_id
            if load_format is not None:
                request.load_format = load_format
            if principal is not None:
                bill(request, principal)
            route.lane.add(request, len(body) + shared_memory_bytes)
        except Failure as failure:
            if route is not None:
                if prepared_for(route.plans, failure, _raw(body, length)) is not None:
                    return self._defer(_Deferred(model, version, headers, body, done, request_id, principal, trace))
                with request_context(request_id, trace):
                    route.lane.record_rejection(RequestProtocol.V2, failure.code)
                route.plans.advise(failure, infer_body)
            done(error_reply(failure))
            return _ANSWERED
        except Exception as error:
            with request_context(request_id, trace):
                reply = error_reply(internal_failure(f"an infer request for {model!r}", error))
            done(reply)
            return _ANSWERED
        return request

    def _decode_for(
        self, principal: Principal | None, route: ModelRoute, body: bytes | memoryview, header_bytes: int | None
    ) -> InferCall:
        """Return the decoded request of `principal`, who may name the shared memory of its key. Raises Failure."""
        decoder: V2Decoder = route.decoder
        if principal is None:
            return decoder.decode(body, header_bytes)
        token = CALLER.set(principal)
        try:
            return decoder.decode(body, header_bytes)
        finally:
            CALLER.reset(token)

    def _find(self, model: str, version: str | None, principal: Principal | None) -> ModelRoute:
        """Return a route. Raises Failure, whose message names no model that `principal` may not know of."""
        token = CALLER.set(principal)
        try:
            return self._router.find(model, version)
        finally:
            CALLER.reset(token)

    def _defer(self, deferred: _Deferred) -> Cancel:
        """Submit a request that is compressed, is to be prepared, or has a large JSON document, decoded in a thread."""
        with request_context(deferred.request_id, deferred.trace):
            task = asyncio.ensure_future(self._read(deferred))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return deferred

    async def _read(self, deferred: _Deferred) -> None:
        arrival = time.monotonic()
        CALLER.set(deferred.principal)  # the task has the context of the connection
        try:
            with self._receive_budget.reserve() as reservation:
                reservation.grow(len(deferred.body))
                encoding = deferred.headers.content_encoding
                if encoding is not None and encoding != b"identity":  # a small body can have large content
                    deferred.body = await asyncio.to_thread(decompress, deferred.body, encoding, self._body_bytes_max)
                    reservation.resize(0)  # the bytes that were received are gone
                    reservation.grow(len(deferred.body))
                route, call = await self._decoded(deferred)
            if not deferred.cancelled:
                deferred.ticket = self._add(deferred, route, call, arrival)
        except Failure as failure:
            self._refused(deferred, failure)
        except Exception as error:
            self._refused(deferred, internal_failure(f"an infer request for {deferred.model!r}", error))

    async def _decoded(self, deferred: _Deferred) -> tuple[ModelRoute, InferCall]:
        """Return the decoded request, and the route that serves after it was decoded. Raises Failure."""
        model, version, body = deferred.model, deferred.version, deferred.body
        header_bytes = parse_header_length(deferred.headers.header_length)
        for _ in range(_DECODINGS_MAX):
            route = self._find(model, version, deferred.principal)
            call = await decode_prepared(route.plans, route.decoder, body, header_bytes)
            if self._find(model, version, deferred.principal) is route:
                return route, call
        raise Failure(Code.UNAVAILABLE, f"model '{model}' is being replaced: try again", retry_after_s=1)

    def _add(self, deferred: _Deferred, route: ModelRoute, call: InferCall, arrival: float) -> Cancel:
        """Add a deferred request to its lane. Raises Failure."""
        inputs, options = call
        timeout_s = route.timeout_s if options.timeout_s is None else min(options.timeout_s, self._timeout_s_max)
        request = RestRequest(inputs, options.rows, options.priority, arrival, arrival + timeout_s, route.responder)
        request.options = options
        request.accept_encoding = deferred.headers.accept_encoding
        request.done_with = deferred.done
        request.request_id = deferred.request_id
        request.load_format = deferred.headers.load_format
        if deferred.principal is not None:
            bill(request, deferred.principal)
        # Numbers may be larger in raw form than as text.
        size_bytes = max(len(deferred.body), sum(tensor.size_bytes for tensor in inputs))
        route.lane.add(request, size_bytes + options.shared_memory_bytes)
        return request

    def _refused(self, deferred: _Deferred, failure: Failure) -> None:
        if deferred.cancelled:
            return
        route = self._router.routes.get((deferred.model, deferred.version))
        if route is not None:
            route.lane.record_rejection(RequestProtocol.V2, failure.code)
            route.plans.advise(failure, infer_body)
        deferred.done(error_reply(failure))


def _raw(body: bytes | memoryview, header_length: bytes | None) -> bytes | memoryview:
    """Return a body that is one tensor without a JSON part; b"": it has one."""
    return body if header_length is not None and header_length.strip() == b"0" else b""


def v2_codec(
    folder_of: Callable[[str, int], Path],
    memory: ClientRegions | None,
    reply_budget: ReplyBudget,
    request_bytes_max: int,
    manifest: Manifest,
    plans: InputPlans,
) -> Codec:
    """Return the codec of a version, for the router, which opens the version's lane.

    `folder_of`: model and version -> the folder of its label files; `memory`: None where clients can register none;
    `request_bytes_max`: limit on a body, and on an input in shared memory.
    """
    labels: dict[str, tuple[str, ...]] = {}
    labelled = None
    failure = ""
    if files := manifest.config.labels:
        try:
            folder = folder_of(manifest.model, manifest.version)
            names = {path: read_label_names(folder, path, manifest.files) for path in set(files.values())}
            labels = {output: names[path] for output, path in files.items()}
            if (classes := manifest.config.classes) is not None:
                labelled = LabelledOutputs(manifest.signature, classes, labels[classes.output])
        except Failure as unreadable:
            failure = unreadable.message + overwritten(manifest)
            log.warning("version %s of %s: %s", manifest.version, manifest.model, failure)
    extensions = Extensions(manifest.answered, labels, memory, request_bytes_max, labelled)
    encoder = V2Encoder(manifest.model, manifest.version, manifest.answered, extensions)
    decoder = V2Decoder(plans, request_bytes_max, extensions)
    return Codec(extensions, decoder, RestResponder(encoder, reply_budget), failure)
