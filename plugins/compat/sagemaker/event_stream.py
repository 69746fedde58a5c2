"""Writes frames of `application/vnd.amazon.eventstream`, in which SageMaker's runtime streams a reply. Pure.

total length u32 · headers length u32 · crc32 of both · headers · payload · crc32 of all before; big-endian
Source: AWS, "Event stream encoding" (Amazon Transcribe developer guide); the service model "sagemaker-runtime".
"""

from __future__ import annotations

import struct
import zlib

MEDIA_TYPE = "application/vnd.amazon.eventstream"

_STRING = 7
_FRAME_BYTES = 16  # of a frame with no headers and no payload
PAYLOAD_BYTES_MAX = 1 << 20


def payload_parts(body: bytes) -> bytes:
    """Return the whole stream: `body` as PayloadPart events."""
    pieces = [body[at : at + PAYLOAD_BYTES_MAX] for at in range(0, len(body), PAYLOAD_BYTES_MAX)] or [b""]
    return b"".join(map(_payload_part, pieces))


def _payload_part(payload: bytes) -> bytes:
    headers = {
        ":message-type": "event",
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
    }
    return frame(headers, payload)


def frame(headers: dict[str, str], payload: bytes) -> bytes:
    """Return one message of the stream."""
    head = b"".join(map(_header, headers.items()))
    prelude = struct.pack(">II", _FRAME_BYTES + len(head) + len(payload), len(head))
    message = b"".join((prelude, struct.pack(">I", zlib.crc32(prelude)), head, payload))
    return message + struct.pack(">I", zlib.crc32(message))


def _header(item: tuple[str, str]) -> bytes:
    name, value = (text.encode() for text in item)
    return struct.pack(">B", len(name)) + name + struct.pack(">BH", _STRING, len(value)) + value
