"""Decides whether a version that no worker has is on standby, or still waits for the workers to learn of it. Pure.

records of workers, token of the repository ─> Standby.update ─> models to look at again ─> Standby.state of a version

A version is PENDING until all workers of one of its pools follow a state of the repository that has it, and none loads
it by itself. From then on it is on STANDBY: its first call makes a worker load it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from millstream.services.wire.records import State, WorkerRecord


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
