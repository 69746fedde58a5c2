"""auth: decides who may call a route: the authorisation table, and for operators the admin key or this machine.

no key exists: as the table's routes are open, or `admin` checks MILLSTREAM_ADMIN_KEY or that the caller is local
keys exist:    credential ─> Gate ─> Principal ─> row of the table ─> Pass, which AccessMiddleware ends with the call

If no admin key is set, two kinds of harmful requests can come from loopback, too. A web page in the operator's own
browser is recognised by its Host, which does not name this machine (DNS rebinding), or by its Origin, which is not this
server (forged requests). A reverse proxy on this machine passes on requests of other machines;
gateway/protocols/http/local_caller.py recognises it.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr
from starlette.exceptions import HTTPException

from millstream.gateway.access.principal import CALLER, Principal
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.protocols.http.access_middleware import visit_of
from millstream.gateway.protocols.http.body import read_body
from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.http.local_caller import forwarding_header, is_loopback
from millstream.services.access.scopes import Need
from millstream.services.access.sigv4 import SignedRequest, is_signature
from millstream.services.access.table import Row, http_row
from millstream.services.errors import Code, Failure
from millstream.services.process.audit import acting
from millstream.services.process.offload import run_in_thread_if_large

#: what callers on this machine may do without a key, while there is no key with the scope admin
_OPERATORS = frozenset({Need.READ, Need.WRITE, Need.METRICS, Need.MEMORY, Need.ADMIN, Need.DESCRIBE})

_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="admin_key",
    description="The value of MILLSTREAM_ADMIN_KEY, or an API key with the scope that the operation needs. "
    "Not needed from this machine when no key is set.",
)


async def authorize(request: Request, deps: DepsOf) -> None:
    """Check that the caller may call the route, by the authorisation table. Runs before every route.

    Raises Failure: UNAUTHENTICATED, FORBIDDEN, OVERLOADED (a limit of the key); FORBIDDEN for a route without a row.
    """
    route = request.scope.get("route")
    path, name = getattr(route, "path_format", None), getattr(route, "name", None)
    row = http_row(request.method, path, name)
    if row is None:
        raise Failure(Code.FORBIDDEN, f"{request.method} {path} is in no row of the authorisation table")
    visit = visit_of(request.scope)
    visit.row = row
    visit.what = name or ""
    if not deps.gate.enforced or row.need is Need.OPEN:
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
    address = _address(request)
    if credential is None and row.need in _OPERATORS and not gate.has_admin and _is_local(request):
        acting(address)
        return
    if credential is not None and is_signature(credential):
        principal = await _signed(request, deps, credential)
    else:
        principal = gate.identify(credential)
    visit.principal = principal
    model = None if row.model is None else request.path_params.get(row.model)
    visit.passed = gate.enter(principal, row, model)
    CALLER.set(principal)
    acting(address, principal.label)


async def _signed(request: Request, deps: Deps, header: bytes) -> Principal:
    """Return who signed the request. Its body is read for that; routes read it again from memory."""
    deps.gate.check_signer(header)
    body = await read_body(request, deps.settings.request_bytes_max)
    request._body = body
    body_sha256 = await run_in_thread_if_large(len(body), _sha256, body)
    scope = request.scope
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    query = scope["query_string"].decode("latin-1")
    return deps.gate.verify_signed(header, SignedRequest(request.method, path, query, headers, body_sha256))


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def admin(
    request: Request, deps: DepsOf, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> None:
    """Check that the caller may use the admin API. When keys exist, `authorize` has checked it.

    Raises:
        Failure: UNAUTHENTICATED, if a key is set and the caller has not sent it.
        HTTPException: 403, if no key is set and the caller is not local.
    """
    if deps.gate.enforced:
        return
    try:
        _check(request, deps.settings.admin_key, credentials)
    except (Failure, HTTPException):
        deps.count_refusal("not_authorized")
        raise
    label = "" if deps.settings.admin_key is None else "admin key"
    visit_of(request.scope).label = label
    acting(_address(request), label)


def _address(request: Request) -> str:
    return "unknown address" if request.client is None else request.client.host


def _check(request: Request, key: SecretStr | None, credentials: HTTPAuthorizationCredentials | None) -> None:
    if key is None:
        _check_local(request)
        return
    if credentials is None:
        raise Failure(Code.UNAUTHENTICATED, "send the admin key: 'Authorization: Bearer KEY'")
    # As bytes: compare_digest accepts no text that is not ASCII.
    if not secrets.compare_digest(credentials.credentials.encode(), key.get_secret_value().encode()):
        raise Failure(Code.UNAUTHENTICATED, "this is not the admin key")


async def management_api(
    request: Request, deps: DepsOf, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> None:
    """Check that the caller may use /models. SageMaker sends no key: only SageMaker reaches its containers."""
    if deps.settings.management_api == "torchserve":
        await admin(request, deps, credentials)


def sagemaker_manages(deps: Deps, path: str | None) -> bool:
    """Whether SageMaker, which sends no key, calls the routes of its containers."""
    return deps.settings.management_api == "sagemaker" and (path or "").split("/")[1:2] in (["models"], ["invocations"])


def _is_local(request: Request) -> bool:
    try:
        _check_local(request)
    except HTTPException:
        return False
    return True


def _check_local(request: Request) -> None:
    if request.client is None or not is_loopback(request.client.host):
        raise HTTPException(
            403, "the admin API answers this machine only: set MILLSTREAM_ADMIN_KEY to use it from others"
        )
    host = request.headers.get("host", "")
    if not is_loopback(_hostname(host)):
        raise HTTPException(
            403,
            f"Host '{host}' is not this machine: call http://127.0.0.1 or http://localhost, or set "
            "MILLSTREAM_ADMIN_KEY",
        )
    _check_direct(request)
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise HTTPException(403, f"the admin API takes no calls from web pages of another origin ('{origin}')")


def _check_direct(request: Request) -> None:
    """Raise HTTPException(403) for a request that a proxy passed on."""
    name = forwarding_header(request.headers.keys())
    if name is None and request.scope.get("http_version") != "1.0":
        return
    sign = f"header '{name}'" if name is not None else "HTTP/1.0"
    raise HTTPException(
        403,
        f"the call came through a proxy ({sign}), so its caller is unknown: set MILLSTREAM_ADMIN_KEY to use the "
        "admin API through a proxy",
    )


def _hostname(host: str) -> str:
    """Return the name or address in `host`, without port and brackets; "" if it cannot be parsed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
