"""Decides who may call a route, by the authorisation table.

row of the table ─> open to anybody? ─no─> credential ─> Gate ─> Principal ─> Pass, which CallMiddleware ends

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

from millstream.gateway.access.principal import CALLER, Principal
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.middleware import visit_of
from millstream.services.access.scopes import Row, Rows
from millstream.services.errors import Code, Failure
from millstream.services.plugin.registry import contributions
from millstream.services.process.audit import acting, concerns
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
