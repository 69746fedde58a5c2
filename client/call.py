"""The values between the parts of the client: calls, replies, pauses, and procedures of several calls. Pure.

A procedure is a generator: it yields a Call and is sent the Reply, or it yields a Pause. A failure of a call is
thrown into it. So one procedure serves transports that block and transports that await.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from millstream.services.errors import invalid

T = TypeVar("T")


class Timeouts(NamedTuple):
    """Limits of one attempt in seconds; None: no limit."""

    total_s: float | None  # from the start of the attempt to the end of the reply
    read_s: float | None  # longest silence of the server
    write_s: float  # longest time in which the server takes no byte of the body
    connect_s: float


@dataclass(frozen=True, slots=True)
class Body:
    """A body that is read while it is sent. `chunks` starts it again for another attempt."""

    size_bytes: int
    chunks: Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        path: percent-encoded, without the server's URL.
        repeatable: whether it may be sent again when its connection ended without a reply.
        read_s: longest silence of the server, for calls without a timeout; None: the timeout alone counts.
        once: whether any error is the answer, so that the call is never repeated.
        timeouts: limits of this attempt, set when it is sent.
    """

    method: str
    path: str
    query: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | Body = b""
    repeatable: bool = False
    read_s: float | None = None
    once: bool = False
    timeouts: Timeouts | None = None


class Reply(NamedTuple):
    """A complete reply. Names of headers are in lower case; `content` may be changed by its owner."""

    status: int
    headers: Mapping[str, str]
    content: bytearray
    url: str

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class Pause(NamedTuple):
    """A wait between two calls. `why`: for the log; empty: nothing is logged."""

    seconds: float
    why: str = ""


Steps = Generator[Call | Pause, Reply, T]
NO_REPLY = Reply(0, {}, bytearray(), "")


def json_call(
    method: str, path: str, document: Any, *, query: Mapping[str, str] | None = None, repeatable: bool = False
) -> Call:
    """Return a call with a JSON body. Raises Failure(INVALID) if the document has no JSON form."""
    content = json_of(document, "an argument is")
    headers = {"Content-Type": "application/json"}
    return Call(method, path, query=query or {}, headers=headers, content=content, repeatable=repeatable)


def json_of(document: Any, what: str) -> bytes:
    """Return a document as JSON, with numpy's arrays as lists. Raises Failure(INVALID), which begins with `what`."""
    try:
        return json.dumps(document, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(f"{what} not JSON: {error}") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array or a number of numpy
        return value.tolist()
    raise TypeError(f"it has no form for a value of type {type(value).__name__}")


def listed(values: str | Sequence[str]) -> list[str]:
    """Return texts as a list; a single one may stand for a list of it."""
    return [values] if isinstance(values, str) else list(values)


def send(call: Call) -> Steps[Reply]:
    """Send one call; the result is its reply, whose status is 2xx. Raises Failure."""
    return (yield call)
