"""What all routes have in common: refusals of web pages of other origins and of ambiguous paths, the end of
a key's limits, the audit log, counts of replies, and the reply budget.

request ─> Visit ─> authorize fills it ─> route ─> head of the reply: audit entry of a change ─> leave
                                           └> end of the body: still allowed?
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.access.audit_trail import AuditTrail
from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate, Pass
from millstream.gateway.access.principal import CALLER, Principal
from millstream.gateway.connection.budgets import PERMIT, ReplyBudget, ReplyPermit
from millstream.gateway.connection.exchange import METHOD
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.http.errors import ErrorReplies, slash_fault
from millstream.services.access.audit_log import Who
from millstream.services.access.scopes import Row
from millstream.services.process.audit import CHANGES, Changes

_VISIT = "millstream.visit"  # key of a scope


class Visit:
    """One call: who makes it and what it needs, as far as it is known."""

    __slots__ = ("check_still", "label", "passed", "principal", "row", "what")

    def __init__(self) -> None:
        self.row: Row | None = None
        self.what = ""  # name of the route
        self.label = ""  # who calls, without a principal
        self.principal: Principal | None = None
        self.passed: Pass | None = None
        #: raises Failure if the caller may not make the call any more; None: it was not checked yet, or needs no key
        self.check_still: Callable[[], None] | None = None


def visit_of(scope: Scope) -> Visit:
    """Return the visit of a request."""
    visit = scope.get(_VISIT)
    if visit is None:
        visit = scope[_VISIT] = Visit()
    assert isinstance(visit, Visit)
    return visit


class AccessMiddleware:
    """ASGI middleware: makes the visit of a request, and ends it.

    Args:
        audit: writes the entries.
    """

    def __init__(self, app: ASGIApp, audit: AuditTrail) -> None:
        self.app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = visit_of(scope)
        token = CHANGES.set(Changes())
        CALLER.set(None)  # the task of a pipelined request has the context of the request before

        async def received() -> Message:
            message = await receive()
            # A body may take as long as its sender likes: the key may have been revoked or changed meanwhile.
            if visit.check_still is not None and message["type"] == "http.request" and not message.get("more_body"):
                visit.check_still()
            return message

        async def audited(message: Message) -> None:
            if message["type"] == "http.response.start" and visit.row is not None and visit.row.changes:
                await self._write(scope, visit, message["status"])
            await send(message)

        try:
            await self.app(scope, received, audited)
        finally:
            CHANGES.reset(token)
            if visit.passed is not None:
                visit.passed.leave()

    async def _write(self, scope: Scope, visit: Visit, status: int) -> None:
        principal = visit.principal
        if status in {401, 403, 429} and principal is None:
            return  # anybody can make such calls
        client = scope.get("client")
        label, key_id = (visit.label, "") if principal is None else (principal.label, principal.key_id)
        who = Who(label, key_id, "" if client is None else client[0])
        target = f"{scope['method']} {scope['path']}"
        await self._audit.write(who, visit.what, target, status, CHANGES.get() or Changes(), refused=status >= 400)


class BrowserMiddleware:
    """ASGI middleware: asks the guard before any route runs. The fast path asks it for its own requests.

    Args:
        guard: refuses requests.
        gate: checks keys: a call with a right one passes.
        replies: writes the refusals, in the form of the path's protocol.
        is_keyless: whether calls of a path need no key even where there are keys.
    """

    def __init__(
        self, app: ASGIApp, guard: BrowserGuard, gate: Gate, replies: ErrorReplies, is_keyless: Callable[[str], bool]
    ) -> None:
        self.app = app
        self._guard = guard
        self._gate = gate
        self._replies = replies
        self._is_keyless = is_keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers, path = scope["headers"], scope["path"]
            credential = InferHeaders.read(headers).credential
            keyless = self._is_keyless(path)
            failure = slash_fault(path, scope.get("raw_path") or b"") or self._guard.refusal(
                scope["method"], dict(headers), self._gate, credential, keyless=keyless
            )
            if failure is not None:
                await self._replies.reply_failure(path, failure)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class CountReplies:
    """Counts a reply when its head is sent. `counts` are the gateway's counters."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self.app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The router sets the route while the request runs; a path without one leaves the key out.
                route = getattr(scope.get("route"), "path_format", None)
                self._counts.add(route, scope.get(METHOD, scope["method"]), message["status"])
            await send(message)

        await self.app(scope, receive, counted)


class ReplyBudgetMiddleware:
    """Counts a reply from the arrival of its tensors until the server has taken the reply written from them.

    Args:
        reply_budget: the gateway's reply budget.
    """

    def __init__(self, app: ASGIApp, reply_budget: ReplyBudget) -> None:
        self.app = app
        self._reply_budget = reply_budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        permit = ReplyPermit(self._reply_budget)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.body":
                permit.resize(len(message.get("body", b"")))
            await send(message)

        token = PERMIT.set(permit)
        try:
            await self.app(scope, receive, counted)
        finally:
            PERMIT.reset(token)
            permit.release()
