"""Runs inference for adapters that are coroutines: one await from the inputs to what the adapter reads from the reply.

find ─> ModelRoute ─> the adapter builds inputs with route.plans ─> call ─> lane ……… read(reply) ─> result of call
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from millstream.gateway.access.principal import CALLER
from millstream.gateway.connection.budgets import PERMIT, ReplyPermit
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.connection.infer_handler import EXCHANGE, Exchange
from millstream.gateway.observing.finished import RUNS_MAX, TICKETS, server_timing
from millstream.gateway.scheduling.load_report import HEADER, load_report, wanted_format
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.request import FORM, FORM_HEADER, Request, bill, said_of, served_by
from millstream.gateway.scheduling.streams import Stream, StreamRequest, StreamResponder
from millstream.gateway.tensors.examples import BodyWriter
from millstream.gateway.tensors.input_plans import Inputs
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import Outputs, OutputTensor, Reply, own_copies, size_of
from millstream.services.errors import Failure
from millstream.services.process.request_id import REQUEST_ID

T = TypeVar("T")


class RequestOptions(NamedTuple):
    """Options that a caller may set for one request."""

    timeout_s: float | None = None  # None: the version's own timeout
    priority: int = 0  # as in Request
    outputs: Sequence[int] | None = None  # as Request.wanted
    id: str = ""  # of the caller
    parameters: Mapping[str, Any] = MappingProxyType({})  # custom ones


DEFAULT_OPTIONS = RequestOptions()


class _Call(Request, Generic[T]):
    read: Callable[[Reply], T]
    permit: ReplyPermit | None
    answered: asyncio.Future[T]
    outputs: Sequence[int] | None
    options: RequestOptions

    @property
    def said(self) -> dict[str, Any]:
        return said_of(self.options.id, self.options.timeout_s, self.options.parameters)

    @property
    def wanted(self) -> Sequence[int] | None:
        return self.outputs

    def settle(self, reply: Reply) -> None:
        """Set the result of the call. `read` runs at once, since the tensors of a reply are views valid only now."""
        if self.answered.done():
            return
        try:
            if self.permit is not None:
                self.permit.take(size_of(reply))
            self.answered.set_result(self.read(reply))
        except Failure as failure:
            self.answered.set_exception(failure)
        except Exception as error:
            self.answered.set_exception(internal_failure("a reply could not be written", error))


class _Responder:
    """The responder of all calls of a protocol: each call has its own future."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        for request, reply in zip(requests, outputs.replies([request.rows for request in requests]), strict=True):
            cast("_Call[Any]", request).settle(reply)

    def answer_one(self, request: Request, reply: Reply) -> None:
        cast("_Call[Any]", request).settle(reply)

    def fail(self, request: Request, failure: Failure) -> None:
        answered = cast("_Call[Any]", request).answered
        if not answered.done():
            answered.set_exception(failure)


class Caller:
    """Runs the requests of one protocol.

    Args:
        protocol: under which metrics count the requests.
        find: returns the route of a model and version as written in a path (None: no version). Raises
            Failure(NOT_FOUND).
        timeout_s_max: the longest timeout; longer ones are cut to it.
        check: raises Failure(UNAUTHENTICATED, FORBIDDEN) if the caller of the current task may not run a model.
    """

    def __init__(
        self,
        protocol: str,
        find: Callable[[str, str | None], ModelRoute],
        timeout_s_max: float,
        check: Callable[[str], None],
    ) -> None:
        self._find = find
        self._check = check
        self._protocol = protocol
        self._timeout_s_max = timeout_s_max
        self._responder = _Responder(protocol)
        self._streams = StreamResponder(protocol)

    def find(self, model: str, version: str | None) -> ModelRoute:
        """Return the route of a model and version, which the caller may run. Raises Failure."""
        self._check(model)
        return self._find(model, version)

    def find_checked(self, model: str, version: str | None) -> ModelRoute:
        """Return the route of a model that the caller may run: the adapter has checked it. Raises Failure."""
        return self._find(model, version)

    @contextmanager
    def count_rejections(self, route: ModelRoute, write: BodyWriter | None = None) -> Iterator[None]:
        """Count a Failure raised in the block as a refused request of the route's version.

        `write`: the protocol's form of an example, which a refused caller gets; None: the caller gets none.
        """
        try:
            yield
        except Failure as failure:
            route.lane.record_rejection(self._protocol, failure.code)
            if write is not None:
                route.plans.advise(failure, write)
            raise

    def stream(
        self,
        route: ModelRoute,
        inputs: Inputs,
        size_bytes: int,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Stream:
        """Run `inputs`, and return the parts of the answer as they come; close it in the end.

        Of a version that answers at once, the answer is the only part. Raises Failure: the request was refused.
        """
        timeout_s = route.timeout_s if options.timeout_s is None else min(options.timeout_s, self._timeout_s_max)
        request = StreamRequest(
            inputs.tensors, inputs.rows, options.priority, time.monotonic(), timeout_s, self._streams, options.outputs
        )
        if not route.lane.manifest.streams:
            request.window = 0
        request.request_id = REQUEST_ID.get().encode()
        principal = CALLER.get()
        if principal is not None:
            bill(request, principal)
        try:
            route.lane.add(request, size_bytes, single=True)
        except Failure as failure:
            route.lane.record_rejection(self._protocol, failure.code)
            raise
        return request.stream

    async def call(
        self,
        route: ModelRoute,
        inputs: Sequence[InputTensor],
        rows: int,
        size_bytes: int,
        read: Callable[[Reply], T],
        options: RequestOptions = DEFAULT_OPTIONS,
        permit: ReplyPermit | None = None,
    ) -> T:
        """Run `inputs` and return `read` of the reply. Cancelling drops the request unless it has left the lane.

        Args:
            route: the version's route.
            inputs: the inputs, in the order of the version's signature.
            rows: the rows of the inputs.
            size_bytes: the size of the request, for admission.
            read: called in the event loop; must keep no view of the reply's tensors.
            options: timeout and priority.
            permit: counts the reply in the reply budget; None: the permit of the HTTP request that this task answers.

        Raises:
            Failure: the request was refused or failed.
        """
        now = time.monotonic()
        timeout_s = route.timeout_s if options.timeout_s is None else min(options.timeout_s, self._timeout_s_max)
        request: _Call[T] = _Call(inputs, rows, options.priority, now, now + timeout_s, self._responder)
        request.request_id = REQUEST_ID.get().encode()
        request.read = read
        request.outputs = options.outputs
        request.options = options
        request.permit = permit or PERMIT.get()
        principal = CALLER.get()
        if principal is not None:
            bill(request, principal)
        request.answered = asyncio.get_running_loop().create_future()
        tickets = TICKETS.get()
        if tickets is not None and len(tickets) < RUNS_MAX:
            tickets.append(request)
        try:
            route.lane.add(request, size_bytes, single=True)
        except Failure as failure:
            route.lane.record_rejection(self._protocol, failure.code)
            raise
        try:
            result = await request.answered
        except asyncio.CancelledError:
            request.lane.cancel(request)
            raise
        exchange = EXCHANGE.get()
        if exchange is not None:
            _describe(exchange, request)
        elif request.form:
            FORM.set(served_by(request).decode())
        return result


def _describe(exchange: Exchange, request: Request) -> None:
    """Add to the reply over HTTP how long the parts of the request took, and the load of its lane, if asked for."""
    if (request.timing is not None or request.steps) and (timing := server_timing(request, time.monotonic())):
        exchange.add(b"server-timing", timing)
    if request.form:
        exchange.add(FORM_HEADER, served_by(request))
    asked = exchange.headers.load_format
    wanted = None if asked is None else wanted_format(asked)
    if wanted is not None:
        exchange.add(HEADER, load_report(request.lane.load, wanted))


def caller_of(
    find: Callable[[str, str | None], ModelRoute], timeout_s_max: float, check: Callable[[str], None]
) -> Callable[[str], Caller]:
    """Return what makes the caller of each protocol, once. Arguments as of Caller."""
    return cache(lambda protocol: Caller(protocol, find, timeout_s_max, check))


async def infer_arrays(
    caller: Caller, route: ModelRoute, inputs: Inputs, options: RequestOptions = DEFAULT_OPTIONS
) -> list[OutputTensor]:
    """Run inputs and return copies of all outputs, in the signature's order. Raises Failure."""
    return await caller.call(route, inputs.tensors, inputs.rows, inputs.size_bytes, own_copies, options)
