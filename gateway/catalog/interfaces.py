"""The catalog's interface for other parts of the gateway."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from millstream.gateway.catalog.snapshot import Replica, Snapshot
from millstream.services.wire.records import State

#: (model, version) of an upload in progress; version None: the number is assigned when the version is published
UploadKey = tuple[str, int | None]


class ModelCatalog(Protocol):
    """What this gateway knows about models, workers and uploads."""

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot. It is replaced as a whole, never changed in place."""

    @property
    def uploads(self) -> Mapping[UploadKey, State]:
        """Uploads in progress in any gateway: RECEIVING, then PENDING until a check slot is free, then CHECKING."""

    def replicas(self, content_id: str) -> tuple[Replica, ...]:
        """Return the instances of a version, staged ones included, ordered by worker."""

    async def refresh(self) -> None:
        """Read the repository and the workers' records again."""

    async def announce(self, model: str) -> None:
        """Tell all gateways that the repository changed, and wait until all route by it."""

    async def next_change(self, timeout_s: float) -> bool:
        """Wait until the snapshot changes. Returns False if `timeout_s` passed first."""

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        """Publish the state of an upload to all gateways. `state` None: the upload has ended."""


class ScaleView:
    """What a gateway knows of pools whose number of workers follows their load: nothing, until a plug-in says it."""

    def __init__(self) -> None:
        self._starts: Mapping[str, float] = {}
        self._to_zero: frozenset[str] = frozenset()

    def set(self, starts: Mapping[str, float], to_zero: frozenset[str]) -> None:
        """Replace what is known.

        Args:
            starts: seconds until a pool without workers has one that is started for a request, by pool.
            to_zero: those that need no worker until their first request.
        """
        self._starts, self._to_zero = starts, to_zero

    def asleep(self, staffed: Collection[str]) -> frozenset[str]:
        """Return the pools without workers that need none until their first request. `staffed`: those with workers."""
        return self._to_zero.difference(staffed)

    def start_s(self, pool: str) -> float:
        """Return the seconds until a pool without workers has one that is started for a request; 0: none is."""
        return self._starts.get(pool, 0.0)
