"""Which workers have loaded which version content, and which versions none has: on standby, or still pending. Pure.

records of workers ─> Placements.update ─> names of the models whose instances changed
records of workers, token of the repository ─> Standby.update ─> models to look at again ─> Standby.state of a version
An update costs as much as the records that changed. An unchanged heartbeat costs nothing.

A version is PENDING until all workers of one of its pools follow a state of the repository that has it, and none loads
it by itself. From then on it is on STANDBY: its first call makes a worker load it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from millstream.gateway.catalog.snapshot import Replica
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord


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


class _Version(NamedTuple):
    model: str
    pools: tuple[str, ...]


class Standby:
    """The versions that no worker has, by content id."""

    def __init__(self) -> None:
        self._pending: dict[str, _Version] = {}
        self._standby: dict[str, _Version] = {}  # also versions that were loaded from standby since
        self._current: frozenset[str] = frozenset()  # pools whose workers follow the repository's present state
        self._following: frozenset[str] = frozenset()  # pools with a worker that follows any state of it

    def update(self, workers: Collection[WorkerRecord], token: str, asleep: frozenset[str] = frozenset()) -> set[str]:
        """Apply the records of the live workers. Returns the models whose versions' states may have changed.

        Args:
            workers: the live workers.
            token: of the present state of the repository.
            asleep: pools that need no worker now: a first request brings one, which follows the repository.
        """
        following = {worker.pool for worker in workers if worker.token} | asleep
        behind = {worker.pool for worker in workers if worker.token != token and not worker.draining}
        self._current = frozenset({worker.pool for worker in workers if worker.token == token} - behind) | asleep
        changed: set[str] = set()
        if self._pending and self._current:
            changed |= {version.model for version in self._pending.values() if self._has_worker(version, self._current)}
        if self._following - following:  # a pool lost its last worker: the next one begins again
            lost = [key for key, version in self._standby.items() if not self._has_worker(version, following)]
            changed |= {self._standby.pop(key).model for key in lost}
        self._following = frozenset(following)
        return changed

    def state(self, content_id: str, model: str, pools: tuple[str, ...]) -> State:
        """Return the state of a version that is to be served and that no worker has: STANDBY or PENDING."""
        version = _Version(model, pools)
        if content_id not in self._standby and not self._has_worker(version, self._current):
            self._pending[content_id] = version
            return State.PENDING
        self._pending.pop(content_id, None)
        self._standby[content_id] = version
        return State.STANDBY

    def staffed(self, pools: Collection[str]) -> bool:
        """Return whether one of these pools has a worker that reads the repository."""
        return any(pool in self._following for pool in pools)

    def was_on_standby(self, content_id: str) -> bool:
        """Whether calls of the version are answered also while it is being loaded."""
        return content_id in self._standby

    def forget(self, content_id: str) -> None:
        """Forget a version that was removed, or is not to be served."""
        self._pending.pop(content_id, None)
        self._standby.pop(content_id, None)

    def loaded(self, content_id: str) -> None:
        """Record that a worker has the version."""
        self._pending.pop(content_id, None)

    @staticmethod
    def _has_worker(version: _Version, pools: Collection[str]) -> bool:
        return any(pool in pools for pool in version.pools)
