"""infer_arrays: what adapters that are coroutines do between a body and a reply, beside their own reading and writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.scheduling.caller import TERMS, Caller, Terms
from gateway.scheduling.router import Route
from gateway.tensors.nested import Inputs, owned
from gateway.tensors.outputs import OutputTensor
from services.errors import Failure


@contextmanager
def turning_away(route: Route) -> Iterator[None]:
    """What is refused in the block counts as a refused request of the route's version."""
    try:
        yield
    except Failure as failure:
        route.lane.turned_away(failure.code)
        raise


async def ask(caller: Caller, route: Route, inputs: Inputs, terms: Terms = TERMS) -> list[OutputTensor]:
    """The outputs, all of them, in the signature's order; they may be kept. Raises Failure."""
    return await caller.call(route, inputs.tensors, inputs.rows, inputs.size_bytes, owned, terms)
