"""What stands around the handlers of gRPC methods: keys are checked by the authorisation table, changes are written to
the audit log, and finished calls are passed to the observer, if the gateway has one.

metadata ─> Gate ─> Principal ─> row of the table ─> (message: its model) ─> handler ─> audit entry of a change ─> reply
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from urllib.parse import unquote

import grpc

from millstream.gateway.access.audit_trail import AuditTrail
from millstream.gateway.access.gate import Gate, Pass
from millstream.gateway.access.principal import CALLER, Principal, caller_name
from millstream.gateway.grpc.codec.messages import BEFORE_REFUSAL, Messages
from millstream.gateway.grpc.connections.call_head import credential_of
from millstream.gateway.observing.finished import FAILED_GRPC, TICKETS, Finished
from millstream.gateway.observing.observer import Observer
from millstream.services.access.audit_log import AuditLog, Who
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import GRPC_STATUS, Code, Failure
from millstream.services.process.audit import CHANGES, Changes, acting, concerns
from millstream.services.process.request_id import REQUEST_ID, TRACE
from millstream.services.traceparent import usable_traceparent

Handle = Callable[[Any, Any], Awaitable[Any]]
_REFUSED = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"})


class CallGuard:
    """The check of all calls of one gateway.

    Args:
        gate: checks keys.
        messages: ends refused calls.
        audit: the audit log.
        count_refusal: counts a refused call, for the log.
    """

    def __init__(self, gate: Gate, messages: Messages, audit: AuditLog, count_refusal: Callable[[str], None]) -> None:
        self._gate = gate
        self._messages = messages
        self._audit = AuditTrail(audit)
        self._count_refusal = count_refusal

    async def close(self) -> None:
        """Write what the audit log still has to say, because the gateway stops."""
        await self._audit.close()

    def checked(self, method: str, row: Row, handle: Handle, *, counted: bool) -> Handle:
        """Return a handler that checks each call before `handle`.

        Args:
            method: its full name.
            row: what its calls need.
            handle: the handler.
            counted: whether a call is one request.
        """
        if row.need is Need.OPEN:
            return handle
        gate = self._gate
        unread = row if row.of_message is None else row._replace(changes=False)  # `check_message` checks the rest

        async def call(requests: Any, context: Any) -> Any:
            if gate.is_open(unread):
                if row.changes:
                    return await self._audited(method, row, handle, requests, context)
                return await handle(requests, context)
            try:
                passed = self._let_in(context, row, counted=counted)
            except Failure as failure:
                if failure.code is not Code.OVERLOADED:
                    self._count_refusal("not_authorized")
                self._messages.call(context)
                await self._messages.refuse(context, failure)
            try:
                if row.changes:
                    return await self._audited(method, row, handle, requests, context)
                return await handle(requests, context)
            finally:
                if passed is not None:
                    passed.leave()

        return call

    def _let_in(self, context: Any, row: Row, *, counted: bool) -> Pass | None:
        """Check a call; None: nothing counts its end. Raises Failure: UNAUTHENTICATED, FORBIDDEN; LimitReached."""
        principal = _identify(self._gate, context, row)
        principal.require(row.need)
        return self._gate.let_in(principal) if counted else None

    async def _audited(self, method: str, row: Row, handle: Handle, requests: Any, context: Any) -> Any:
        """Handle a call and write its entry: before its reply, unless something else than the handler ends the call."""
        changes = Changes()
        written = False

        async def write(code: str) -> None:
            nonlocal written
            await self._write(method, row, context, CALLER.get(), code, changes)
            written = True

        async def before_refusal(failure: Failure) -> None:
            await write(GRPC_STATUS[failure.code])

        tokens = CHANGES.set(changes), BEFORE_REFUSAL.set(before_refusal)
        code: Any = grpc.StatusCode.OK
        try:
            return await handle(requests, context)
        except BaseException:
            code = context.code() or grpc.StatusCode.UNKNOWN
            raise
        finally:
            CHANGES.reset(tokens[0])
            BEFORE_REFUSAL.reset(tokens[1])
            if not written:
                await write(getattr(code, "name", str(code)))

    async def _write(
        self, method: str, row: Row, context: Any, principal: Principal | None, code: str, changes: Changes
    ) -> None:
        what = method.rpartition("/")[2]
        if row.of_message is not None and code == "OK" and not changes.texts:
            return  # it only read
        if code in _REFUSED and principal is None:
            return  # anybody can make such calls
        label, key_id = ("", "") if principal is None else (principal.label, principal.key_id)
        who = Who(label, key_id, unquote(context.peer()))
        await self._audit.write(who, what, method, code, changes, refused=code != "OK")


def _identify(gate: Gate, context: Any, row: Row) -> Principal:
    """Return who calls, and make it the caller of the current task. Raises Failure(UNAUTHENTICATED)."""
    metadata = context.invocation_metadata() or ()
    sent = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in metadata]
    principal = gate.identify(credential_of(sent), row)
    CALLER.set(principal)
    acting(unquote(context.peer()), principal.label)
    return principal


def check_message(gate: Gate, row: Row, request: Any, context: Any) -> None:
    """Check that the caller of the current task may make a call whose message has been read.

    Raises Failure: UNAUTHENTICATED, FORBIDDEN.
    """
    row = row.for_message(request)
    model = "" if row.model is None else attrgetter(row.model)(request)
    concerns(model)
    principal = CALLER.get()
    if principal is None:
        if gate.is_open(row):
            return
        principal = _identify(gate, context, row)
    gate.check_still(principal, row, model or None)


class ObservedCalls:
    """Passes finished calls to the observer.

    Of a stream each inference request is observed, not the stream itself: its end may be days away.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    @property
    def active(self) -> bool:
        """Whether anything takes calls."""
        return self._observer.active

    def observed(self, service: str, method: str, handle: Handle) -> Handle:
        """Return a handler of unary calls that observes each."""

        async def call(requests: Any, context: Any) -> Any:
            if not self._observer.active:
                return await handle(requests, context)
            with self.call(service, method, context) as reply_bytes:
                reply = await handle(requests, context)
                reply_bytes.append(len(reply))
                return reply

        return call

    @contextmanager
    def call(self, service: str, method: str, context: Any) -> Iterator[list[int]]:
        """Observe a call, or a request of a stream, while the block runs. It appends the bytes of the reply."""
        started = time.monotonic()
        trace = self._observer.trace(_sent(context))
        TRACE.set(trace)
        tickets: list[Any] = []
        TICKETS.set(tickets)
        reply_bytes: list[int] = []
        status = 0
        try:
            yield reply_bytes
        except BaseException as error:
            status = status_of(error, context).value[0]
            raise
        finally:
            ended = time.monotonic()
            takers = self._observer.takers(trace, started, ended, failed=status in FAILED_GRPC, invalid=status > 1)
            if takers:
                finished = Finished(
                    "grpc",
                    method,
                    service,
                    f"/{service}/{method}",
                    status,
                    started,
                    ended,
                    REQUEST_ID.get(),
                    trace,
                    _address_of(context.peer()),
                    sum(reply_bytes),
                    caller_name(),
                )
                self._observer.finish(takers, finished, tickets)


def _sent(context: Any) -> bytes | None:
    sent = None
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            sent = usable_traceparent(value.encode())
    return sent


def _address_of(peer: str) -> str:
    """Return the address in the library's name of a peer: `ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5` or `unix:`."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in {"ipv4", "ipv6"} else kind


#: by the number and by the code itself: the library's contexts return either
_CODES = {key: code for code in grpc.StatusCode for key in (code, code.value[0])}


def status_of(error: BaseException, context: Any) -> grpc.StatusCode:
    """Return the status of a call whose handler ended with `error`."""
    if isinstance(error, Failure):
        return grpc.StatusCode[GRPC_STATUS[error.code]]
    if isinstance(error, grpc.aio.AbortError):
        return _CODES.get(context.code(), grpc.StatusCode.UNKNOWN)
    cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return grpc.StatusCode.CANCELLED if cancelled else grpc.StatusCode.UNKNOWN
