"""Forms of requests and replies beside those of tensors/forms.py. Pure.

Accept ─> form of the reply; Content-Type of Triton's binary tensors ─> length of their JSON; reply ─> event stream
Source: Triton, sagemaker_server.cc; AWS, "Event stream encoding" (Amazon Transcribe developer guide), and the service
model "sagemaker-runtime".
"""

from __future__ import annotations

import struct
import zlib

from millstream.gateway.tensors.forms import CSV, JSON, JSON_LINES, NPY, media_type
from millstream.services.errors import invalid


def accepted_form(accept: str | None) -> str | None:
    """Return the first supported form in an Accept header; None: none is supported."""
    for part in (accept or "*/*").split(","):
        wanted = media_type(part)
        if wanted in {JSON, JSON_LINES, CSV, NPY}:
            return wanted
        if wanted in {"*/*", "application/*"}:
            return JSON
        if wanted == "text/*":
            return CSV
    return None


def is_v2(document: object) -> bool:
    """Whether a JSON body is a request of v2: all its inputs, if any, have a name, and a datatype or a shape."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    return type(inputs) is list and all(
        type(one) is dict and "name" in one and ("datatype" in one or "shape" in one) for one in inputs
    )


#: content type of binary tensors after JSON
PREFIX = "application/vnd.sagemaker-triton.binary+json;json-header-size="

_DIGITS_MAX = 10


def header_bytes_of(content_type: str) -> int | None:
    """Return the length of the JSON part; None for another content type. Raises Failure(INVALID)."""
    if not content_type.startswith(PREFIX):
        return None
    digits = content_type.removeprefix(PREFIX).strip()
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _DIGITS_MAX:
        raise invalid("Unable to parse json-header-size in the Content-Type: it is a number of bytes")
    return int(digits)


EVENT_STREAM = "application/vnd.amazon.eventstream"

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
    """Return one message of the stream.

    total length u32 · headers length u32 · crc32 of both · headers · payload · crc32 of all before; big-endian
    """
    head = b"".join(map(_header, headers.items()))
    prelude = struct.pack(">II", _FRAME_BYTES + len(head) + len(payload), len(head))
    message = b"".join((prelude, struct.pack(">I", zlib.crc32(prelude)), head, payload))
    return message + struct.pack(">I", zlib.crc32(message))


def _header(item: tuple[str, str]) -> bytes:
    name, value = (text.encode() for text in item)
    return struct.pack(">B", len(name)) + name + struct.pack(">BH", _STRING, len(value)) + value
