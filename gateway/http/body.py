"""Reads, decompresses and parses bodies of requests, and notices a disconnect of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from millstream.gateway.access.principal import caller_name
from millstream.gateway.connection.budgets import BodyReservation
from millstream.gateway.connection.error_reply import too_large
from millstream.gateway.http.compression import decompress, inflated_bytes_max
from millstream.gateway.http.deps import Deps, deps_of
from millstream.gateway.tensors.json_text import parse_json
from millstream.services.errors import invalid

T = TypeVar("T")

#: more digits than any limit has; converting a number takes time that grows with the square of its digits
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


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the body.

    Raises Failure: TOO_LARGE, before reading if the length is declared, else as soon as the limit is exceeded;
    UNAVAILABLE if the bodies that are being received exceed the receive budget.
    """
    with deps_of(request).receive_budget.reserve(caller_of(request)) as reservation:
        return await read_reserved(request, bytes_max, reservation)


def caller_of(request: Request) -> str:
    """Return whose share of the receive budget a body takes: that of a key, else of the client's address."""
    return caller_name() or (request.client.host if request.client is not None else "")


async def read_reserved(request: Request, bytes_max: int, reservation: BodyReservation) -> bytes:
    """Return the body as `read_body` does. It counts in the receive budget until `reservation` ends."""
    if declared_bytes(request) > bytes_max:
        raise too_large(bytes_max)
    chunks: list[bytes] = []
    async for chunk in request.stream():
        reservation.grow(len(chunk))
        if reservation.size > bytes_max:
            raise too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks)


def declared_bytes(request: Request) -> int:
    """Return the Content-Length; 0 for a chunked body."""
    declared = request.headers.get("content-length", "")
    return int(declared[:_DIGITS_MAX]) if declared.isdecimal() else 0


async def disconnected(receive: Receive) -> None:
    """Wait until the client closes the connection. Read the request's body before."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def decompressed_body(request: Request, deps: Deps) -> AsyncIterator[bytes]:
    """Yield the decompressed body. It counts in the receive budget until the block ends.

    Raises Failure: TOO_LARGE, UNAVAILABLE (receive budget), ENCODING, INVALID.
    """
    bytes_max = deps.settings.request_bytes_max
    with deps.receive_budget.reserve(caller_of(request)) as reservation:
        body = await read_reserved(request, bytes_max, reservation)
        encoding = request.headers.get("content-encoding")
        if encoding is not None and encoding.strip().lower() not in {"", "identity"}:
            reservation.grow(inflated_bytes_max(len(body), bytes_max))
            body = await asyncio.to_thread(decompress, body, encoding.encode("latin-1"), bytes_max)
            reservation.resize(len(body))
        yield body


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it when the client disconnects. Read the request's body before."""
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect.cancel()
        if not working.done():
            working.cancel()
    if working.cancelled() or not working.done():
        raise ClientDisconnect
    return working.result()
