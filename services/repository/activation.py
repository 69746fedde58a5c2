"""Decides which version a model's name resolves to, and whose the model is."""

from __future__ import annotations

from millstream.services.model.manifest import Endpoint
from millstream.services.repository.base import Repository
from millstream.services.repository.conflicts import retry_on_conflict


def activated(endpoint: Endpoint, version: int) -> Endpoint:
    """Return `endpoint` with `version` active and loaded; the version that was active becomes `previous`."""
    loaded = endpoint.loaded if endpoint.serves(version) else (*(endpoint.loaded or ()), version)
    return endpoint.model_copy(update={"active": version, "previous": endpoint.active, "loaded": loaded})


def owned(endpoint: Endpoint, owner: str) -> Endpoint:
    """Return `endpoint` with an owner: the name of an API key; "": none."""
    return endpoint.model_copy(update={"placement": endpoint.placement.model_copy(update={"owner": owner})})


def activate_version(repository: Repository, model: str, version: int) -> Endpoint:
    """Make `version` the active one; the version that was active serves until `version` is ready.

    Raises Failure: NOT_FOUND (no such version), CONFLICT (other processes keep changing the endpoint).
    """

    def activate() -> Endpoint:
        repository.manifest(model, version)
        endpoint = repository.endpoint(model)
        if endpoint.active == version and endpoint.serves(version):
            return endpoint
        return repository.replace_endpoint(activated(endpoint, version))

    return retry_on_conflict(activate)
