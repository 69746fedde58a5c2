"""The only place that turns errors into replies: JSON in the format of the path's protocol, with a status.

Failure -> the status of its code; a parameter that does not fit -> 400, never 422; no such path -> 404;
another method -> 405 with Allow; anything else -> 500 with an id that is also in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.connection.error_reply import error_headers, internal_failure
from millstream.gateway.connection.request_head import has_encoded_slash
from millstream.gateway.http.error_formats import CODE_OF_STATUS, ErrorContext, ErrorFormats
from millstream.gateway.http.openapi import ERROR
from millstream.services.errors import HTTP_STATUS, Code, Failure
from millstream.services.model.names import NAME_RULE
from millstream.services.nearest_names import CHARACTERS_MAX, did_you_mean

_NO_ROUTE = "Not Found"  # the framework's detail of a path without a route
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class ErrorReplies:
    """Writes error replies, each in the format of its path.

    Args:
        formats: finds the format of a path.
    """

    def __init__(self, formats: ErrorFormats) -> None:
        self._formats = formats

    def handle_errors_of(self, app: FastAPI) -> None:
        """Register handlers for all exceptions that routes raise on purpose; UnexpectedErrors handles the others."""
        app.add_exception_handler(Failure, self._failure)
        app.add_exception_handler(HTTPException, self._http)
        app.add_exception_handler(RequestValidationError, self._validation)
        app.add_exception_handler(ClientDisconnect, self._disconnected)

    def reply(self, path: str, error: ErrorContext, headers: Mapping[str, str] | None = None) -> Response:
        """Return the reply for an error. For v2, its bytes are equal to the fast path's."""
        written = self._formats.of(path).write(error)
        return Response(
            written.body, written.status, {**(headers or {}), **written.headers}, media_type="application/json"
        )

    def reply_failure(self, path: str, failure: Failure) -> Response:
        """Return the reply for a failure."""
        return self.reply(path, _context(failure), error_headers(failure))

    def reply_status(self, path: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
        """Return the reply for an error whose status the router or the framework decided."""
        return self.reply(path, ErrorContext(status, CODE_OF_STATUS.get(status, Code.INTERNAL), message), headers)

    async def _failure(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, Failure)
        return self.reply_failure(request.scope["path"], exc)

    async def _http(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        headers = dict(exc.headers or {})
        if exc.status_code == 405:
            headers["Allow"] = ", ".join(_allowed(request))
        path, message = request.scope["path"], str(exc.detail)
        if message == _NO_ROUTE:
            message += path_advice(path)
        return self.reply_status(path, exc.status_code, message, headers)

    async def _validation(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        first = exc.errors()[0]
        where, *names = first["loc"]
        field = ".".join(str(name) for name in names)
        return self.reply_status(request.scope["path"], 400, f"{where} parameter '{field}': {first['msg']}")

    async def _disconnected(self, request: Request, _: Exception) -> Response:
        # No client reads this reply; it ends the exchange without a traceback in the log.
        return self.reply_status(request.scope["path"], HTTP_STATUS[Code.CANCELLED], "the client closed the connection")


def _context(failure: Failure) -> ErrorContext:
    return ErrorContext(failure.http_status, failure.code, failure.message, failure.subject, failure.advice)


def _allowed(request: Request) -> list[str]:
    """Return the methods of all routes of this path: the router knows only those of the first matching route."""
    app: FastAPI = request.app
    allowed = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in app.router.routes)
    ]
    return [*allowed, "HEAD"] if "GET" in allowed else allowed


class UnexpectedErrors:
    """ASGI middleware that logs an exception without a handler under an id, and replies 500 with that id.

    Args:
        replies: writes the reply.
    """

    def __init__(self, app: ASGIApp, replies: ErrorReplies) -> None:
        self.app = app
        self._replies = replies

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
        except Exception as error:
            failure = internal_failure(f"{scope['method']} {scope['path']}", error)
            if started:
                # Part of a reply has been sent: only closing the connection tells the caller.
                raise
            await self._replies.reply(scope["path"], _context(failure))(scope, receive, send)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that may reply with these error statuses, for the OpenAPI document.

    openapi_document.py completes them with the path's error format.
    """
    return {status: {"description": _MEANINGS[status], ERROR: True} for status in statuses}


_MEANINGS = {
    400: "The request is wrong: the message names the field.",
    401: "No key, or a wrong one.",
    403: "The key lacks the scope that the operation needs.",
    404: "No such model, version or path.",
    405: "The path exists, the method does not.",
    406: "The reply has none of the accepted forms.",
    409: "It exists already, is in use, or was changed meanwhile.",
    413: "Larger than the limit.",
    415: "The content type or encoding is not supported.",
    424: "The model failed on this input, or did not answer in time.",
    429: "Too many rows wait: retry after Retry-After seconds.",
    500: "The model failed on this input, or an internal error.",
    501: "A valid request for something that is not supported.",
    503: "The request cannot be served now: retry after Retry-After seconds.",
    504: "The deadline passed before there was an answer.",
    507: "The disk is full.",
}


#: path before a model's name -> what may follow the name
_CALLS: dict[str, tuple[str, ...]] = {
    "/v2/models/": ("infer", "generate", "generate_stream", "ready", "config", "stats", "trace", "versions"),
    "/v2/repository/models/": ("load", "unload"),
    "/v1/models/": ("versions", "labels", "metadata"),
    "/admin/v1/models/": ("versions",),
    "/endpoints/": ("invocations", "invocations-response-stream", "async-invocations"),
}


#: names of regions may have slashes
_REGIONS = ("/v2/systemsharedmemory/", "/v2/cudasharedmemory/")


def slash_fault(path: str, raw_path: bytes) -> Failure | None:
    """Return the refusal of a path with an encoded slash: a proxy that checks paths may have read another one."""
    if not has_encoded_slash(raw_path) or path.startswith(_REGIONS):
        return None
    return Failure(Code.INVALID, f"the path has an encoded slash (%2F); a model name has no slash: {NAME_RULE}")


def path_advice(path: str) -> str:
    """Return what is wrong with `path`, for the end of a message; "" if nothing is known about it."""
    prefix = next((prefix for prefix in _CALLS if path.startswith(prefix)), None)
    if prefix is None:
        return ""
    name, *rest = path.removeprefix(prefix).split("/")
    if not name:
        return "; the path has no model name"
    if path.endswith("/"):
        return "; the path ends with a slash: leave it out"
    if not rest or rest[0] in _CALLS[prefix]:
        return ""
    call = rest[0][:CHARACTERS_MAX]
    meant = did_you_mean(call, _CALLS[prefix]) or f"; a model name has no slash: {NAME_RULE}"
    return f"; a model has no call '{call}'{meant}"
