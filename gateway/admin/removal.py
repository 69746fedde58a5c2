"""Deletes versions, and decides what the model's name resolves to then. Blocking: call it in a thread."""

from __future__ import annotations

from collections.abc import Collection

from millstream.gateway.catalog.snapshot import versions_text
from millstream.services.errors import Code, Failure, Subject, not_found
from millstream.services.model.manifest import Endpoint
from millstream.services.repository.endpoint_changes import retry_on_conflict
from millstream.services.repository.folder import FolderRepository


def remove_version(repository: FolderRepository, model: str, version: int, *, serving: int | None, force: bool) -> None:
    """Delete a version. The endpoint stops naming it first, so that the name never resolves to a missing version.

    `serving`: the version that answers requests without a version; it is deleted only with `force`, and the model goes
    with its only version. Raises Failure: NOT_FOUND; CONFLICT (it is serving, and not `force`).
    """
    versions = repository.versions(model)
    if version not in versions:
        repository.endpoint(model)
        raise not_found(
            f"Request for unknown model: '{model}' version {version} is not found; {versions_text(versions)}",
            Subject.VERSION,
        )
    if version == serving and not force:
        advice = "delete the model, or its only version"
        if len(versions) > 1:
            advice = "activate another version first, or delete it"
        raise Failure(Code.CONFLICT, f"version {version} of '{model}' is serving: {advice} with ?force=true")
    _forget(repository, model, version, serving)
    repository.delete_version(model, version)
    if model not in repository.models():
        return
    if not repository.versions(model):
        repository.delete_model(model, if_empty=True)  # unless a version was published meanwhile
    else:
        _forget(repository, model, version, serving)  # it may have been activated meanwhile


def remove_old_versions(repository: FolderRepository, model: str, kept: int, used: Collection[int] = ()) -> list[int]:
    """Delete all versions of a model but the `kept` newest, the active, the previous and `used` ones; return them."""
    endpoint = repository.endpoint(model)
    old = [
        version
        for version in sorted(repository.versions(model))[:-kept]
        if version not in {endpoint.active, endpoint.previous, *used}
    ]
    for version in old:
        remove_version(repository, model, version, serving=endpoint.active, force=False)
    return old


def _forget(repository: FolderRepository, model: str, version: int, serving: int | None) -> None:
    """Make the endpoint of `model` stop naming `version`."""

    def forget() -> None:
        endpoint = repository.endpoint(model)
        if version in {endpoint.active, endpoint.previous}:
            repository.replace_endpoint(_without(endpoint, version, serving))

    retry_on_conflict(forget)


def _without(endpoint: Endpoint, version: int, serving: int | None) -> Endpoint:
    """Return the endpoint without `version`. If that was active, the version that answers becomes active, if any."""
    previous = None if endpoint.previous == version else endpoint.previous
    if endpoint.active != version:
        return endpoint.model_copy(update={"previous": previous})
    answering = previous if serving in {None, version} else serving
    return endpoint.model_copy(update={"active": answering, "previous": None})
