"""known_pools: the pools that an upload or the settings of an endpoint may name."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from millstream.gateway.protocols.http.deps import Deps
from millstream.services.errors import Failure
from millstream.services.placement.pools import unknown_pool
from millstream.services.supervisor.pool_specs import parse_pools


async def known_pools(deps: Deps, model: str) -> set[str]:
    """Return the pools there are: with workers, had workers, in the settings, or named for the model's versions."""
    snapshot = deps.catalog.snapshot
    known = {*snapshot.pools, *parse_pools(deps.settings.pools)}
    view = snapshot.models.get(model)
    known.update(*(version.pools for version in view.versions.values()) if view is not None else ())
    with suppress(Failure):  # without Redis only those that this gateway has seen
        known |= await deps.cluster_state.pools()
    return known


async def check_pools(deps: Deps, model: str, pools: Iterable[str]) -> None:
    """Raise Failure(INVALID), which names the pools that exist, for a pool that there is not."""
    named = set(pools)
    if not named:
        return
    known = await known_pools(deps, model)
    for pool in sorted(named - known):
        raise unknown_pool("config.pools", pool, known)
