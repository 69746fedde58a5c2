"""CloudEvents around requests of KServe V1: extracts the data of an event and wraps the reply in another. Pure.

Binary mode: `ce-…` headers, the body is the data. Structured mode: the body is the event, data within it.
Source: CloudEvents 1.0.2, HTTP protocol binding sections 3.1 and 3.2, JSON event format section 3.1.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse
from millstream.services.errors import invalid

STRUCTURED = "application/cloudevents+json"
_REQUIRED = ("specversion", "id", "source", "type")
_TYPE = "io.millstream.inference.response"
_HEADER_CHARACTERS_MAX = 1024


class Event(NamedTuple):
    """The parts of an event that its reply depends on."""

    structured: bool
    id: str


def open_event(
    headers: Mapping[str, str], body: bytes, limits: JsonLimits = DEFAULT_LIMITS
) -> tuple[Event | None, bytes]:
    """Return event and data; the event is None if the request is none. Raises Failure(INVALID) for a broken event."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() == STRUCTURED:
        return _structured(body, limits)
    if "ce-specversion" not in headers and "ce-id" not in headers:
        return None, body
    _check({name: headers.get(f"ce-{name}") for name in _REQUIRED})
    return Event(structured=False, id=headers["ce-id"]), body


def _structured(body: bytes, limits: JsonLimits) -> tuple[Event, bytes]:
    document = parse(body, limits)
    if type(document) is not dict:
        raise invalid("the CloudEvent is not a JSON object")
    _check(document)
    if "data_base64" in document:
        try:
            data = base64.b64decode(document["data_base64"], validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise invalid("the CloudEvent's 'data_base64' is not base64") from None
    elif "data" in document:
        data = orjson.dumps(document["data"])
    else:
        raise invalid("the CloudEvent has no 'data'")
    return Event(structured=True, id=document["id"]), data


def _check(attributes: Mapping[str, Any]) -> None:
    for name in _REQUIRED:
        value = attributes.get(name)
        if type(value) is not str or not value or len(value) > _HEADER_CHARACTERS_MAX:
            raise invalid(f"the CloudEvent has no '{name}', or not a short string")
    if not attributes["specversion"].startswith("1."):
        raise invalid(f"the CloudEvent's 'specversion' is {excerpt(attributes['specversion'])}: 1.0 is spoken")


def close_event(event: Event, model: str, reply: bytes) -> tuple[dict[str, str], bytes]:
    """Return headers and body of the reply to `event`."""
    attributes = {
        "specversion": "1.0",
        "id": str(uuid.uuid4()),
        "source": f"io.millstream.inference.{model}",
        "type": _TYPE,
        "time": datetime.now(UTC).isoformat(),
    }
    if not event.structured:
        return {"content-type": "application/json", **{f"ce-{key}": value for key, value in attributes.items()}}, reply
    head = orjson.dumps({**attributes, "datacontenttype": "application/json"})
    return {"content-type": STRUCTURED}, b'%b,"data":%b}' % (head[:-1], reply)
