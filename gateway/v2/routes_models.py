"""GET /v2, /v2/health/… and /v2/models…: metadata and readiness of the server and its models; all routes of v2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Response

from millstream.gateway.catalog.snapshot import ModelView, VersionView, version_number, visible
from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag, versioned
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import ref, reply
from millstream.gateway.v2 import routes_infer, schemas
from millstream.gateway.v2.schemas import ModelMetadata, ModelNames, ModelReady, ServerLive, ServerMetadata, ServerReady
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.version import VERSION

router = APIRouter()


@router.get(
    "/v2",
    summary="Name, version and protocol extensions of the server",
    responses=reply(ref(ServerMetadata), "The server.", example=schemas.server_metadata(VERSION, schemas.EXTENSIONS)),
)
@router.get("/v2/", include_in_schema=False)
async def server_metadata(deps: DepsOf) -> dict[str, Any]:
    return schemas.server_metadata(deps.version, schemas.extensions())


@router.get(
    "/v2/health/live",
    summary="The process answers",
    responses=reply(ref(ServerLive), "It is live.", example={"live": True}),
)
async def server_live() -> dict[str, Any]:
    return {"live": True}


@router.get(
    "/v2/health/ready",
    summary="Whether a recent readiness probe came back through the queue",
    responses={
        **reply(ref(ServerReady), "It is ready.", example={"ready": True}),
        **reply(
            ref(ServerReady),
            "Not ready.",
            example={"ready": False, "error": "the server is not ready: no recent inference came back"},
            status=503,
        ),
    },
)
async def server_ready(deps: DepsOf, response: Response) -> dict[str, Any]:
    if deps.ready():
        return {"ready": True}
    response.status_code = 503
    why = "models of the start are being loaded" if deps.preloading() else "no recent inference came back"
    return {"ready": False, "error": f"the server is not ready: {why}"}


_METADATA = reply(
    ref(ModelMetadata),
    "The signature of the version.",
    example={
        "name": "digits",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}],
        "outputs": [{"name": "label", "datatype": "INT64", "shape": [-1]}],
    },
) | documented(404)
_READY: dict[int | str, dict[str, Any]] = {
    **reply(ref(ModelReady), "It is ready.", example={"name": "digits", "ready": True}),
    **documented(404),
    **reply(
        ref(ModelReady),
        "Not ready.",
        example={"name": "digits", "ready": False, "error": "model 'digits' version 1 is not ready: loading"},
        status=503,
    ),
}


@router.get(
    "/v2/models",
    summary="Names of the models that answer requests",
    responses=reply(ref(ModelNames), "The names, in order.", example={"models": ["digits"]}),
)
async def list_model_names(deps: DepsOf) -> dict[str, list[str]]:
    models = visible(deps.catalog.snapshot).models
    return {"models": sorted(name for name, view in models.items() if view.serving is not None)}


@versioned(
    router,
    "GET",
    "/v2/models/{model}[/versions/{version}]",
    ("Signature of the model's serving version", "Signature of one version"),
    responses=_METADATA,
)
async def model_metadata(model: str, version: str | None, deps: DepsOf) -> dict[str, Any]:
    view, version_view = _find(deps, model, version)
    ready_versions = [number for number, other in sorted(view.versions.items()) if other.available]
    manifest = version_view.manifest
    return {**schemas.model_metadata(manifest, ready_versions), **schemas.usage_parameters(manifest)}


@versioned(
    router,
    "GET",
    "/v2/models/{model}[/versions/{version}]/ready",
    ("Whether the model answers requests", "Whether the version is ready"),
    responses=_READY,
)
async def model_ready(model: str, version: str | None, deps: DepsOf, response: Response) -> dict[str, Any]:
    _, view = _find(deps, model, version)
    name = view.manifest.model
    if view.available and deps.answering(view.manifest.content_id):
        if view.ready:
            return {"name": name, "ready": True}
        return {"name": name, "ready": True, "load_s": round(deps.load_s(view), 3)}
    response.status_code = 503
    return {
        "name": name,
        "ready": False,
        "error": f"model '{name}' version {view.manifest.version} is not ready: {_why(view)}",
    }


def _why(view: VersionView) -> str:
    if view.available:
        return "no recent inference came back"
    return f"{view.state}: {view.reason}" if view.reason else str(view.state)


def _find(deps: Deps, model: str, version: str | None) -> tuple[ModelView, VersionView]:
    """Return a model and a version. Raises Failure(NOT_FOUND), also if `version` is not a number, as in Triton."""
    view = deps.catalog.snapshot.model(model)
    return view, view.version(None if version is None else version_number(model, version))


INFERENCE = Tag("v2 inference", "The Open Inference Protocol v2, with Triton's binary tensors.", Place.OPEN)

VERSIONED = ("", "/versions/{version}")


def _rows() -> Iterator[tuple[tuple[str, str], Row]]:
    for version in VERSIONED:
        path = f"/v2/models/{{model}}{version}"
        yield ("POST", f"{path}/infer"), Row(Need.INFER, "model")
        for rest in ("", "/ready"):
            yield ("GET", f"{path}{rest}"), Row(Need.DESCRIBE, "model")
    for path in ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready"):
        yield ("GET", path), Row(Need.OPEN)
    yield ("GET", "/v2/models"), LIST


ADAPTER = Adapter(
    routes=(
        Routes(routes_infer.router, INFERENCE, order=0),
        Routes(router, INFERENCE, order=40),
    ),
    access=dict(_rows()),
    protocols=(RequestProtocol.V2,),
    schemas=schemas.SCHEMAS,
)
