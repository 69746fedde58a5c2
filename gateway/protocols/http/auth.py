"""auth: decides who may use the admin API: holders of the key; without a key, callers on this machine.

If no key is set, two kinds of harmful requests can come from loopback, too. A web page in the operator's own browser is
recognised by its Host, which does not name this machine (DNS rebinding), or by its Origin, which is not this server
(forged requests). A reverse proxy on this machine passes on requests of other machines;
gateway/protocols/http/local_caller.py recognises it.
"""

from __future__ import annotations

import secrets
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr
from starlette.exceptions import HTTPException

from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.local_caller import forwarding_header, is_loopback
from millstream.services.errors import Code, Failure
from millstream.services.process.audit import acting

_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="admin_key",
    description="The value of MILLSTREAM_ADMIN_KEY. Not needed from this machine when no key is set.",
)


async def admin(
    request: Request, deps: DepsOf, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> None:
    """Check that the caller may use the admin API.

    Raises:
        Failure: UNAUTHENTICATED, if a key is set and the caller has not sent it.
        HTTPException: 403, if no key is set and the caller is not local.
    """
    try:
        _check(request, deps.settings.admin_key, credentials)
    except (Failure, HTTPException):
        deps.count_refusal("not_authorized")
        raise
    address = "unknown address" if request.client is None else request.client.host
    acting(address, with_key=deps.settings.admin_key is not None)


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
