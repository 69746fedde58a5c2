"""GET /v2/models…: names of models, their signatures, and whether they are ready."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from millstream.gateway.catalog.snapshot import ModelView, VersionView, version_number
from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.http.errors import documented
from millstream.gateway.protocols.http.versioned import versioned
from millstream.gateway.protocols.v2.metadata import model_metadata

router = APIRouter()

_METADATA: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {
                "example": {
                    "name": "digits",
                    "versions": ["1"],
                    "platform": "onnxruntime_onnx",
                    "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 64]}],
                    "outputs": [{"name": "label", "datatype": "INT64", "shape": [-1]}],
                }
            }
        }
    },
    **documented(404),
}
_READY: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"example": {"name": "digits", "ready": True}}}},
    **documented(404),
    503: {
        "description": "Not ready.",
        "content": {
            "application/json": {
                "example": {"name": "digits", "ready": False, "error": "model 'digits' version 1 is not ready: loading"}
            }
        },
    },
}


@router.get("/v2/models", summary="Names of the models that answer requests")
async def names(deps: DepsOf) -> dict[str, list[str]]:
    models = deps.catalog.snapshot.models
    return {"models": sorted(name for name, view in models.items() if view.serving is not None)}


@versioned(
    router,
    "GET",
    "/v2/models/{model}[/versions/{version}]",
    ("Signature of the model's serving version", "Signature of one version"),
    responses=_METADATA,
)
async def metadata(model: str, version: str | None, deps: DepsOf) -> dict[str, Any]:
    view, wanted = _find(deps, model, version)
    serving = [number for number, one in sorted(view.versions.items()) if one.ready]
    return model_metadata(wanted.manifest, serving)


@versioned(
    router,
    "GET",
    "/v2/models/{model}[/versions/{version}]/ready",
    ("Whether the model answers requests", "Whether the version is ready"),
    responses=_READY,
)
async def ready(model: str, version: str | None, deps: DepsOf, response: Response) -> dict[str, Any]:
    _, view = _find(deps, model, version)
    name = view.manifest.model
    if view.ready and deps.answering(view.manifest.content_id):
        return {"name": name, "ready": True}
    response.status_code = 503
    return {
        "name": name,
        "ready": False,
        "error": f"model '{name}' version {view.manifest.version} is not ready: {_why(view)}",
    }


def _why(view: VersionView) -> str:
    if view.ready:
        return "no recent inference came back"
    return f"{view.state}: {view.reason}" if view.reason else str(view.state)


def _find(deps: Deps, model: str, version: str | None) -> tuple[ModelView, VersionView]:
    """Find a version. Raises Failure(NOT_FOUND), also where `version` is not a number, as the v2 reference does."""
    view = deps.catalog.snapshot.model(model)
    return view, view.version(None if version is None else version_number(model, version))
