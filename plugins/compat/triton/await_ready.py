"""Waits until workers have loaded staged versions, or have unloaded versions.

The workers' records in the catalog tell what is loaded. Versions that serve are kept meanwhile. A version
that no worker has memory for now needs no load: as after an upload, it is on standby, and its first call loads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millstream.gateway.catalog.catalog import Catalog
from millstream.services.errors import Code, Failure, Subject
from millstream.services.model.manifest import Manifest
from millstream.services.placement.pools import pools_of
from millstream.services.placement.views import RefusalKind
from millstream.services.wire.records import InstanceRecord, State

_FOR_NOW = frozenset({RefusalKind.NOTHING_EVICTABLE, RefusalKind.BUSY})
READY_S_MAX = 600.0
WORKER_S_MAX = 20.0
KEPT_CHECK_S = 1.0  # interval at which a load looks whether its versions were deleted
UNLOADED_S_MAX = 60.0  # longer than a worker takes for the batches that it has leased


class ReadyWaiter:
    """Waits for workers to load or unload versions.

    Args:
        catalog: Holds the workers' records.
        ready_s_max: Seconds for loading and warming up.
        worker_s_max: Seconds for which a version's pools may have no worker.
        unloaded_s_max: Seconds for unloading a version.
    """

    def __init__(
        self,
        catalog: Catalog,
        ready_s_max: float = READY_S_MAX,
        worker_s_max: float = WORKER_S_MAX,
        unloaded_s_max: float = UNLOADED_S_MAX,
    ) -> None:
        self._unloaded_s_max = unloaded_s_max
        self._catalog = catalog
        self._ready_s_max = ready_s_max
        self._worker_s_max = worker_s_max

    async def wait_ready(
        self,
        manifests: Sequence[Manifest],
        check_kept: Callable[[Sequence[Manifest]], None],
        *,
        all_required: bool = True,
    ) -> set[int]:
        """Wait until each version is ready in a worker, or no worker has memory for it now; return those that failed.

        Args:
            manifests: Manifests of the versions.
            check_kept: Raises Failure if versions were deleted meanwhile. Called in a thread, each second at most.
            all_required: Whether one failed version is a failure; False: only if all versions fail.

        Raises:
            Failure: MODEL (all workers that tried it failed), UNAVAILABLE (no worker, or it takes too long).
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        check_at = start + KEPT_CHECK_S
        while True:
            failures = {manifest.version: failure for manifest in manifests if (failure := self._failure(manifest))}
            if failures and (all_required or len(failures) == len(manifests)):
                raise failures[max(failures)]
            waiting = [
                manifest
                for manifest in manifests
                if not self._ready(manifest)
                and not self._waits_for_memory(manifest)
                and not self._is_on_standby(manifest)
                and manifest.version not in failures
            ]
            if not waiting:
                return set(failures)
            waited_s = loop.time() - start
            self._check(waiting[0], waited_s)
            if loop.time() >= check_at:
                await _end_if_deleted(check_kept, waiting)
                check_at = loop.time() + KEPT_CHECK_S
            await self._catalog.next_change(min(1.0, self._ready_s_max - waited_s))

    async def wait_unloaded(self, manifests: Sequence[Manifest]) -> None:
        """Wait until no worker has any of the versions: an instance that is being unloaded looks ready, but is not.

        Raises:
            Failure: UNAVAILABLE when it takes too long.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        while loaded := [manifest for manifest in manifests if self._instances(manifest)]:
            left_s = self._unloaded_s_max - (loop.time() - start)
            if left_s <= 0:
                raise Failure(
                    Code.UNAVAILABLE,
                    f"version {loaded[0].version} is still being unloaded: try again",
                    retry_after_s=5,
                    subject=Subject.VERSION,
                )
            await self._catalog.next_change(min(1.0, left_s))

    def _check(self, manifest: Manifest, waited_s: float) -> None:
        snapshot = self._catalog.snapshot
        pools = pools_of(manifest, snapshot.placement(manifest.model), snapshot.pools)
        named = " or ".join(map(repr, pools))
        workers = any(worker.pool in pools for worker in snapshot.workers)
        if waited_s >= self._ready_s_max:
            raise Failure(
                Code.UNAVAILABLE,
                f"version {manifest.version} is not ready after {self._ready_s_max:g} s",
                retry_after_s=10,
                subject=Subject.VERSION,
            )
        if not workers and waited_s >= self._worker_s_max:
            raise Failure(
                Code.UNAVAILABLE,
                f"version {manifest.version}: pool {named} has no worker: start one with --pool {pools[0]}=1, or name "
                "another kind in instance_group",
                retry_after_s=10,
                subject=Subject.VERSION,
            )

    def _ready(self, manifest: Manifest) -> bool:
        if manifest.parts:  # of these only versions that serve, or load on demand, are parts
            return True
        return any(instance.state is State.READY for instance in self._instances(manifest))

    def _is_on_standby(self, manifest: Manifest) -> bool:
        """Whether the version serves, and its first call loads it."""
        model = self._catalog.snapshot.models.get(manifest.model)
        view = model.versions.get(manifest.version) if model is not None else None
        return view is not None and view.state is State.STANDBY and view.manifest.content_id == manifest.content_id

    def _waits_for_memory(self, manifest: Manifest) -> bool:
        """Whether a worker refused to load the version because all others are in use, and none loads it."""
        refused = any(
            refusal.content_id == manifest.content_id and refusal.kind in _FOR_NOW
            for worker in self._catalog.snapshot.workers
            for refusal in worker.refusals
        )
        return refused and not self._instances(manifest)

    def failed(self, manifests: Sequence[Manifest]) -> set[str]:
        """Return the content ids of the versions that failed in all workers that tried them."""
        return {manifest.content_id for manifest in manifests if self._failure(manifest) is not None}

    def _failure(self, manifest: Manifest) -> Failure | None:
        instances = self._instances(manifest)
        if not instances or any(instance.state is not State.FAILED for instance in instances):
            return None
        reason = next((instance.reason for instance in instances if instance.reason), "it failed to load")
        return Failure(Code.MODEL, f"version {manifest.version}: {reason}", subject=Subject.VERSION)

    def _instances(self, manifest: Manifest) -> list[InstanceRecord]:
        return [replica.instance for replica in self._catalog.replicas(manifest.content_id)]


async def _end_if_deleted(check_kept: Callable[[Sequence[Manifest]], None], manifests: Sequence[Manifest]) -> None:
    """Raise Failure(NOT_FOUND) if a version was deleted. What cannot be read for a moment ends no load."""
    try:
        await asyncio.to_thread(check_kept, manifests)
    except Failure as failure:
        if failure.code is Code.NOT_FOUND:
            raise
