"""Reads replies: an error status becomes a typed error, a JSON body becomes its document. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from millstream.client.call import Call, Reply
from millstream.client.errors import ModelNotFound, ServerError
from millstream.services.errors import HTTP_STATUS, Code, Failure, Subject
from millstream.services.process.printable import printable

REQUEST_ID = "x-request-id"
_EXCERPT_CHARACTERS = 80
_MESSAGE_CHARACTERS_MAX = 2000
#: the first code of a status; 500 is a defect, unless the server says more
_CODES = {status: code for code, status in reversed(HTTP_STATUS.items())} | {
    500: Code.INTERNAL,
    502: Code.UNAVAILABLE,
}
_MODEL_PATHS = ("/v2/models/", "/admin/v1/models/", "/v2/repository/models/")


def failure_of(reply: Reply, call: Call) -> ServerError | None:
    """Return the error that a reply is; None for a status of 2xx."""
    if 200 <= reply.status < 300:
        return None
    message = _server_message(reply.content)
    code = _CODES.get(reply.status, Code.INTERNAL if reply.status >= 500 else Code.INVALID)
    known = message is not None
    if message is None:
        message = _foreign_message(reply, call)
    elif code in {Code.UNAUTHENTICATED, Code.FORBIDDEN}:
        message += " (set its key: --key, MILLSTREAM_ADMIN_KEY, api_key in config.toml, or Client(key=...))"
    about_model = code is Code.NOT_FOUND and known and call.path.startswith(_MODEL_PATHS)
    kind = ModelNotFound if about_model else ServerError
    return kind(
        code,
        message,
        status=reply.status,
        request_id=reply.headers.get(REQUEST_ID),
        retry_after_s=_seconds(reply.headers),
        subject=Subject.MODEL if about_model else None,
    )


def parse_json(text: bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON text, which may contain NaN and infinities. Raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(bytes(text))  # NaN of an output is no JSON
        except RecursionError as error:
            raise ValueError("the text is nested too deeply") from error


def document_of(reply: Reply, *members: str) -> dict[str, Any]:
    """Return the JSON object of a reply. Raises Failure(INTERNAL) if it is not one with these members."""
    try:
        document = parse_json(reply.content)
    except ValueError:
        document = None
    if not isinstance(document, dict) or not document.keys() >= set(members):
        raise Failure(
            Code.INTERNAL,
            f"{reply.url} is not a Millstream server: it answered {_excerpt(reply.content)!r}; check the endpoint",
        )
    return document


def _server_message(content: bytearray) -> str | None:
    """Return the message of a Millstream error; None if the body is not one."""
    try:
        message = parse_json(content)["error"]
    except (ValueError, LookupError, TypeError):
        return None
    if not isinstance(message, str):
        return None
    return printable(" ".join(message.split())[:_MESSAGE_CHARACTERS_MAX])  # a traceback may end on a terminal


def _foreign_message(reply: Reply, call: Call) -> str:
    if reply.status == 400 and b"HTTPS" in reply.content[:2000]:  # nginx and Go say so
        return f"{reply.url} speaks TLS: write https:// instead of http://"
    said = f": {_excerpt(reply.content)!r}" if reply.content else ""
    return f"{call.method} {reply.url} was answered with status {reply.status}{said}; check the endpoint"


def _excerpt(content: bytearray) -> str:
    text = content[: 4 * _EXCERPT_CHARACTERS].decode(errors="replace")
    return " ".join(text.split())[:_EXCERPT_CHARACTERS]


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header; None without one, or for a date, which Millstream never sends."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
