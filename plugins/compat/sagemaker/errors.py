"""Errors of SageMaker's runtime API as boto3 reads them. Pure.

Source: the service model "sagemaker-runtime" 2017-05-13; errors of the protocol rest-json.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel, Field

from millstream.gateway.connection.error_reply import error_body, unicode_text
from millstream.gateway.http.errors import ErrorFormat, FormattedError
from millstream.services.errors import Code, Failure

#: Status and error type of each code. Clients retry on 429 and 5xx. What a model's container refuses is a ModelError
#: with the container's status in its body, as from a real endpoint.
_ERRORS: dict[Code, tuple[int, str]] = {
    Code.INVALID: (424, "ModelError"),
    Code.UNAUTHENTICATED: (403, "AccessDeniedException"),
    Code.FORBIDDEN: (403, "AccessDeniedException"),
    Code.NOT_FOUND: (400, "ValidationError"),
    Code.METHOD: (405, "ValidationError"),
    Code.CONFLICT: (409, "ValidationError"),
    Code.TOO_LARGE: (413, "ValidationError"),
    Code.ENCODING: (424, "ModelError"),
    Code.OVERLOADED: (429, "ModelNotReadyException"),
    Code.UNAVAILABLE: (503, "ServiceUnavailable"),
    Code.MEMORY: (503, "ServiceUnavailable"),
    Code.EXPIRED: (424, "ModelError"),
    Code.SLOW: (408, "ValidationError"),
    Code.CANCELLED: (499, "ValidationError"),
    Code.MODEL: (424, "ModelError"),
    Code.STORAGE: (507, "InternalFailure"),
    Code.UNSUPPORTED: (501, "ValidationError"),
    Code.INTERNAL: (500, "InternalFailure"),
}


class SageMakerError(BaseModel):
    """An error as boto3 reads it; its type is in the header x-amzn-errortype. A ModelError has all members."""

    Message: str
    OriginalStatusCode: int = Field(default=0, description="The status of the model's container.")
    OriginalMessage: str = ""
    LogStreamArn: str = ""


def _write(error: Failure, container_status: int) -> FormattedError:
    status, kind = _ERRORS[error.code]
    message = unicode_text(error.message)
    document: dict[str, Any] = {"Message": message}
    if kind == "ModelError":
        # The container's body, as from a real endpoint. It has the advice: boto3 drops other members.
        original = error_body(error.message, error.advice).decode()
        document |= {"OriginalStatusCode": container_status, "OriginalMessage": original, "LogStreamArn": ""}
    return FormattedError(status, {"x-amzn-errortype": kind}, orjson.dumps(document))


FORMAT = ErrorFormat(_write, SageMakerError, headers=("X-Amzn-ErrorType",))
