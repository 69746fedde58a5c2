"""routes_config: GET /v2/models/{model}[/versions/{version}]/config: Triton's model configuration of a version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import ref, reply
from millstream.gateway.http.versioned import versioned
from millstream.gateway.v2.schemas import ModelConfiguration
from millstream.plugins.compat.triton.gateway import Triton

router = APIRouter()

_RESPONSES = reply(
    ref(ModelConfiguration),
    "The configuration in effect, defaults included.",
    example={
        "name": "digits",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": 64,
        "input": [{"name": "pixels", "data_type": "TYPE_FP32", "dims": [64]}],
        "output": [{"name": "label", "data_type": "TYPE_INT64", "dims": [1]}],
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
    },
) | documented(404)


@versioned(
    router,
    "GET",
    "/v2/models/{model}[/versions/{version}]/config",
    ("Configuration of the model's serving version", "Configuration of one version"),
    responses=_RESPONSES,
)
async def model_config(model: str, version: str | None, deps: DepsOf) -> dict[str, Any]:
    return deps.part(Triton).config_of(model, version)
