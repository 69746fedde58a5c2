"""POST /v2/models/{model}[/versions/{version}]/infer as an ASGI route: body in, submit, reply out.

The fast path answers the same requests below ASGI; tests hold it to the behaviour of this route.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from millstream.gateway.access.principal import CALLER
from millstream.gateway.connection.infer_handler import EXCHANGE, HttpReply, InferHeaders
from millstream.gateway.http.adapter import versioned
from millstream.gateway.http.body import disconnected, read_body
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import (
    BINARY,
    JSON,
    OCTETS,
    content,
    header_parameter,
    header_ref,
    ref,
    request_body,
)
from millstream.gateway.observing.finished import TICKETS
from millstream.gateway.v2.schemas import InferReply, InferRequest
from millstream.services.process.request_id import TRACE

router = APIRouter()

_HEADER_LENGTH = "Inference-Header-Content-Length"
_REQUEST: dict[str, Any] = {
    "parameters": [
        header_parameter(
            _HEADER_LENGTH,
            "Bytes of the JSON part, for a body of JSON and binary tensors. 0: the body is the only input.",
            {"type": "integer", "minimum": 0},
        )
    ],
    **request_body({JSON: content(ref(InferRequest), form="v2"), OCTETS: BINARY}),
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The outputs, as JSON, or as JSON followed by binary tensors.",
        "headers": {_HEADER_LENGTH: header_ref(_HEADER_LENGTH), "Content-Encoding": header_ref("Content-Encoding")},
        "content": {
            JSON: content(
                ref(InferReply),
                example={
                    "model_name": "digits",
                    "model_version": "1",
                    "outputs": [{"name": "label", "datatype": "INT64", "shape": [1], "data": [2]}],
                },
            ),
            OCTETS: BINARY,
        },
    },
    **documented(400, 404, 413, 415, 429, 500, 501, 503, 504),
}


@versioned(
    router,
    "POST",
    "/v2/models/{model}[/versions/{version}]/infer",
    ("Run the model's serving version", "Run one version of the model"),
    response_class=Response,
    responses=_RESPONSES,
    openapi_extra=_REQUEST,
)
async def infer(model: str, version: str | None, request: Request, deps: DepsOf) -> Response:
    body = await read_body(request, deps.settings.request_bytes_max)
    answered: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()

    def done(reply: HttpReply) -> None:
        if not answered.done():
            answered.set_result(reply)

    exchange = EXCHANGE.get()
    headers = InferHeaders.read(request.headers.raw)
    request_id = b"" if exchange is None else exchange.request_id
    handle = deps.infer.submit(model, version, headers, body, done, request_id, CALLER.get(), TRACE.get())
    tickets = TICKETS.get()
    if tickets is not None:
        tickets.append(handle)
    disconnect = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((answered, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect.cancel()
        if not answered.done():
            # The client disconnected, or this task is being cancelled.
            handle.cancel()
    if not answered.done():
        raise ClientDisconnect
    return _response(answered.result())


def _response(reply: HttpReply) -> Response:
    response = Response(reply.body, reply.status)
    added = [(name, value) for name, _, value in (line.partition(b": ") for line in reply.added.splitlines())]
    response.raw_headers = [*added, (b"content-length", b"%d" % len(reply.body)), *reply.headers.pairs]
    return response
