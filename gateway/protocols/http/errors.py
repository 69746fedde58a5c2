"""Every error of every path becomes JSON in the form of the path's protocol with its status, here and nowhere else.

Failure -> the status of its code; a parameter that does not fit -> 400, never 422; no such path -> 404;
another method -> 405 with Allow; anything else -> 500 with an id that is also in the log.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.protocols.http.error_formats import CODE_OF_STATUS, ErrorContext, ErrorDocument, shape_of
from millstream.services.errors import HTTP_STATUS, Code, Failure

log = logging.getLogger(__name__)

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def add_error_handlers(app: FastAPI) -> None:
    """Make `app` answer errors in this shape."""
    app.add_exception_handler(Failure, _failure)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(ClientDisconnect, _disconnected)


def documented(*statuses: int, model: type[BaseModel] = ErrorDocument) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer these error statuses, for the OpenAPI page."""
    return {status: {"model": model, "description": _MEANINGS[status]} for status in statuses}


def error_reply(
    path: str, status: int, message: str, headers: Mapping[str, str] | None = None, code: Code | None = None
) -> Response:
    """The reply that says what went wrong; for v2 in the words and bytes that the fast path uses too."""
    shaped = shape_of(path)(ErrorContext(status, code or CODE_OF_STATUS.get(status, Code.INTERNAL), message))
    return Response(shaped.body, shaped.status, {**(headers or {}), **shaped.headers}, media_type="application/json")


async def _failure(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Failure)
    headers = {}
    if exc.retry_after_s is not None:
        headers["Retry-After"] = str(max(0, math.ceil(exc.retry_after_s)))
    if exc.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return error_reply(request.scope["path"], exc.http_status, exc.message, headers, exc.code)


async def _http(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    headers = dict(exc.headers or {})
    if exc.status_code == 405:
        headers["Allow"] = ", ".join(_allowed(request))
    return error_reply(request.scope["path"], exc.status_code, str(exc.detail), headers)


def _allowed(request: Request) -> list[str]:
    """Methods of all routes of this path: the router knows only those of the first route that matched."""
    app: FastAPI = request.app
    found = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in app.router.routes)
    ]
    return [*found, "HEAD"] if "GET" in found else found


async def _validation(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    where, *names = first["loc"]
    field = ".".join(str(name) for name in names)
    return error_reply(request.scope["path"], 400, f"{where} parameter '{field}': {first['msg']}")


async def _disconnected(request: Request, _: Exception) -> Response:
    # nobody reads this; it ends the exchange without a traceback
    return error_reply(request.scope["path"], HTTP_STATUS[Code.CANCELLED], "the client closed the connection")


class UnexpectedErrors:
    """ASGI middleware: an exception that nobody expected is logged with an id, and the caller gets the id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            log.exception("internal error %s: %s %s", error_id, scope["method"], scope["path"])
            if started:
                # half a reply is out: only closing the connection tells the caller
                raise
            await error_reply(scope["path"], 500, f"internal error {error_id}")(scope, receive, send)


_MEANINGS = {
    400: "The request is wrong: the message names the field.",
    401: "No key, or a wrong one.",
    403: "Without a key, the admin API answers local callers only.",
    404: "No such model, version or path.",
    405: "The path exists, the method does not.",
    406: "No form of the answer that is accepted.",
    409: "Already there, in use, or changed in between.",
    413: "Larger than the limit.",
    415: "A content encoding that is not spoken.",
    424: "The model failed on this input, or did not answer in time.",
    429: "Too many rows wait: come back after Retry-After seconds.",
    500: "The model failed on this input, or an internal error.",
    501: "A valid request for something that is not offered.",
    503: "Nothing can take this now: come back after Retry-After seconds.",
    504: "The deadline passed before an answer was there.",
    507: "The disk is full.",
}
