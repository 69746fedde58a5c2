"""KServe's own REST client, both protocols, run by the clients' environment: URL and model names in, answers out as
JSON.
"""

import asyncio
import json
import sys
from typing import Any

from kserve import InferenceRESTClient, RESTConfig
from kserve.protocol.infer_type import InferInput, InferRequest


async def refused(call: Any) -> str:
    try:
        await call
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


async def v1(url: str, model: str) -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v1", retries=0))
    rows = [[float(column) for column in range(64)]]
    try:
        return {
            "predict": await client.infer(url, {"instances": rows}, model_name=model),
            "ready": await client.is_model_ready(url, model),
            "unknown_ready": await refused(client.is_model_ready(url, "nope")),
            "bad": await refused(client.infer(url, {"instances": 1}, model_name=model)),
            "unknown": await refused(client.infer(url, {"instances": rows}, model_name="nope")),
            "explain": await refused(client.explain(url, model, {"instances": rows})),
        }
    finally:
        await client.close()


async def v2(url: str, model: str) -> dict[str, Any]:
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    tensor = InferInput("input", [1, 64], "FP32", data=[float(column) for column in range(64)])
    try:
        reply = await client.infer(url, InferRequest(model, [tensor]), model_name=model)
        return {
            "infer": reply.outputs[0].as_numpy().tolist(),
            "ready": await client.is_model_ready(url, model),
            "server_ready": await client.is_server_ready(url),
            "server_live": await client.is_server_live(url),
        }
    finally:
        await client.close()


async def main() -> None:
    url, model = sys.argv[1:]
    print(json.dumps({"v1": await v1(url, model), "v2": await v2(url, model)}))


asyncio.run(main())
