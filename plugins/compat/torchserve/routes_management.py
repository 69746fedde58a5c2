"""/models: TorchServe's management API or SageMaker's multi-model containers, as SAGEMAKER_MULTI_MODEL says.

Both use the functions of the admin API and are protected as it is. A POST with a JSON body is SageMaker's.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from millstream.gateway.access.principal import require
from millstream.gateway.admin import routes_models as admin_models
from millstream.gateway.admin.removal import remove_version
from millstream.gateway.admin.upload import Upload, content, locate, receive, wait_until_ready
from millstream.gateway.catalog.snapshot import ModelView, VersionView, name_excerpt, visible
from millstream.gateway.http.adapter import versioned
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body, list_of, ref, reply
from millstream.plugins.compat.torchserve import documents
from millstream.plugins.compat.torchserve.schemas import (
    DescribedVersion,
    ListedModel,
    ListedModels,
    LoadModel,
    ManagementStatus,
)
from millstream.plugins.compat.torchserve.settings import TorchServeSettings
from millstream.services.access.scopes import Need
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.manifest import Manifest
from millstream.services.placement.pools import pools_text
from millstream.services.process.audit import audit, audited
from millstream.services.process.threads import in_storage_thread
from millstream.services.settings import settings_of
from millstream.services.wire.records import State

router = APIRouter(responses=documented(400))

_DESCRIPTIONS = reply(list_of(DescribedVersion), "The versions.")
_DONE = reply(ref(ManagementStatus), "Done.")
_LOAD_S_MAX = 600.0
_UNLOAD_S_MAX = 300.0  # SageMaker waits for 360 s
_LOOK_S = 0.2  # a worker whose record lost a removed model changes no model, and so no snapshot
_BODY_BYTES_MAX = 64 * 1024


@router.get("/models", summary="List models", responses=reply(ref(ListedModels), "A page of models."))
async def torchserve_list_models(
    deps: DepsOf,
    limit: Annotated[int, Query(ge=1, le=documents.LIMIT_MAX)] = 100,
    next_page_token: Annotated[str | None, Query()] = None,
) -> dict[str, Any]:
    return documents.page(visible(deps.catalog.snapshot), limit, next_page_token)


@router.get("/models/{model}/all", summary="Describe all versions", responses=_DESCRIPTIONS | documented(404))
async def torchserve_describe_all_versions(model: str, deps: DepsOf) -> list[dict[str, Any]]:
    view, _ = documents.find(deps.catalog.snapshot, model, None)
    return [_description(deps, view, version) for _, version in sorted(view.versions.items())]


@versioned(
    router,
    "GET",
    "/models/{model}[/{version}]",  # after /models/{model}/all: "all" is not a version
    ("Describe a model", "Describe one version"),
    description="SageMaker's callers get an object with the model's name and URL for a model, in place of the list.",
    responses=reply(
        {"anyOf": [list_of(DescribedVersion), ref(ListedModel)]}, "A list of one version, or a model for SageMaker."
    )
    | documented(404),
)
async def torchserve_describe_model(model: str, version: str | None, deps: DepsOf) -> Any:
    if version is None and settings_of(deps.settings, TorchServeSettings).sagemaker_multi_model:
        view = deps.catalog.snapshot.models.get(model)
        if view is None:
            raise documents.unknown_model(deps.catalog.snapshot, model)
        return {"modelName": model, "modelUrl": documents.model_url(view)}
    return [_description(deps, *documents.find(deps.catalog.snapshot, model, version))]


@versioned(
    router,
    "PUT",
    "/models/{model}[/{version}]",
    (
        "Scale: changes nothing, reports the number of workers",
        "Scale one version: changes nothing, reports its workers",
    ),
    responses=_DONE | documented(404),
)
async def torchserve_scale_model(model: str, version: str | None, deps: DepsOf) -> dict[str, str]:
    return _workers(*documents.find(deps.catalog.snapshot, model, version))


@router.put(
    "/models/{model}/{version}/set-default",
    summary="Make this the version that answers",
    responses=_DONE | documented(404, 409, 503, 507),
)
async def torchserve_set_default_version(model: str, version: str, deps: DepsOf) -> dict[str, str]:
    _, view = documents.find(deps.catalog.snapshot, model, version)
    number = view.manifest.version
    await admin_models.activate_version(model, number, deps)
    return {"status": f'Default version successfully updated for model "{model}" to "{number}"'}


@versioned(
    router,
    "DELETE",
    "/models/{model}[/{version}]",
    ("Unregister a model of one version", "Unregister one version"),
    responses=_DONE | documented(404, 503),
)
async def torchserve_unregister_model(model: str, version: str | None, deps: DepsOf) -> dict[str, str]:
    return await _unregister(deps, model, version)


@router.post(
    "/models",
    summary="Register a model from a file of this machine",
    description="TorchServe: `url` is a path below MILLSTREAM_IMPORT_DIR. SageMaker: a JSON body with `model_name` and "
    "`url`. Nothing is fetched from other machines.",
    responses=_DONE | documented(404, 409, 413, 415, 501, 503, 507),
    openapi_extra=json_body(LoadModel, required=False),
)
async def torchserve_register_model(
    request: Request,
    deps: DepsOf,
    url: Annotated[str | None, Query(description="A file, or a folder with model.onnx in it.")] = None,
    model_name: Annotated[str | None, Query(description="Default: the file's name.")] = None,
    synchronous: Annotated[bool, Query(description="Answer when it is ready.")] = False,
) -> dict[str, str]:
    if url is None:
        wanted = await _read_load(request, deps)
        require(Need.WRITE, wanted.model_name)
        if wanted.model_name in deps.catalog.snapshot.models:
            raise Failure(Code.CONFLICT, f"model '{name_excerpt(wanted.model_name)}' is already loaded")
        return await cancel_on_disconnect(request, _load_container(deps, wanted))
    return await cancel_on_disconnect(request, _load(deps, url, model_name, wait=synchronous))


async def _read_load(request: Request, deps: Deps) -> LoadModel:
    async with decompressed_body(request, deps) as body:
        if len(body) > _BODY_BYTES_MAX:
            raise Failure(Code.TOO_LARGE, f"the request body is larger than the limit of {_BODY_BYTES_MAX} bytes")
        if not body:
            raise invalid("name the model's file: ?url=PATH, or a JSON body with 'model_name' and 'url'")
        try:
            return LoadModel.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise invalid(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from None


async def _load_container(deps: Deps, wanted: LoadModel) -> dict[str, str]:
    """Register a model of a multi-model container and load it; without memory for it, nothing stays.

    Raises Failure(STORAGE) then: the status 507 makes SageMaker unload another model and try again.
    """
    manifest = await _register(deps, wanted.url, wanted.model_name)
    try:
        await deps.load(manifest, _LOAD_S_MAX)
    except Failure as failure:
        if failure.code is Code.MODEL:
            raise invalid(failure.message) from None
        if failure.code is not Code.MEMORY:
            raise
        await admin_models.delete_model(manifest.model, deps)
        raise Failure(Code.STORAGE, failure.message) from None
    return _registered(deps, manifest)


async def _load(deps: Deps, url: str, name: str | None, *, wait: bool) -> dict[str, str]:
    manifest = await _register(deps, url, name)
    if wait:
        await wait_until_ready(deps, manifest, _LOAD_S_MAX)
        _check_serves(deps, manifest)
    return _registered(deps, manifest)


async def _register(deps: Deps, url: str, name: str | None) -> Manifest:
    path = await asyncio.to_thread(locate, settings_of(deps.settings, TorchServeSettings).importable_dir, url)
    upload = Upload(name or path.name.partition(".")[0], None, None, None, activate=True, form=None, url=url)
    return (await receive(deps, upload, content(path))).manifest


def _registered(deps: Deps, manifest: Manifest) -> dict[str, str]:
    workers = len(deps.catalog.snapshot.model(manifest.model).version(manifest.version).replicas)
    return {"status": f'Model "{manifest.model}" Version: {manifest.version} registered with {workers} initial workers'}


def _check_serves(deps: Deps, manifest: Manifest) -> None:
    view = deps.catalog.snapshot.model(manifest.model).version(manifest.version)
    if view.state is State.FAILED:
        raise invalid(f"version {manifest.version} of '{manifest.model}' cannot be served: {view.reason}")


def _description(deps: Deps, model: ModelView, view: VersionView) -> dict[str, Any]:
    waiting = 0
    try:
        route = deps.caller("torchserve").find(model.name, str(view.manifest.version))
        waiting = route.lane.waiting
    except Failure:  # no lane yet, so no request waits
        pass
    default = model.serving == view.manifest.version
    return documents.description(view, default=default, waiting=waiting, waiting_max=deps.settings.queue_rows_max)


def _workers(model: ModelView, view: VersionView) -> dict[str, str]:
    """Return how many workers have loaded a version. A pool's workers serve all its models, so none scales for one."""
    count = len(view.replicas)
    return {
        "status": f"{count} workers of {pools_text(view.pools)} hold version {view.manifest.version} of "
        f"model '{model.name}'; workers are shared by the models of a pool: scale the pool"
    }


async def _unregister(deps: Deps, name: str, version: str | None) -> dict[str, str]:
    await deps.catalog.refresh()
    snapshot = deps.catalog.snapshot
    if settings_of(deps.settings, TorchServeSettings).sagemaker_multi_model and version is None:
        return await _unload_container(deps, name)
    model, view = documents.find(snapshot, name, version)
    number = view.manifest.version
    try:
        with audited("delete", name, version=number):
            only = len(model.versions) == 1  # the model goes with it
            await in_storage_thread(remove_version, deps.repository, name, number, serving=model.serving, force=only)
        audit("deleted", name, version=number)
    except Failure as failure:
        if failure.code is Code.CONFLICT:
            raise HTTPException(403, f"Cannot remove default version {number} for model {name}") from None
        raise
    await deps.catalog.announce(name)
    return {"status": f'Model "{name}" unregistered'}


async def _unload_container(deps: Deps, name: str) -> dict[str, str]:
    """Remove a model of a multi-model container; return when its memory is free, which SageMaker counts on."""
    await admin_models.delete_model(name, deps)
    until = time.monotonic() + _UNLOAD_S_MAX
    while any(one.model == name for worker in deps.catalog.snapshot.workers for one in worker.instances):
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise Failure(Code.UNAVAILABLE, f"model '{name}' is not unloaded yet: its requests run", retry_after_s=1)
        await deps.catalog.next_change(min(left_s, _LOOK_S))
    return {"status": f'Model "{name}" unregistered'}
