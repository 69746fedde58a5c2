"""KServe's gRPC client, as a program of its environment: its messages and tritonclient's cannot be in one process.

usage: python kserve_grpc_client.py HOST:PORT MODEL          "x" FP32 [2, 3] -> "y", the same
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest


async def until(ask: Callable[[], Awaitable[bool]]) -> bool:
    """Ask until the answer is yes: a server whose worker was held up is not ready for a moment."""
    while not await ask():
        await asyncio.sleep(0.1)
    return True


async def main(url: str, model: str) -> None:
    client = InferenceGRPCClient(url, timeout=240)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = {
        "live": await client.is_server_live(),
        "ready": await until(client.is_server_ready),
        "model": await until(partial(client.is_model_ready, model)),
    }
    for name, binary in (("raw", True), ("typed", False)):
        tensor = InferInput("x", [2, 3], "FP32")
        tensor.set_data_from_numpy(values, binary_data=binary)
        reply = await client.infer(InferRequest(model, [tensor], request_id="k"))
        found[name] = [reply.id, reply.model_name, reply.outputs[0].as_numpy().tolist()]
    print(json.dumps(found))


asyncio.run(main(*sys.argv[1:]))
