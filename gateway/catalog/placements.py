"""Which workers have loaded which version content, updated from changed records. Pure.

records of workers ─> Placements.update ─> names of the models whose instances changed
An update costs as much as the records that changed. An unchanged heartbeat costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.gateway.catalog.snapshot import Replica
from millstream.services.wire.records import InstanceRecord, WorkerRecord


class Placements:
    """Instances by content id, then by worker."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerRecord] = {}
        self._heads: dict[str, WorkerRecord] = {}  # the same records without instances, for Replica.worker
        self._instances: dict[str, Mapping[str, InstanceRecord]] = {}  # worker -> content id -> instance
        self._replicas: dict[str, dict[str, Replica]] = {}  # content id -> worker -> replica

    def of(self, content_id: str) -> tuple[Replica, ...]:
        """Return the instances of a content id, ordered by worker."""
        replicas = self._replicas.get(content_id)
        return tuple(replicas[worker] for worker in sorted(replicas)) if replicas else ()

    def update(self, workers: Sequence[WorkerRecord]) -> set[str]:
        """Apply the records of all live workers, and return the names of the models whose instances changed."""
        changed: set[str] = set()
        live = {worker.id for worker in workers}
        for removed in self._workers.keys() - live:
            for instance in self._instances.pop(removed).values():
                self._remove(removed, instance)
                changed.add(instance.model)
            del self._workers[removed], self._heads[removed]
        for worker in workers:
            before = self._workers.get(worker.id)
            self._workers[worker.id] = worker
            if before is None or before.instances is not worker.instances:
                self._replace(worker, changed)
        return changed

    def _replace(self, worker: WorkerRecord, changed: set[str]) -> None:
        before = self._instances.get(worker.id, {})
        head = self._heads.setdefault(worker.id, worker.model_copy(update={"instances": ()}))
        now = {instance.content_id: instance for instance in worker.instances}
        self._instances[worker.id] = now
        for content_id in before.keys() - now.keys():
            self._remove(worker.id, before[content_id])
            changed.add(before[content_id].model)
        for content_id, instance in now.items():
            previous = before.get(content_id)
            if previous is not instance and previous != instance:
                self._replicas.setdefault(content_id, {})[worker.id] = Replica(head, instance)
                changed.add(instance.model)

    def _remove(self, worker: str, instance: InstanceRecord) -> None:
        replicas = self._replicas[instance.content_id]
        del replicas[worker]
        if not replicas:
            del self._replicas[instance.content_id]
