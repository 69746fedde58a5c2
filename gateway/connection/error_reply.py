"""Failures -> replies of v2 REST: `{"error": …}` with the HTTP status of their code."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from millstream.gateway.connection.infer_handler import HttpReply, reply_headers
from millstream.services.access.limits import LimitReached
from millstream.services.errors import Code, Failure

log = logging.getLogger("millstream.infer")

JSON = b"application/json"
JSON_HEADERS = reply_headers((b"content-type", JSON))


def error_reply(failure: Failure) -> HttpReply:
    """Return `failure` as `{"error": …}` with its status, and Retry-After where the failure has a time for it."""
    added = [(name.encode(), value.encode()) for name, value in error_headers(failure).items()]
    headers = reply_headers(*JSON_HEADERS.pairs, *added) if added else JSON_HEADERS
    return HttpReply(failure.http_status, headers, error_body(failure.message, failure.advice))


def error_headers(failure: Failure) -> dict[str, str]:
    """Return the headers that tell more about a failure, names in lower case: when to try again, which key to send."""
    headers = {}
    if failure.retry_after is not None:
        headers["retry-after"] = str(failure.retry_after)
    if failure.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if isinstance(failure, LimitReached):
        headers |= dict(failure.headers)
    return headers


def too_large(bytes_max: int) -> Failure:
    """Return the refusal of a body over the limit. Each adapter refuses as soon as it knows the size."""
    return Failure(Code.TOO_LARGE, f"the request body is larger than the limit of {bytes_max} bytes")


def internal_failure(operation: str, error: Exception) -> Failure:
    """Log an unexpected exception under an id, and return a failure that tells the caller only the id.

    Args:
        operation: What failed, for the log.
        error: The exception; its traceback is logged.
    """
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s: %s", error_id, operation, exc_info=error)
    return Failure(Code.INTERNAL, f"internal error {error_id}")


def error_body(message: str, advice: Mapping[str, Any] | None = None) -> bytes:
    """Return the JSON body of an error. `advice`: more members of the document."""
    return orjson.dumps({"error": unicode_text(message), **(advice or {})})


def unicode_text(message: str) -> str:
    """Return `message`. It may quote a request, so lone surrogates are escaped."""
    return message.encode("utf-8", "backslashreplace").decode()
