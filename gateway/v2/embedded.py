"""embedded: answers a v2 request on another protocol's path: bytes in, bytes out, with the same codec and lane."""

from __future__ import annotations

from millstream.gateway.scheduling.caller import Caller, RequestOptions
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.v2.call import InferCall
from millstream.gateway.v2.encode import V2Encoder
from millstream.gateway.v2.example import infer_body


async def infer_v2(
    caller: Caller, route: ModelRoute, body: bytes, header_bytes: int | None
) -> tuple[bytes, int | None]:
    """Run the request in `body`; return the body of its reply and the length of that body's JSON part.

    Args:
        caller: of the protocol on whose path the request came.
        route: the version's route.
        body: the body of the request.
        header_bytes: length of its JSON part; None, here and in the result: the whole body is JSON.

    Raises:
        Failure: of any kind.
    """
    with caller.count_rejections(route, infer_body):
        call: InferCall = route.decoder.decode(body, header_bytes)
    inputs, options = call
    manifest = route.lane.manifest
    encoder = V2Encoder(manifest.model, manifest.version, manifest.answered, route.extensions)
    request_options = RequestOptions(options.timeout_s, options.priority)
    return await caller.call(
        route, inputs, options.rows, len(body), lambda reply: encoder.encode(options, reply), request_options
    )
