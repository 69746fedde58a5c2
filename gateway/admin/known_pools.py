"""The pools that an upload or the settings of an endpoint may name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from millstream.gateway.http.deps import Deps
from millstream.services.errors import Failure, invalid
from millstream.services.model.formats import ONNX, backend_of
from millstream.services.placement.pools import pools_text, unknown_pool
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


def loaded_formats(deps: Deps, named: Collection[str]) -> frozenset[str]:
    """Return the formats that the workers load of the pools that may serve a model; empty if some are not known."""
    pools = deps.catalog.snapshot.pools
    traits = [pools.get(pool) for pool in named or {*pools, *parse_pools(deps.settings.pools)}]
    if not all(one is not None and one.formats for one in traits):
        return frozenset()
    return frozenset(one for found in traits if found is not None for one in found.formats)


def check_format(deps: Deps, named: Collection[str], source_format: str) -> None:
    """Raise Failure(INVALID) if workers of all pools that may serve a model load other formats than its own.

    A pool whose workers were never seen may load any. Every installation has a backend for ONNX, or is to have one.
    """
    if source_format == ONNX:
        return
    pools = deps.catalog.snapshot.pools
    traits = [pools.get(pool) for pool in named or {*pools, *parse_pools(deps.settings.pools)}]
    if traits and all(one is not None and one.formats and source_format not in one.formats for one in traits):
        backend = backend_of(source_format)
        raise invalid(
            f"no worker of {pools_text(sorted(named or pools))} loads {source_format}: start workers that do, like "
            f"`millstream up --pool {backend}=1,backend={backend}`"
        )
