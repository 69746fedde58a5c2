"""Errors as TorchServe's clients read them. Pure.

Source: pytorch/serve, ErrorResponse and the exceptions of its http package.
"""

from __future__ import annotations

import orjson

from millstream.gateway.http.error_formats import Advice, ErrorContext, ErrorFormat, FormattedError, unicode_text
from millstream.services.errors import Code, Subject

_TYPES = {
    Code.INVALID: "BadRequestException",
    Code.UNAUTHENTICATED: "InvalidKeyException",
    Code.FORBIDDEN: "InvalidKeyException",
    Code.NOT_FOUND: "ResourceNotFoundException",
    Code.METHOD: "MethodNotAllowedException",
    Code.CONFLICT: "ConflictStatusException",
    Code.OVERLOADED: "ServiceUnavailableException",
    Code.UNAVAILABLE: "ServiceUnavailableException",
    Code.MEMORY: "ServiceUnavailableException",
    Code.EXPIRED: "RequestTimeoutException",
    Code.MODEL: "PredictionException",
    Code.INTERNAL: "InternalServerException",
}
_NOT_FOUND_TYPES: dict[Subject | None, str] = {
    Subject.MODEL: "ModelNotFoundException",
    Subject.VERSION: "ModelVersionNotFoundException",
}


class TorchServeError(Advice):
    """The body of every error: status, type, and what is wrong."""

    code: int
    type: str
    message: str


def _write(error: ErrorContext) -> FormattedError:
    kind = _TYPES.get(error.code, "BadRequestException")
    if error.code is Code.NOT_FOUND:
        kind = _NOT_FOUND_TYPES.get(error.subject, kind)
    document = {"code": error.status, "type": kind, "message": unicode_text(error.message)}
    document |= error.advice or {}
    return FormattedError(error.status, {}, orjson.dumps(document))


FORMAT = ErrorFormat(_write, TorchServeError)
