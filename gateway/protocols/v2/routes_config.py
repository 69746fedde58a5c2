"""routes_config: GET /v2/models/{model}[/versions/{version}]/config: Triton's model configuration of a version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.errors import documented
from millstream.gateway.protocols.http.versioned import versioned

router = APIRouter()

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {
                "example": {
                    "name": "digits",
                    "platform": "onnxruntime_onnx",
                    "backend": "onnxruntime",
                    "max_batch_size": 64,
                    "input": [{"name": "pixels", "data_type": "TYPE_FP32", "dims": [64]}],
                    "output": [{"name": "label", "data_type": "TYPE_INT64", "dims": [1]}],
                    "dynamic_batching": {"max_queue_delay_microseconds": 0},
                }
            }
        }
    },
    **documented(404),
}


@versioned(
    router,
    "GET",
    "/v2/models/{model}[/versions/{version}]/config",
    ("Configuration of the model's serving version", "Configuration of one version"),
    responses=_RESPONSES,
)
async def config(model: str, version: str | None, deps: DepsOf) -> dict[str, Any]:
    return deps.configurations.of(model, version)
