"""GET /v2/models…: which models there are, their signatures, and whether they are ready."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from millstream.gateway.catalog.snapshot import ModelView, VersionView, version_number
from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.http.errors import documented
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


@router.get("/v2/models/{model}", summary="Signature of the model's serving version", responses=_METADATA)
async def metadata(model: str, deps: DepsOf) -> dict[str, Any]:
    return _metadata(*_find(deps, model, None))


@router.get("/v2/models/{model}/versions/{version}", summary="Signature of one version", responses=_METADATA)
async def metadata_version(model: str, version: str, deps: DepsOf) -> dict[str, Any]:
    return _metadata(*_find(deps, model, version))


@router.get("/v2/models/{model}/ready", summary="Whether the model answers requests", responses=_READY)
async def ready(model: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _ready(_find(deps, model, None)[1], response, deps)


@router.get("/v2/models/{model}/versions/{version}/ready", summary="Whether the version is ready", responses=_READY)
async def ready_version(model: str, version: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _ready(_find(deps, model, version)[1], response, deps)


def _find(deps: Deps, model: str, version: str | None) -> tuple[ModelView, VersionView]:
    """Raises Failure(NOT_FOUND); for a version that is not a number the path does not exist, as in the v2 reference."""
    view = deps.catalog.snapshot.model(model)
    return view, view.version(None if version is None else version_number(model, version))


def _metadata(model: ModelView, version: VersionView) -> dict[str, Any]:
    serving = [number for number, view in sorted(model.versions.items()) if view.ready]
    return model_metadata(version.manifest, serving)


def _ready(view: VersionView, response: Response, deps: Deps) -> dict[str, Any]:
    name = view.manifest.model
    if view.ready and deps.answering(view.manifest.content_id):
        return {"name": name, "ready": True}
    response.status_code = 503
    why = (
        "no recent inference came back"
        if view.ready
        else f"{view.state}: {view.reason}"
        if view.reason
        else str(view.state)
    )
    return {
        "name": name,
        "ready": False,
        "error": f"model '{name}' version {view.manifest.version} is not ready: {why}",
    }
