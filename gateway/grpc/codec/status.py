"""status: turns a Failure into a gRPC status: the code of GRPC_STATUS, the message, and when to try again."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import grpc

from millstream.services.access.limits import LimitReached
from millstream.services.errors import GRPC_STATUS, Failure
from millstream.services.process.request_id import REQUEST_ID

REQUEST_ID_KEY = "x-request-id"  # in the metadata of a call, and in the metadata that ends it
#: Details are sent in a header; clients take about 8 KiB of headers.
DETAILS_CHARACTERS_MAX = 2048

_STATUS = {code: grpc.StatusCode[name] for code, name in GRPC_STATUS.items()}


def details(failure: Failure) -> str:
    """Return the message. It may quote a request, so lone surrogates are escaped."""
    return failure.message.encode("utf-8", "backslashreplace").decode()[:DETAILS_CHARACTERS_MAX]


async def refuse(context: Any, failure: Failure) -> NoReturn:
    """End the call with the status of `failure`. Raises grpc.aio.AbortError."""
    await context.abort(*refusal(failure, REQUEST_ID.get()))
    raise AssertionError("abort always raises")


def refusal(failure: Failure, request_id: str) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the status, message and metadata with which a call ends.

    The metadata says when to try again: as in HTTP, and in the form that gRPC clients with a retry policy follow
    (gRPC proposal A6).
    """
    metadata: tuple[tuple[str, str], ...] = ((REQUEST_ID_KEY, request_id),)
    seconds = failure.retry_after
    if seconds is not None:
        pushback_s = seconds if failure.retry_after_s is None else failure.retry_after_s
        metadata += (("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(math.ceil(pushback_s * 1000))))
    if isinstance(failure, LimitReached):
        metadata += failure.headers
    return _STATUS[failure.code], details(failure), metadata
