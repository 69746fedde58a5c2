"""infer_arrays: what adapters that are coroutines do between a body and a reply, beside their own reading and writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS, Caller, RequestOptions
from millstream.gateway.scheduling.router import ModelRoute
from millstream.gateway.tensors.outputs import OutputTensor, own_copies
from millstream.gateway.tensors.request_inputs import Inputs
from millstream.services.errors import Failure


@contextmanager
def count_rejections(route: ModelRoute) -> Iterator[None]:
    """What is refused in the block counts as a refused request of the route's version."""
    try:
        yield
    except Failure as failure:
        route.lane.record_rejection(failure.code)
        raise


async def infer_arrays(
    caller: Caller, route: ModelRoute, inputs: Inputs, terms: RequestOptions = DEFAULT_OPTIONS
) -> list[OutputTensor]:
    """The outputs, all of them, in the signature's order; they may be kept. Raises Failure."""
    return await caller.call(route, inputs.tensors, inputs.rows, inputs.size_bytes, own_copies, terms)
