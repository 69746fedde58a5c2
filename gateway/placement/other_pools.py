"""Which pool loads a version that several may serve and none has.

request of a cold lane ─> check ─> its pool loads the version │ PassedOn: a later pool loads it, or has memory free
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.gateway.catalog.snapshot import Snapshot, VersionView
from millstream.gateway.placement.pool_fleets import PoolFleets
from millstream.gateway.placement.refusals import PassedOn
from millstream.services.model.manifest import Manifest
from millstream.services.placement.fleet import PoolOffer, is_worth_moving, without_unloading
from millstream.services.placement.views import Footprint
from millstream.services.wire.records import WorkerRecord


class OtherPools:
    """The pools of one gateway. Call it in the event loop.

    Args:
        snapshot: returns the current snapshot of the catalog.
        fleets: the prices of the workers.
        footprint_of: returns what a version takes in a worker, measured or predicted.
        is_ordered: whether a version (its content id) is being loaded in a pool, or was ordered there.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        fleets: PoolFleets,
        footprint_of: Callable[[Manifest, WorkerRecord], Footprint],
        is_ordered: Callable[[str, str], bool],
    ) -> None:
        self._snapshot = snapshot
        self._fleets = fleets
        self._footprint_of = footprint_of
        self._is_ordered = is_ordered
        self._request = 0  # id of the request that was passed on last
        self._passed_by: set[str] = set()  # pools that passed it on

    def check(self, pool: str, version: VersionView, request: object) -> None:
        """Let a pool load a version for a request, unless a later pool loads it, or could with nothing unloaded.

        Raises PassedOn. A request that no other pool took comes again, and is then not passed on by the same pool.
        """
        content_id = version.manifest.content_id
        if self._request == id(request) and pool in self._passed_by:
            return
        if pool not in version.pools or self._is_ordered(pool, content_id):
            return
        other = self._other(pool, version)
        if other and other != pool:
            if self._request != id(request):
                self._request, self._passed_by = id(request), set()
            self._passed_by.add(pool)
            raise PassedOn(pool, other)

    def _other(self, pool: str, version: VersionView) -> str:
        """Return the pool that is to load a version, `pool` or a later one; "": all would have to unload for it."""
        content_id = version.manifest.content_id
        later = version.pools[version.pools.index(pool) + 1 :]
        ordered = next((one for one in later if self._is_ordered(one, content_id)), "")
        if ordered:
            return ordered
        failed = {at.worker.pool for at in version.replicas}
        asked = [one for one in (pool, *later) if one not in failed]
        offers = [offer for one in asked if (offer := self._offer(one, version.manifest)) is not None]
        return without_unloading(offers)

    def is_worth_moving(self, pool: str, manifest: Manifest, now: float) -> bool:
        """Return whether a preferred pool is to load a version that another pool answers. `now`: on the Redis clock."""
        offer = self._offer(pool, manifest)
        return offer is not None and is_worth_moving(offer.fleet, manifest.content_id, offer.need, now)

    def _offer(self, pool: str, manifest: Manifest) -> PoolOffer | None:
        """Return what a pool has to offer for a version; None: it has no worker, or one has refused the version."""
        workers = self._fleets.of(self._snapshot(), pool)
        if not workers.records or manifest.content_id in workers.refusals:
            return None
        need = self._footprint_of(manifest, next(iter(workers.records.values())))
        return PoolOffer(pool, workers.fleet, need)
