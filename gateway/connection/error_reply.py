"""Failures as replies of v2 REST: `{"error": …}` with the status of their code."""

from __future__ import annotations

import logging
import math
import uuid

import orjson

from millstream.gateway.connection.infer_handler import HttpReply, reply_headers
from millstream.services.errors import Code, Failure

log = logging.getLogger("millstream.infer")

JSON = b"application/json"
JSON_HEADERS = reply_headers((b"content-type", JSON))


def error_reply(failure: Failure) -> HttpReply:
    """A failure as `{"error": …}` with its status, and when to come back."""
    headers = JSON_HEADERS
    if failure.retry_after_s is not None:
        headers = reply_headers(*JSON_HEADERS.pairs, (b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after_s))))
    return HttpReply(failure.http_status, headers, error_body(failure.message))


def too_large(bytes_max: int) -> Failure:
    """A body over the limit: refused as soon as that is known, whichever adapter reads it."""
    return Failure(Code.TOO_LARGE, f"the request body is larger than the limit of {bytes_max} bytes")


def unexpected(what: str, error: Exception) -> Failure:
    """For an exception that nobody expected: it is logged with an id, and the caller gets the id."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s: %s", error_id, what, exc_info=error)
    return Failure(Code.INTERNAL, f"internal error {error_id}")


def error_body(message: str) -> bytes:
    """The JSON body of every error. What is not Unicode in `message` (it may quote a request) is escaped."""
    return orjson.dumps({"error": message.encode("utf-8", "backslashreplace").decode()})
