"""Decides who may call a route, by the authorisation table, and does what all routes have in common.

That is: refusals of web pages of other origins and of ambiguous paths, the end of a key's limits, the audit log, counts
of replies, the reply budget, and the reply to a defect.

request ─> Visit ─> authorize fills it ─> route ─> head of the reply: audit entry of a change, count ─> leave
                                           └> end of the body: still allowed?
authorize: row of the table ─> open to anybody? ─no─> credential ─> Gate ─> Principal ─> Pass, which CallMiddleware ends

No address is an identity: a proxy on this machine passes on calls of others. Operators on this machine send the token
of the home (services/local_token.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi import Request
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.access.audit_trail import AuditTrail
from millstream.gateway.access.gate import Pass
from millstream.gateway.access.principal import CALLER, Principal
from millstream.gateway.connection.budgets import PERMIT, ReplyPermit
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.connection.infer_handler import METHOD, InferHeaders
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import ErrorReplies, slash_fault
from millstream.services.access.audit_log import Who
from millstream.services.access.scopes import Row, Rows
from millstream.services.errors import Code, Failure
from millstream.services.plugin.registry import contributions
from millstream.services.process.audit import CHANGES, Changes, acting, concerns
from millstream.services.settings import Settings

_Check = Callable[[Request, Deps, bytes, Row], Awaitable[Principal]]


@dataclass(frozen=True, slots=True)
class Credentials:
    """How callers of a platform are known that have no key of ours: the contribution `credentials`.

    Args:
        recognises: whether a header Authorization is of this kind.
        check: returns who sent it. Raises Failure(UNAUTHENTICATED).
        platform: returns who calls a path without any header, where the settings say that the platform alone can.
    """

    recognises: Callable[[bytes], bool]
    check: _Check
    platform: Callable[[Settings, str], Principal | None]


#: documents that routes need a key; `authorize` checks it
bearer = HTTPBearer(
    auto_error=False,
    scheme_name="key",
    description="An API key with the scope that the operation needs, MILLSTREAM_ADMIN_KEY, or the token in `run/token` "
    "of the server's home.",
)


def authorize_by(rows: Rows) -> Callable[[Request, Deps], Coroutine[Any, Any, None]]:
    """Return the dependency of an adapter's routes: it checks each call by the adapter's rows.

    It raises Failure: UNAUTHENTICATED, FORBIDDEN, OVERLOADED (a limit of the key); FORBIDDEN for a route without a row.
    """

    async def authorize(request: Request, deps: DepsOf) -> None:
        route = request.scope.get("route")
        path, name = getattr(route, "path_format", None), getattr(route, "name", None)
        row = rows.get((request.method, path or ""))
        if row is None:
            raise Failure(Code.FORBIDDEN, f"{request.method} {path} is in no row of the authorisation table")
        visit = visit_of(request.scope)
        visit.row = row
        visit.what = name or ""
        if row.model is not None:
            concerns(request.path_params.get(row.model, ""))
        if deps.gate.is_open(row):
            return
        if (caller := platform_of(deps.settings, path or "")) is not None:
            CALLER.set(caller)
            visit.label = caller.label
            return
        try:
            await _let_in(request, deps, row)
        except Failure as failure:
            if failure.code is not Code.OVERLOADED:
                deps.count_refusal("not_authorized")
            raise

    return authorize


async def _let_in(request: Request, deps: Deps, row: Row) -> None:
    gate, visit = deps.gate, visit_of(request.scope)
    credential = InferHeaders.read(request.scope["headers"]).credential
    kind = None if credential is None else next((one for one in _credentials() if one.recognises(credential)), None)
    if credential is None or kind is None:
        principal = gate.identify(credential, row)
    else:
        principal = await kind.check(request, deps, credential, row)
    visit.principal = principal
    model = None if row.model is None else request.path_params.get(row.model)
    visit.passed = gate.enter(principal, row, model)
    visit.check_still = partial(gate.check_still, principal, row, model)
    CALLER.set(principal)
    acting("unknown address" if request.client is None else request.client.host, principal.label)


def platform_of(settings: Settings, path: str) -> Principal | None:
    """Return the platform that calls a path without a credential; None: there is none."""
    callers = (one.platform(settings, path) for one in _credentials())
    return next((caller for caller in callers if caller is not None), None)


@cache
def _credentials() -> list[Credentials]:
    return contributions("credentials", Credentials)


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


def _checked(receive: Receive, visit: Visit) -> Receive:
    """Return `receive`, which checks the caller again at the end of the body."""

    async def received() -> Message:
        message = await receive()
        # A body may take as long as its sender likes: the key may have been revoked or changed meanwhile.
        if visit.check_still is not None and message["type"] == "http.request" and not message.get("more_body"):
            visit.check_still()
        return message

    return received


class CallMiddleware:
    """ASGI middleware: makes the visit of a request, and ends it.

    A reply counts in the reply budget from the arrival of its tensors until the server has taken what was written from
    them. The fast path asks the guard for its own requests.

    Args:
        deps: the parts of the gateway.
        audit: writes the entries.
        replies: writes refusals, and the replies to defects, which are logged under an id.
        is_keyless: whether calls of a path need no key even where there are keys.
    """

    def __init__(
        self, app: ASGIApp, deps: Deps, audit: AuditTrail, replies: ErrorReplies, is_keyless: Callable[[str], bool]
    ) -> None:
        self.app = app
        self._deps = deps
        self._audit = audit
        self._replies = replies
        self._is_keyless = is_keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit, permit, started = visit_of(scope), ReplyPermit(self._deps.reply_budget), False

        async def noted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if visit.row is not None and visit.row.changes:
                    await self._write(scope, visit, message["status"])
                # The router sets the route while the request runs; a path without one leaves the key out.
                route = getattr(scope.get("route"), "path_format", None)
                self._deps.http_counts.add(route, scope.get(METHOD, scope["method"]), message["status"])
            elif message["type"] == "http.response.body":
                permit.resize(len(message.get("body", b"")))
            await send(message)

        tokens = CHANGES.set(Changes()), PERMIT.set(permit)
        CALLER.set(None)  # the task of a pipelined request has the context of the request before
        try:
            refusal = self._refusal(scope)
            answer = self.app if refusal is None else self._replies.reply(scope["path"], refusal)
            await answer(scope, _checked(receive, visit), noted)
        except Exception as error:
            failure = internal_failure(f"{scope['method']} {scope['path']}", error)
            if started:
                # Part of a reply has been sent: only closing the connection tells the caller.
                raise
            await self._replies.reply(scope["path"], failure)(scope, receive, noted)
        finally:
            CHANGES.reset(tokens[0])
            PERMIT.reset(tokens[1])
            permit.release()
            if visit.passed is not None:
                visit.passed.leave()

    def _refusal(self, scope: Scope) -> Failure | None:
        """Return why a request is not let in before its route is known; None: it is."""
        headers, path = scope["headers"], scope["path"]
        return slash_fault(path, scope.get("raw_path") or b"") or self._deps.browser_guard.refusal(
            scope["method"],
            dict(headers),
            self._deps.gate,
            InferHeaders.read(headers).credential,
            keyless=self._is_keyless(path),
        )

    async def _write(self, scope: Scope, visit: Visit, status: int) -> None:
        principal = visit.principal
        if status in {401, 403, 429} and principal is None:
            return  # anybody can make such calls
        client = scope.get("client")
        label, key_id = (visit.label, "") if principal is None else (principal.label, principal.key_id)
        who = Who(label, key_id, "" if client is None else client[0])
        target = f"{scope['method']} {scope['path']}"
        await self._audit.write(who, visit.what, target, status, CHANGES.get() or Changes(), refused=status >= 400)
