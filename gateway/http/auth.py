"""auth: decides who may call a route, by the authorisation table.

row of the table ─> open to anybody? ─no─> credential ─> Gate ─> Principal ─> Pass, which AccessMiddleware ends

No address is an identity: a proxy on this machine passes on calls of others. Operators on this machine send the token
of the home (services/local_token.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.security import HTTPBearer

from millstream.gateway.access.principal import CALLER, Principal
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.http.access_middleware import visit_of
from millstream.gateway.http.body import read_body
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.deps import Deps
from millstream.services.access.sigv4 import SignedRequest, is_signature
from millstream.services.access.table import Row, Rows
from millstream.services.errors import Code, Failure
from millstream.services.process.audit import acting, concerns
from millstream.services.process.offload import run_in_thread_if_large

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
        await _authorize(request, deps, rows)

    return authorize


async def _authorize(request: Request, deps: Deps, rows: Rows) -> None:
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
    if sagemaker_manages(deps, path):
        CALLER.set(deps.gate.sagemaker)
        visit.label = deps.gate.sagemaker.label
        return
    try:
        await _let_in(request, deps, row)
    except Failure as failure:
        if failure.code is not Code.OVERLOADED:
            deps.count_refusal("not_authorized")
        raise


async def _let_in(request: Request, deps: Deps, row: Row) -> None:
    gate, visit = deps.gate, visit_of(request.scope)
    credential = InferHeaders.read(request.scope["headers"]).credential
    if credential is not None and is_signature(credential):
        principal = await _signed(request, deps, credential, row)
    else:
        principal = gate.identify(credential, row)
    visit.principal = principal
    model = None if row.model is None else request.path_params.get(row.model)
    visit.passed = gate.enter(principal, row, model)
    visit.check_still = partial(gate.check_still, principal, row, model)
    CALLER.set(principal)
    acting("unknown address" if request.client is None else request.client.host, principal.label)


async def _signed(request: Request, deps: Deps, header: bytes, row: Row) -> Principal:
    """Return who signed the request. Its body is read for that; routes read it again from memory."""
    if (anybody := deps.gate.check_signer(header, row)) is not None:
        return anybody
    body = await read_body(request, deps.settings.request_bytes_max)
    request._body = body
    body_sha256 = await run_in_thread_if_large(len(body), _sha256, body)
    scope = request.scope
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    query = scope["query_string"].decode("latin-1")
    return deps.gate.verify_signed(header, SignedRequest(request.method, path, query, headers, body_sha256), row)


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def sagemaker_manages(deps: Deps, path: str | None) -> bool:
    """Whether SageMaker, which sends no key, calls the routes of its containers."""
    return deps.settings.management_api == "sagemaker" and (path or "").split("/")[1:2] in (["models"], ["invocations"])
