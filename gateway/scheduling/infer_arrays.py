"""Runs inputs for adapters that are coroutines."""

from __future__ import annotations

from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS, Caller, RequestOptions
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors.outputs import OutputTensor, own_copies
from millstream.gateway.tensors.request_inputs import Inputs


async def infer_arrays(
    caller: Caller, route: ModelRoute, inputs: Inputs, options: RequestOptions = DEFAULT_OPTIONS
) -> list[OutputTensor]:
    """Run inputs and return copies of all outputs, in the signature's order. Raises Failure."""
    return await caller.call(route, inputs.tensors, inputs.rows, inputs.size_bytes, own_copies, options)
