"""The only place that turns errors into replies: JSON in the format of the path's protocol, with a status.

path ─> ErrorFormats.of ─> ErrorFormat.write ─> status, more headers, JSON

Failure -> the status of its code; a parameter that does not fit -> 400, never 422; no such path -> 404;
another method -> 405 with Allow; anything else -> 500 with an id that is also in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from millstream.gateway.connection.error_reply import error_body, error_headers
from millstream.gateway.connection.request_head import has_encoded_slash
from millstream.gateway.http.openapi import ERROR
from millstream.services.errors import HTTP_STATUS, Code, Failure
from millstream.services.model.names import NAME_RULE
from millstream.services.nearest_names import CHARACTERS_MAX, did_you_mean


class FormattedError(NamedTuple):
    """An error reply. `headers`: those beside the headers that all formats share."""

    status: int
    headers: dict[str, str]
    body: bytes


class Advice(BaseModel):
    """Members of the error of a request that does not fit its model. Absent from other errors."""

    signature: dict[str, Any] = Field({}, description="`inputs` and `outputs` of the model, as in its metadata.")
    example: Any = Field(None, description="A body for the same URL that works.")
    example_python: str = Field(
        "", description="In place of `example` where that would be long: a call of the package requests to `url`."
    )


class Error(Advice):
    """The body of errors of protocols without a format of their own."""

    model_config = ConfigDict(json_schema_extra={"example": {"error": "what is wrong and what to do about it"}})

    error: str


class ErrorFormat(NamedTuple):
    """How a protocol writes its errors.

    Args:
        write: returns the reply for a failure and its status: that of its code, or the router's own.
        document: the body, for the OpenAPI page.
        headers: those of the replies, likewise.
    """

    write: Callable[[Failure, int], FormattedError]
    document: type[BaseModel]
    headers: tuple[str, ...] = ()


def _write_plain(failure: Failure, status: int) -> FormattedError:
    return FormattedError(status, {}, error_body(failure.message, failure.advice))


#: `{"error": …}`: the Open Inference Protocol, KServe V1, TensorFlow Serving, and Millstream's own APIs
PLAIN = ErrorFormat(_write_plain, Error)


class ErrorFormats:
    """Finds the error format of a path.

    Args:
        by_prefix: formats by path prefix. The longest prefix of a path decides; PLAIN applies if none matches.
    """

    def __init__(self, by_prefix: Mapping[str, ErrorFormat]) -> None:
        self._longest_first = sorted(by_prefix.items(), key=lambda item: len(item[0]), reverse=True)

    def of(self, path: str) -> ErrorFormat:
        return next((form for prefix, form in self._longest_first if path.startswith(prefix)), PLAIN)


#: codes of statuses that the router or the framework decided
CODE_OF_STATUS: dict[int, Code] = {
    400: Code.INVALID,
    401: Code.UNAUTHENTICATED,
    403: Code.FORBIDDEN,
    404: Code.NOT_FOUND,
    405: Code.METHOD,
    406: Code.INVALID,
    415: Code.ENCODING,
    499: Code.CANCELLED,
}


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
        """Register handlers for all exceptions that routes raise on purpose; CallMiddleware handles the others."""
        app.add_exception_handler(Failure, self._failure)
        app.add_exception_handler(HTTPException, self._http)
        app.add_exception_handler(RequestValidationError, self._validation)
        app.add_exception_handler(ClientDisconnect, self._disconnected)

    def reply(
        self, path: str, failure: Failure, status: int | None = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return the reply for a failure. For v2, its bytes are equal to the fast path's.

        `status`: None: that of the failure's code.
        """
        written = self._formats.of(path).write(failure, failure.http_status if status is None else status)
        more = error_headers(failure) | {**(headers or {}), **written.headers}
        return Response(written.body, written.status, more, media_type="application/json")

    def reply_status(self, path: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
        """Return the reply for an error whose status the router or the framework decided."""
        return self.reply(path, Failure(CODE_OF_STATUS.get(status, Code.INTERNAL), message), status, headers)

    async def _failure(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, Failure)
        return self.reply(request.scope["path"], exc)

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


def _allowed(request: Request) -> list[str]:
    """Return the methods of all routes of this path: the router knows only those of the first matching route."""
    app: FastAPI = request.app
    allowed = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in app.router.routes)
    ]
    return [*allowed, "HEAD"] if "GET" in allowed else allowed


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
