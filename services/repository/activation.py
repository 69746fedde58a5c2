"""Which version a model's name resolves to: read, decide, compare-and-set, again when somebody was faster."""

from __future__ import annotations

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint
from millstream.services.repository.base import Repository

_TRIES_MAX = 100


def activated(endpoint: Endpoint, version: int) -> Endpoint:
    """`endpoint` with `version` active, and loaded; what was active becomes `previous`."""
    loaded = endpoint.loaded if endpoint.serves(version) else (*(endpoint.loaded or ()), version)
    return endpoint.model_copy(update={"active": version, "previous": endpoint.active, "loaded": loaded})


def endpoint_activate(repository: Repository, model: str, version: int) -> Endpoint:
    """Make `version` the active one; what was active serves until `version` is ready.

    Raises Failure: NOT_FOUND (no such version), CONFLICT (others keep changing the endpoint).
    """
    for attempt in range(1, _TRIES_MAX + 1):
        repository.manifest(model, version)
        endpoint = repository.endpoint(model)
        if endpoint.active == version and endpoint.serves(version):
            return endpoint
        try:
            return repository.replace_endpoint(activated(endpoint, version))
        except Failure as failure:
            if failure.code is not Code.CONFLICT or attempt == _TRIES_MAX:
                raise
    raise AssertionError  # the last attempt returned or raised
