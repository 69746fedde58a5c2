"""What a client did, in the order in which it did it; and what it did wrong, as error codes of HTTP/2.

A ConnectionFault ends the connection with GOAWAY, a StreamFault one stream with RST_STREAM.
Source: RFC 9113, sections 5.4 and 7.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar


class ErrorCode(IntEnum):
    """Source: RFC 9113, section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(Exception):
    """A fault that ends the connection. `message`: for people, sent with GOAWAY."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class StreamFault(Exception):
    """A fault that ends one stream."""

    def __init__(self, stream: int, code: ErrorCode) -> None:
        super().__init__(stream, code)
        self.stream = stream
        self.code = code


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


class ConnectionEnded(NamedTuple):
    """The connection is over, and all of its streams. Send what is left of the output and close."""

    code: ErrorCode
    message: str


Event = RequestStarted[H] | DataReceived | StreamReset | StreamSent | ConnectionEnded
