"""The forms in which protocols say what went wrong: which one a path has is one table, here. Pure.

path ─> SHAPES ─> shape(Problem) ─> status, more headers, JSON
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict

from millstream.gateway.connection.error_reply import error_body
from millstream.services.errors import SAGEMAKER_ERROR, Code


class ErrorContext(NamedTuple):
    """`status`: what the one table has for `code`, or the router's own."""

    status: int
    code: Code
    message: str


class FormattedError(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


Shape = Callable[[ErrorContext], FormattedError]

#: Code of a status that the router or the framework decided
CODE_OF_STATUS: dict[int, Code] = {
    400: Code.INVALID,
    401: Code.UNAUTHENTICATED,
    403: Code.UNAUTHENTICATED,
    404: Code.NOT_FOUND,
    405: Code.METHOD,
    406: Code.INVALID,
    415: Code.ENCODING,
    499: Code.CANCELLED,
}


def plain(problem: ErrorContext) -> FormattedError:
    """`{"error": …}`: the Open Inference Protocol, KServe V1, TensorFlow Serving, and everything of our own."""
    return FormattedError(problem.status, {}, error_body(problem.message))


_OPENAI_TYPES = {
    Code.UNAUTHENTICATED: "authentication_error",
    Code.OVERLOADED: "rate_limit_error",
    Code.MODEL: "server_error",
    Code.UNAVAILABLE: "server_error",
    Code.EXPIRED: "server_error",
    Code.STORAGE: "server_error",
    Code.INTERNAL: "server_error",
}
_MODEL_NOT_FOUND = "Request for unknown model"


def openai(problem: ErrorContext) -> FormattedError:
    """Source: OpenAI, API reference, "Error codes"."""
    unknown_model = problem.code is Code.NOT_FOUND and problem.message.startswith(_MODEL_NOT_FOUND)
    document = {
        "message": _text(problem.message),
        "type": _OPENAI_TYPES.get(problem.code, "invalid_request_error"),
        "param": "model" if unknown_model else None,
        "code": "model_not_found" if unknown_model else None,
    }
    return FormattedError(problem.status, {}, orjson.dumps({"error": document}))


_TORCHSERVE_TYPES = {
    Code.INVALID: "BadRequestException",
    Code.UNAUTHENTICATED: "InvalidKeyException",
    Code.NOT_FOUND: "ResourceNotFoundException",
    Code.METHOD: "MethodNotAllowedException",
    Code.CONFLICT: "ConflictStatusException",
    Code.OVERLOADED: "ServiceUnavailableException",
    Code.UNAVAILABLE: "ServiceUnavailableException",
    Code.EXPIRED: "RequestTimeoutException",
    Code.MODEL: "PredictionException",
    Code.INTERNAL: "InternalServerException",
}


def torchserve(problem: ErrorContext) -> FormattedError:
    """Source: pytorch/serve, ErrorResponse and the exceptions of its http package."""
    kind = _TORCHSERVE_TYPES.get(problem.code, "BadRequestException")
    if problem.code is Code.NOT_FOUND and problem.message.startswith(("Model not found", "Model version")):
        kind = "ModelVersionNotFoundException" if "version" in problem.message else "ModelNotFoundException"
    document = {"code": problem.status, "type": kind, "message": _text(problem.message)}
    return FormattedError(problem.status, {"x-request-id": str(uuid.uuid4())}, orjson.dumps(document))


def sagemaker(problem: ErrorContext) -> FormattedError:
    """Source: the service model "sagemaker-runtime" 2017-05-13; errors of the protocol rest-json."""
    status, kind = SAGEMAKER_ERROR[problem.code]
    message = _text(problem.message)
    document: dict[str, Any] = {"Message": message}
    if kind == "ModelError":
        document |= {"OriginalStatusCode": problem.status, "OriginalMessage": message, "LogStreamArn": ""}
    return FormattedError(status, {"x-amzn-errortype": kind}, orjson.dumps(document))


#: the longest prefix that a path starts with decides
SHAPES: dict[str, Shape] = {
    "/v1/": openai,
    "/openai/": openai,
    "/v1/models": plain,
    "/endpoints/": sagemaker,
    "/predictions/": torchserve,
    "/explanations/": torchserve,
    "/models": torchserve,
    "/ping": torchserve,
    "/api-description": torchserve,
}
_LONGEST_FIRST = sorted(SHAPES, key=len, reverse=True)


def shape_of(path: str) -> Shape:
    """The form of the errors of this path."""
    return next((SHAPES[prefix] for prefix in _LONGEST_FIRST if path.startswith(prefix)), plain)


def _text(message: str) -> str:
    """What is not Unicode in `message` (it may quote a request) is escaped."""
    return message.encode("utf-8", "backslashreplace").decode()


class ErrorDocument(BaseModel):
    """Every error of every path."""

    model_config = ConfigDict(json_schema_extra={"example": {"error": "what is wrong and what to do about it"}})

    error: str
