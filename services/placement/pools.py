"""Which pools may serve a version, and in which order. Pure.

workers' records ─> learn ─> traits of each pool ─┐
endpoint's pools, else the version's, else ───────┴─> pools_of ─> pools, the preferred one first
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.nearest_names import nearest
from millstream.services.wire.records import WorkerRecord

POOL_DEFAULT = "cpu"  # serves a version that names no pool while no worker has been seen
POOLS_NAMED_MAX = 20  # in a message
CPU = "cpu"  # the device of workers without an accelerator


class PoolTraits(NamedTuple):
    """What the workers of a pool have in common.

    Args:
        formats: model formats that they load; empty: unknown.
        kinds: of their instances; one, unless the pool's backend or device was just changed.
    """

    accelerated: bool
    formats: frozenset[str]
    kinds: frozenset[str] = frozenset()


def learn(known: Mapping[str, PoolTraits], workers: Iterable[WorkerRecord]) -> Mapping[str, PoolTraits]:
    """Return the traits of the pools of `workers`, and of those that were `known` and have no worker now.

    Returns `known` itself if nothing changed.
    """
    found: dict[str, PoolTraits] = {}
    for worker in workers:
        traits = PoolTraits(worker.device != CPU, frozenset(worker.formats), frozenset({worker.kind}))
        before = found.get(worker.pool)
        if before is not None and before != traits:
            traits = PoolTraits(
                before.accelerated or traits.accelerated, before.formats | traits.formats, before.kinds | traits.kinds
            )
        found[worker.pool] = traits
    changed = {pool: traits for pool, traits in found.items() if known.get(pool) != traits}
    return {**known, **changed} if changed else known


def named_pools(manifest: Manifest, placement: EndpointPlacement) -> tuple[str, ...]:
    """Return the pools that the endpoint or the version names; empty: all that can run it."""
    return placement.pools or manifest.config.pools


def pools_of(manifest: Manifest, placement: EndpointPlacement, known: Mapping[str, PoolTraits]) -> tuple[str, ...]:
    """Return the pools that may serve a version, at least one, the preferred one first.

    Without a setting these are all that can run it, accelerators before CPUs, then by name; of a composed
    version none.
    """
    if manifest.parts:
        return ()
    named = named_pools(manifest, placement)
    if named:
        return named
    able = [pool for pool, traits in known.items() if _reads(traits.formats, manifest)]
    return tuple(sorted(able, key=lambda pool: (not known[pool].accelerated, pool))) or (POOL_DEFAULT,)


def kinds_of(pools: Iterable[str], known: Mapping[str, PoolTraits]) -> frozenset[str]:
    """Return the kinds of instances that pools have had, as far as they are known."""
    return frozenset(kind for pool in pools if pool in known for kind in known[pool].kinds)


def serves(pool: str, formats: Iterable[str], manifest: Manifest, placement: EndpointPlacement) -> bool:
    """Return whether a worker of `pool` that loads these model formats may serve a version."""
    if manifest.parts:
        return False
    named = named_pools(manifest, placement)
    return pool in named if named else _reads(frozenset(formats), manifest)


def _reads(formats: frozenset[str], manifest: Manifest) -> bool:
    return not formats or manifest.source_format in formats


def pools_text(pools: Sequence[str]) -> str:
    """Return "pool cpu" or "pools gpu, cpu" for a message."""
    return f"pool{'s' if len(pools) > 1 else ''} {', '.join(pools) or 'any'}"


def unknown_pool(field: str, pool: str, pools: Collection[str]) -> Failure:
    """Return the failure for a pool that is none of `pools`, which it names; `field`: where it was named."""
    shown = sorted(pools)[:POOLS_NAMED_MAX]
    more = f" and {len(pools) - len(shown)} more" if len(pools) > len(shown) else ""
    there = f"the pools are {', '.join(shown)}{more}" if len(pools) > 1 else f"the pool is {', '.join(shown)}"
    near = nearest(pool, pools) if len(pools) > 1 else []
    question = f" (did you mean '{near[0]}'?)" if near else ""
    return invalid(f"{field}: there is no pool '{pool}'{question}; {there}")
