"""KServe's clients with an API key, over REST and gRPC, as a program of their environment: answers out as JSON.

usage: python kserve_keys.py URL HOST:PORT KEY MODEL OTHER     "x" FP32 [2, 4] -> "y"; the key may not run OTHER
"""

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

ROWS = np.ones((2, 4), np.float32)


async def outcome(call: Awaitable[Any]) -> Any:
    """Return the first output of an answer, else the error."""
    try:
        answer = await call
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(answer, dict):
        return answer["predictions"]
    return answer.outputs[0].as_numpy().tolist() if hasattr(answer, "outputs") else answer


def request(model: str, *, binary: bool) -> InferRequest:
    tensor = InferInput("x", [2, 4], "FP32")
    tensor.set_data_from_numpy(ROWS, binary_data=binary)
    return InferRequest(model, [tensor])


async def rest(url: str, key: str, model: str, other: str) -> dict[str, Any]:
    one, two = (InferenceRESTClient(RESTConfig(protocol=protocol, retries=0)) for protocol in ("v1", "v2"))
    rows = {"instances": ROWS.tolist()}

    def headers() -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}  # the client adds its own headers to the dict

    try:
        return {
            "v1": await outcome(one.infer(url, rows, model_name=model, headers=headers())),
            "v2": await outcome(two.infer(url, request(model, binary=False), model_name=model, headers=headers())),
            "binary": await outcome(two.infer(url, request(model, binary=True), model_name=model, headers=headers())),
            "ready": await outcome(two.is_model_ready(url, model, headers=headers())),
            "no key": await outcome(two.infer(url, request(model, binary=False), model_name=model)),
            "other": await outcome(two.infer(url, request(other, binary=False), model_name=other, headers=headers())),
        }
    finally:
        await one.close()
        await two.close()


async def grpc(address: str, key: str, model: str, other: str) -> dict[str, Any]:
    headers = (("authorization", f"Bearer {key}"),)
    async with InferenceGRPCClient(address, retries=0) as client:
        return {
            "infer": await outcome(client.infer(request(model, binary=True), headers=headers)),
            "ready": await outcome(client.is_model_ready(model, headers=headers)),
            "no key": await outcome(client.infer(request(model, binary=True))),
            "other": await outcome(client.infer(request(other, binary=True), headers=headers)),
        }


async def main(url: str, address: str, key: str, model: str, other: str) -> None:
    print(json.dumps({"rest": await rest(url, key, model, other), "grpc": await grpc(address, key, model, other)}))


asyncio.run(main(*sys.argv[1:]))
