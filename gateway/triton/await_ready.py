"""Waits until workers have loaded staged versions, beside what they serve, and their records say so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millstream.gateway.catalog.interfaces import ModelCatalog
from millstream.services.errors import Code, Failure, Subject
from millstream.services.model.manifest import Manifest
from millstream.services.wire.records import InstanceRecord, State

READY_S_MAX = 600.0
WORKER_S_MAX = 20.0
UNLOADED_S_MAX = 60.0  # more than a worker takes to run what it was sent


class Trial:
    """`ready_s_max`: how long loading and warming up may take. `worker_s_max`: how long a pool may have no worker.

    `unloaded_s_max`: how long workers may take to let go of a version that was unloaded.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        ready_s_max: float = READY_S_MAX,
        worker_s_max: float = WORKER_S_MAX,
        unloaded_s_max: float = UNLOADED_S_MAX,
    ) -> None:
        self._unloaded_s_max = unloaded_s_max
        self._catalog = catalog
        self._ready_s_max = ready_s_max
        self._worker_s_max = worker_s_max

    async def passed(self, manifests: Sequence[Manifest], *, all_of_them: bool = True) -> None:
        """Return when each is ready in a worker; not `all_of_them`: when one is, and of the others it is known.

        Raises Failure: MODEL (all workers that tried failed), UNAVAILABLE (no worker, or it takes too long).
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            failures = {one.version: failure for one in manifests if (failure := self._failure(one))}
            if failures and (all_of_them or len(failures) == len(manifests)):
                raise failures[max(failures)]
            waiting = [one for one in manifests if not self._ready(one) and one.version not in failures]
            if not waiting:
                return
            waited_s = loop.time() - start
            self._check(waiting[0], waited_s)
            await self._catalog.next_change(min(1.0, self._ready_s_max - waited_s))

    async def let_go(self, manifests: Sequence[Manifest]) -> None:
        """Return when no worker holds any of them any more: an instance that is being unloaded looks ready, and is not.

        Raises Failure: UNAVAILABLE when it takes too long.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        while held := [one for one in manifests if self._instances(one)]:
            left_s = self._unloaded_s_max - (loop.time() - start)
            if left_s <= 0:
                raise Failure(
                    Code.UNAVAILABLE,
                    f"version {held[0].version} is still being unloaded: try again",
                    retry_after_s=5,
                    subject=Subject.VERSION,
                )
            await self._catalog.next_change(min(1.0, left_s))

    def _check(self, manifest: Manifest, waited_s: float) -> None:
        pool = manifest.config.pool
        workers = any(worker.pool == pool for worker in self._catalog.snapshot.workers)
        if waited_s >= self._ready_s_max:
            raise Failure(
                Code.UNAVAILABLE,
                f"version {manifest.version}: it is not ready after {self._ready_s_max:g} s",
                retry_after_s=10,
                subject=Subject.VERSION,
            )
        if not workers and waited_s >= self._worker_s_max:
            raise Failure(
                Code.UNAVAILABLE,
                f"version {manifest.version}: pool {pool!r} has no worker: start one with --pool {pool}=1, or name "
                "another kind in instance_group",
                retry_after_s=10,
                subject=Subject.VERSION,
            )

    def _ready(self, manifest: Manifest) -> bool:
        return any(instance.state is State.READY for instance in self._instances(manifest))

    def _failure(self, manifest: Manifest) -> Failure | None:
        found = self._instances(manifest)
        if not found or any(instance.state is not State.FAILED for instance in found):
            return None
        reason = next((instance.reason for instance in found if instance.reason), "it failed to load")
        return Failure(Code.MODEL, f"version {manifest.version}: {reason}", subject=Subject.VERSION)

    def _instances(self, manifest: Manifest) -> list[InstanceRecord]:
        content_id = manifest.content_id
        return [
            instance
            for worker in self._catalog.snapshot.workers
            for instance in worker.instances
            if instance.content_id == content_id
        ]
