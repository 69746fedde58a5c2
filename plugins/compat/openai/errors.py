"""Errors as OpenAI's clients read them. Pure.

Source: OpenAI, API reference, "Error codes".
"""

from __future__ import annotations

import orjson
from pydantic import BaseModel

from millstream.gateway.http.error_formats import Advice, ErrorContext, ErrorFormat, FormattedError, unicode_text
from millstream.services.errors import Code

_TYPES = {
    Code.UNAUTHENTICATED: "authentication_error",
    Code.FORBIDDEN: "permission_error",
    Code.OVERLOADED: "rate_limit_error",
    Code.MODEL: "server_error",
    Code.UNAVAILABLE: "server_error",
    Code.MEMORY: "server_error",
    Code.EXPIRED: "server_error",
    Code.STORAGE: "server_error",
    Code.INTERNAL: "server_error",
}


class OpenAIErrorDetail(Advice):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """The body of every error."""

    error: OpenAIErrorDetail


def _write(error: ErrorContext) -> FormattedError:
    unknown_model = (
        error.code is Code.NOT_FOUND and error.subject is not None
    )  # the member `model` names the version, too
    document = {
        "message": unicode_text(error.message),
        "type": _TYPES.get(error.code, "invalid_request_error"),
        "param": "model" if unknown_model else None,
        "code": "model_not_found" if unknown_model else None,
        **(error.advice or {}),
    }
    return FormattedError(error.status, {}, orjson.dumps({"error": document}))


FORMAT = ErrorFormat(_write, OpenAIError)
