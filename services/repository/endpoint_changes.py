"""Changes endpoints: reads, decides, compares and sets; once more when another process wrote in between.

Which version a model's name resolves to, in which pools and how often the model is loaded, its owner and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.manifest import Endpoint, EndpointPlacement
from millstream.services.model.names import check_name
from millstream.services.nearest_names import unknown_key
from millstream.services.placement.pools import unknown_pool
from millstream.services.repository.folder import FolderRepository

TRIES_MAX = 100  # then the caller gets the CONFLICT; each failed try means that another process succeeded
Written = TypeVar("Written")


def retry_on_conflict(change: Callable[[], Written]) -> Written:
    """Call `change` until it raises no Failure(CONFLICT), at most TRIES_MAX times, and return its result.

    Args:
        change: reads, decides and writes; it reads again at each call.

    Raises:
        Failure: what `change` raises; CONFLICT if its last try met a conflict, too.
    """
    for _ in range(TRIES_MAX - 1):
        try:
            return change()
        except Failure as failure:
            if failure.code is not Code.CONFLICT:
                raise
    return change()


def activate_version(repository: FolderRepository, model: str, version: int) -> Endpoint:
    """Make `version` the active one; the version that was active serves until `version` is ready.

    Raises Failure: NOT_FOUND (no such version), CONFLICT (other processes keep changing the endpoint).
    """

    def activate() -> Endpoint:
        repository.manifest(model, version)
        endpoint = repository.endpoint(model)
        if endpoint.active == version and endpoint.serves(version):
            return endpoint
        return repository.replace_endpoint(endpoint.with_active(version))

    return retry_on_conflict(activate)


def configure(
    repository: FolderRepository,
    model: str,
    changes: Mapping[str, Any],
    pools: Collection[str],
    check: Callable[[EndpointPlacement], None] = lambda _: None,
) -> Endpoint:
    """Change the settings of a model's endpoint.

    Args:
        repository: holds the endpoint.
        model: its name.
        changes: field -> value; None restores the default. Of `labels`, those that are named: None removes one.
        pools: the pools there are.
        check: called with the new settings before they are stored.

    Raises Failure: INVALID (an unknown field or pool, contradicting limits), NOT_FOUND, CONFLICT (other processes keep
    changing the endpoint); what `check` raises.
    """

    def change() -> Endpoint:
        endpoint = repository.endpoint(model)
        settings = changed(endpoint.placement, changes, pools)
        if settings == endpoint.placement:
            return endpoint
        check(settings)
        return repository.replace_endpoint(endpoint.model_copy(update={"placement": settings}))

    return retry_on_conflict(change)


def changed(before: EndpointPlacement, changes: Mapping[str, Any], pools: Collection[str]) -> EndpointPlacement:
    """Return the settings after `changes`. Raises Failure(INVALID)."""
    if "capture_samples" in changes:
        raise invalid(
            "capture_samples: live requests are no longer captured: send samples (`millstream race --samples`)"
        )
    for name in changes:
        if name not in EndpointPlacement.model_fields:
            raise invalid(unknown_key(name, EndpointPlacement.model_fields, "setting"))
    kept = {name: value for name, value in before.model_dump().items() if name not in changes}
    given = {name: value for name, value in changes.items() if value is not None}
    if isinstance(labels := given.get("labels"), Mapping):
        given["labels"] = {name: value for name, value in {**before.labels, **labels}.items() if value is not None}
    try:
        settings = EndpointPlacement.model_validate(kept | given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise invalid(where + first["msg"].removeprefix("Value error, ")) from None
    for pool in settings.pools if "pools" in changes else ():
        check_name(pool, "pools")
        if pool not in pools:
            raise unknown_pool("pools", pool, pools)
    return settings


def warnings(settings: EndpointPlacement, workers: Mapping[str, int], *, leads: bool) -> list[str]:
    """Return what keeps settings from having an effect now, one sentence each.

    Args:
        settings: of an endpoint.
        workers: the number of live workers of each pool.
        leads: whether a controller leads.
    """
    found = [f"pool {pool} has no worker now" for pool in settings.pools if not workers.get(pool)]
    able = sum(workers.get(pool, 0) for pool in settings.pools or workers)
    if able < settings.instances_min:
        found.append(f"instances_min is {settings.instances_min}, and its pools have {able} workers now")
    if not leads and (settings.instances_min or settings.idle_s):
        found.append("no controller runs: instances_min and idle_s have no effect until one does")
    return found
