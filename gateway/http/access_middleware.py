"""access_middleware: ends what the check of a key began, and writes changes to the audit log.

request ─> Visit ─> authorize fills it ─> route ─> head of the reply: audit entry of a change ─> leave
                                           └> end of the body: still allowed?
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.access.audit_trail import AuditTrail
from millstream.gateway.access.gate import Pass
from millstream.gateway.access.principal import CALLER, Principal
from millstream.services.access.audit_rules import Who
from millstream.services.access.table import Row
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
