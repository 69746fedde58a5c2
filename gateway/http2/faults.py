"""faults: what a client did wrong, as error codes of HTTP/2.

A ConnectionFault ends the connection with GOAWAY, a StreamFault one stream with RST_STREAM.
Source: RFC 9113, sections 5.4 and 7.
"""

from __future__ import annotations

from enum import IntEnum


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
