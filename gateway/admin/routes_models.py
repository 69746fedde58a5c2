"""The admin API for existing models and versions: list, activate, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from millstream.gateway.access.principal import shown
from millstream.gateway.admin import schemas_models as schemas
from millstream.gateway.admin.removal import remove_version
from millstream.gateway.admin.standby_reasons import add_standby_reasons
from millstream.gateway.catalog.parts import check_unused
from millstream.gateway.catalog.snapshot import ModelView, visible
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.services.access.scopes import Need
from millstream.services.errors import Code, Failure, not_found
from millstream.services.model.manifest import LABELS_MAX
from millstream.services.model.usage import usage_of
from millstream.services.plugin.registry import contributions
from millstream.services.process.audit import audit, audited
from millstream.services.process.threads import in_storage_thread
from millstream.services.repository import endpoint_changes
from millstream.services.wire.records import State

router = APIRouter(prefix="/admin/v1")


@router.get(
    "/models", summary="All models and their versions, or those of an owner, or with labels", responses=documented(400)
)
async def list_models(
    deps: DepsOf,
    label: Annotated[
        list[Annotated[str, Field(pattern="=")]],
        Query(default_factory=list, max_length=LABELS_MAX, description="NAME=VALUE: a label that each of them has."),
    ],
    owner: Annotated[str | None, Query(description="Name of the API key that owns them; empty: none does.")] = None,
) -> schemas.Models:
    snapshot = visible(deps.catalog.snapshot, Need.READ)
    uploads = {at: state for at, state in deps.catalog.uploads.items() if shown([at[0]], Need.READ)}
    if owner is not None or label:
        labels = dict(one.split("=", 1) for one in label).items()
        models = {
            name: view
            for name, view in snapshot.models.items()
            if owner in {None, view.placement.owner} and labels <= view.placement.labels.items()
        }
        snapshot = replace(snapshot, models=models)
        uploads = {at: state for at, state in uploads.items() if at[0] in snapshot.models}
    return schemas.models(snapshot, uploads)


@router.get("/models/{name}", summary="One model and its versions", responses=documented(404))
async def get_model(name: str, deps: DepsOf) -> schemas.Model:
    model = schemas.model(name, deps.catalog.snapshot, deps.catalog.uploads)
    await asyncio.to_thread(_add_details, deps, model.versions)
    await add_standby_reasons(deps, model.versions)
    return model


def _add_details(deps: Deps, versions: Sequence[schemas.Version]) -> None:
    """Say how the versions are called, and read the reports of their variants, and what plug-ins add. Blocking."""
    model = deps.catalog.snapshot.models.get(versions[0].model) if versions else None
    for version in versions:
        view = model.versions.get(version.version) if model is not None and version.version is not None else None
        if view is not None:
            version.usage = usage_of(view.manifest)
            if shown([version.model], Need.WRITE):  # a text may have what a caller sent
                version.errors = schemas.run_errors(view)
            found = deps.repository.variants.reports(view.manifest)
            version.variants = [schemas.Variant.of(name, report) for name, report in found.items()]
            for section in contributions("model_section", FunctionType):
                for key, value in section(deps, view.manifest).items():
                    setattr(version, key, value)


@router.get(
    "/models/{name}/versions/{version}",
    summary="One version: its state, signature and instances",
    responses=documented(400, 404),
)
async def get_version(name: str, version: int, deps: DepsOf) -> schemas.Version:
    document = schemas.version(name, version, deps.catalog.snapshot, deps.catalog.uploads)
    await asyncio.to_thread(_add_details, deps, [document])
    await add_standby_reasons(deps, [document])
    return document


@router.post(
    "/models/{name}/versions/{version}/activate",
    summary="Make this the version that answers",
    description="The previous version answers until this one is ready: no request fails in between. A version that "
    "workers refuse to load, because loading it ended processes or took too long, is tried again; one whose batching "
    "turned off is batched again.",
    responses=documented(400, 404, 409, 503, 507),
)
async def activate_version(name: str, version: int, deps: DepsOf) -> schemas.Model:
    with audited("activate", name, version=version):
        await _activate(name, version, deps)
    audit("activated", name, version=version)
    return schemas.model(name, deps.catalog.snapshot, deps.catalog.uploads)


async def _activate(name: str, version: int, deps: Deps) -> None:
    await deps.catalog.refresh()
    view = deps.catalog.snapshot.model(name).published(version)
    if view.verdict.failures or view.verdict.batching_off:  # the operator asks for another try
        await in_storage_thread(deps.repository.verdicts.clear, view.manifest)
    elif view.state is State.FAILED:
        again = f"`millstream load {name}` (POST /v2/repository/models/{name}/load) tries it again; then activate it"
        message = f"version {version} of '{name}' failed and cannot be activated: {view.reason}; {again}"
        raise Failure(Code.CONFLICT, message)
    await in_storage_thread(endpoint_changes.activate_version, deps.repository, name, version)
    await deps.catalog.announce(name)


@router.delete(
    "/models/{name}/versions/{version}",
    status_code=204,
    summary="Delete a version",
    description="The serving version, and one that a graph runs, is deleted with `force` only, and the model with its "
    "only version. "
    "Numbers of deleted versions are not used again while the model exists.",
    responses=documented(400, 404, 409, 503),
)
async def delete_version(
    name: str,
    version: int,
    deps: DepsOf,
    force: Annotated[bool, Query(description="Delete the version even if it is serving, or a graph runs it.")] = False,
) -> None:
    await deps.catalog.refresh()
    serving = _serving(deps.catalog.snapshot.models.get(name))
    with audited("delete", name, version=version), _nearest_names(name, deps):
        if not force:
            check_unused(deps.catalog.snapshot.models, name, version)
        await in_storage_thread(remove_version, deps.repository, name, version, serving=serving, force=force)
    audit("deleted", name, version=version)
    await deps.catalog.announce(name)


@router.delete(
    "/models/{name}",
    status_code=204,
    summary="Delete a model with all its versions",
    responses=documented(400, 404, 409, 503),
)
async def delete_model(
    name: str,
    deps: DepsOf,
    force: Annotated[bool, Query(description="Delete the model even if graphs run its versions.")] = False,
) -> None:
    await deps.catalog.refresh()
    with audited("delete", name), _nearest_names(name, deps):
        if not force:
            check_unused(deps.catalog.snapshot.models, name)
        await in_storage_thread(deps.repository.delete_model, name)
    audit("deleted", name)
    await deps.catalog.announce(name)


@contextmanager
def _nearest_names(name: str, deps: Deps) -> Iterator[None]:
    """Add the names that resemble `name` to a Failure(NOT_FOUND) of the block about an unknown model."""
    try:
        yield
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND or name in deps.catalog.snapshot.models:
            raise
        raise not_found(f"{failure.message}{deps.catalog.snapshot.did_you_mean(name)}", failure.subject) from None


def _serving(view: ModelView | None) -> int | None:
    """Return the version that answers; None if it has failed: `serving` names a failed version if there is no other."""
    if view is None or view.serving is None:
        return None
    version = view.versions.get(view.serving)
    return None if version is None or version.state is State.FAILED else view.serving
