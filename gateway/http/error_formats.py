"""Formats of error replies. The path of a request decides which protocol's format applies. Pure.

path ─> ErrorFormats.of ─> ErrorFormat.write(ErrorContext) ─> status, more headers, JSON
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from millstream.gateway.connection.error_reply import error_body
from millstream.services.errors import Code, Subject


class ErrorContext(NamedTuple):
    """The error of a request."""

    status: int  # that of `code` in HTTP_STATUS, or the router's own
    code: Code
    message: str
    subject: Subject | None = None  # as in Failure
    advice: Mapping[str, Any] | None = None  # as in Failure: more members of the document


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
    """How a protocol writes its errors. `document`, `headers`: the body and the headers, for the OpenAPI page."""

    write: Callable[[ErrorContext], FormattedError]
    document: type[BaseModel]
    headers: tuple[str, ...] = ()


def _write_plain(error: ErrorContext) -> FormattedError:
    return FormattedError(error.status, {}, error_body(error.message, error.advice))


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


def unicode_text(message: str) -> str:
    """Return `message`. It may quote a request, so lone surrogates are escaped."""
    return message.encode("utf-8", "backslashreplace").decode()
