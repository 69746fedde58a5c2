"""events: what a client did, in the order in which it did it."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from millstream.gateway.http2.faults import ErrorCode

H = TypeVar("H")


class RequestStarted(NamedTuple, Generic[H]):
    """A stream begins. Answer it also if its headers are over the limit."""

    stream: int
    head: H | None  # None: the header list is over the limit
    ended: bool  # no data follows


class DataReceived(NamedTuple):
    """Data of a stream. Pass its size to `consume` when it takes no more memory here."""

    stream: int
    data: bytes
    ended: bool  # no data follows


class StreamReset(NamedTuple):
    """The stream is over, by the client's reset or for its fault: nothing can be sent on it."""

    stream: int
    code: ErrorCode | int


class StreamSent(NamedTuple):
    """All that was queued on a stream was sent."""

    stream: int
    ended: bool  # and with it the stream
    held_bytes: int = 0  # of the request, not consumed


class ConnectionEnded(NamedTuple):
    """The connection is over, and all of its streams. Send what is left of the output and close."""

    code: ErrorCode
    message: str


Event = RequestStarted[H] | DataReceived | StreamReset | StreamSent | ConnectionEnded
