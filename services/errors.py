"""One error type for the whole product, and the tables that map its codes to protocol statuses.

A `Failure` carries a code (what kind), a message (what to do about it), its subject where protocols distinguish that,
and, for refusals, when to try again. Code that handles a failure reads these fields, never the text of the message.
Protocol adapters turn codes into statuses with `HTTP_STATUS` and `GRPC_STATUS`; a protocol whose errors have names or
statuses of their own has a table of them in its errors.py. Nothing else decides a status.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """The kind of a failure: whose mistake it is, and whether another attempt can succeed."""

    INVALID = "invalid"  # the request is wrong and will be wrong again
    UNAUTHENTICATED = "unauthenticated"  # no key, or a wrong one
    FORBIDDEN = "forbidden"  # the key is right, and may not do this
    NOT_FOUND = "not_found"  # no such model, version, path
    METHOD = "method"  # the path exists, the method does not
    CONFLICT = "conflict"  # already there, or changed in between
    TOO_LARGE = "too_large"  # over a limit on bytes
    ENCODING = "encoding"  # a content encoding that is not supported
    OVERLOADED = "overloaded"  # this lane is full: try again later
    UNAVAILABLE = "unavailable"  # nothing can take the request now: try again later
    EXPIRED = "expired"  # the deadline passed before the answer came
    SLOW = "slow"  # the caller sent its request too slowly
    CANCELLED = "cancelled"  # the caller disconnected
    MEMORY = "memory"  # no worker has memory for the version
    MODEL = "model"  # the model itself failed on this input
    STORAGE = "storage"  # the disk is full, or a container that is to load a model has no memory for it
    UNSUPPORTED = "unsupported"  # a valid request for something that is not supported
    INTERNAL = "internal"  # a defect of Millstream


HTTP_STATUS: dict[Code, int] = {
    Code.INVALID: 400,
    Code.UNAUTHENTICATED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.METHOD: 405,
    Code.CONFLICT: 409,
    Code.TOO_LARGE: 413,
    Code.ENCODING: 415,
    Code.OVERLOADED: 429,
    Code.UNAVAILABLE: 503,
    Code.MEMORY: 503,
    Code.EXPIRED: 504,
    Code.SLOW: 408,
    Code.CANCELLED: 499,
    Code.MODEL: 500,
    Code.STORAGE: 507,
    Code.UNSUPPORTED: 501,
    Code.INTERNAL: 500,
}

GRPC_STATUS: dict[Code, str] = {
    Code.INVALID: "INVALID_ARGUMENT",
    Code.UNAUTHENTICATED: "UNAUTHENTICATED",
    Code.FORBIDDEN: "PERMISSION_DENIED",
    Code.NOT_FOUND: "NOT_FOUND",
    Code.METHOD: "UNIMPLEMENTED",
    Code.CONFLICT: "ALREADY_EXISTS",
    Code.TOO_LARGE: "RESOURCE_EXHAUSTED",
    Code.ENCODING: "UNIMPLEMENTED",
    Code.OVERLOADED: "RESOURCE_EXHAUSTED",
    Code.UNAVAILABLE: "UNAVAILABLE",
    Code.MEMORY: "UNAVAILABLE",
    Code.EXPIRED: "DEADLINE_EXCEEDED",
    Code.SLOW: "DEADLINE_EXCEEDED",
    Code.CANCELLED: "CANCELLED",
    Code.MODEL: "INTERNAL",
    Code.STORAGE: "RESOURCE_EXHAUSTED",
    Code.UNSUPPORTED: "UNIMPLEMENTED",
    Code.INTERNAL: "INTERNAL",
}


_REFUSALS = frozenset({Code.OVERLOADED, Code.UNAVAILABLE, Code.MEMORY})
RETRY_S_DEFAULT = 5  # seconds after which a client may try again, where nothing tells a better time


class Subject(StrEnum):
    """What a failure is about, where clients are told different things about failures of one code."""

    MODEL = "model"
    VERSION = "version"


class Failure(Exception):
    """An operation that failed.

    Args:
        code: what kind of failure it is; decides the status of the reply.
        message: one line that says what is wrong and what to do about it.
        retry_after_s: on refusals (`OVERLOADED`, `UNAVAILABLE`, `MEMORY`): seconds until another attempt makes sense.
        subject: what the failure is about; None: nothing that a protocol distinguishes.
        advice: members that error documents get beside the message: `signature`, `example`, `example_python`.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        retry_after_s: float | None = None,
        subject: Subject | None = None,
        advice: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.advice = advice
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.subject = subject

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, too: `args` is the message alone."""
        return _unpickle, (type(self), self.args, self.__dict__)

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def retry_after(self) -> int | None:
        """The value of a Retry-After header: whole seconds, at least one; None: another attempt is of no use.

        Every refusal has one. Without a time of its own it is RETRY_S_DEFAULT.
        """
        if self.retry_after_s is None:
            return RETRY_S_DEFAULT if self.code in _REFUSALS else None
        return max(1, math.ceil(self.retry_after_s))


def _unpickle(kind: type[Failure], args: tuple[Any, ...], fields: dict[str, Any]) -> Failure:
    failure = kind.__new__(kind, *args)
    failure.__dict__.update(fields)
    return failure


def invalid(message: str, subject: Subject | None = None) -> Failure:
    """Return a Failure for a mistake of the caller: 400 over HTTP."""
    return Failure(Code.INVALID, message, subject=subject)


def not_found(message: str, subject: Subject | None = None) -> Failure:
    """Return a Failure for a model, version, file or path that does not exist: 404 over HTTP."""
    return Failure(Code.NOT_FOUND, message, subject=subject)
