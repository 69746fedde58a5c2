"""Bodies of requests: their declared length, reading, decompressing and parsing them, and noticing a disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from millstream.gateway.connection.error_reply import too_large
from millstream.gateway.connection.receive_budget import BodyReservation
from millstream.gateway.protocols.http.compression import decompress, inflated_bytes_max
from millstream.gateway.protocols.http.context import deps_of
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.tensors.json_document import parse_json
from millstream.services.errors import invalid

T = TypeVar("T")

#: More digits than any limit has. The time to convert a number grows with the square of its digits.
_DIGITS_MAX = 18
DOCUMENT_BYTES_MAX = 64 * 1024

_Document = TypeVar("_Document", bound=BaseModel)


async def read_document(request: Request, kind: type[_Document], bytes_max: int = DOCUMENT_BYTES_MAX) -> _Document:
    """Return the JSON object in the body as a `kind`; an empty body is {}.

    The content type is ignored, since many clients send none. Raises Failure(INVALID, TOO_LARGE).
    """
    body = await read_body(request, bytes_max)
    try:
        return kind.model_validate(parse_json(body) if body.strip() else {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(name) for name in first["loc"])
        raise invalid(f"Unable to parse '{where}': {first['msg']}") from None


def describes(kind: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a `kind` with `read_document`."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Read the body.

    Raises Failure: TOO_LARGE, before reading where the length is declared, else as soon as it is exceeded; UNAVAILABLE
    when the bodies that are being received exceed the receive budget.
    """
    with deps_of(request).receive_budget.reserve() as held:
        return await read_reserved(request, bytes_max, held)


async def read_reserved(request: Request, bytes_max: int, held: BodyReservation) -> bytes:
    """Read the body as `read_body` does. It counts in the receive budget until `held` ends."""
    if declared_bytes(request) > bytes_max:
        raise too_large(bytes_max)
    chunks: list[bytes] = []
    async for chunk in request.stream():
        held.grow(len(chunk))
        if held.size > bytes_max:
            raise too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks)


def declared_bytes(request: Request) -> int:
    """The Content-Length; 0 for a body that comes in chunks."""
    declared = request.headers.get("content-length", "")
    return int(declared[:_DIGITS_MAX]) if declared.isdecimal() else 0


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def whole_body(request: Request, deps: Deps) -> AsyncIterator[bytes]:
    """Read and decompress the body; it counts in the receive budget until the block ends.

    Raises Failure: TOO_LARGE, UNAVAILABLE (receive budget), ENCODING, INVALID.
    """
    bytes_max = deps.settings.request_bytes_max
    with deps.receive_budget.reserve() as held:
        body = await read_reserved(request, bytes_max, held)
        encoding = request.headers.get("content-encoding")
        if encoding is not None and encoding.strip().lower() not in {"", "identity"}:
            held.grow(inflated_bytes_max(len(body), bytes_max))
            body = await asyncio.to_thread(decompress, body, encoding.encode("latin-1"), bytes_max)
            held.resize(len(body))
        yield body


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it when the client disconnects. The request's body must have been read."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
    if working.cancelled() or not working.done():
        raise ClientDisconnect
    return working.result()
