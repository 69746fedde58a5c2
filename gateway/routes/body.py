"""What a route asks about a body and its sender: how long it says it is, and whether anybody still waits."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import Receive

from gateway.refusals import too_large
from gateway.v2.document import parse_json
from services.errors import invalid

#: more digits than any limit has; converting a number of any length would cost the square of it
_DIGITS_MAX = 18
DOCUMENT_BYTES_MAX = 1 << 20

_Document = TypeVar("_Document", bound=BaseModel)


async def read_document(request: Request, kind: type[_Document], bytes_max: int = DOCUMENT_BYTES_MAX) -> _Document:
    """The JSON object in the body, whatever it calls itself: many clients name no content type; an empty body is {}.

    Raises Failure(INVALID, TOO_LARGE).
    """
    body = await read_body(request, bytes_max)
    try:
        return kind.model_validate(parse_json(body) if body.strip() else {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(name) for name in first["loc"])
        raise invalid(f"Unable to parse '{where}': {first['msg']}") from None


def describes(kind: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The same for the OpenAPI page: the `openapi_extra` of a route that reads such a document."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body. Raises Failure(TOO_LARGE): before reading when the length is declared, else as soon as it is known."""
    if declared_bytes(request) > bytes_max:
        raise too_large(bytes_max)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > bytes_max:
            raise too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks)


def declared_bytes(request: Request) -> int:
    """The Content-Length, or 0 for a body that comes in chunks."""
    declared = request.headers.get("content-length", "")
    return int(declared[:_DIGITS_MAX]) if declared.isdecimal() else 0


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
