"""What the catalog of models is to those that ask it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.services.wire.records import State

#: (model, version) of an upload in progress; version None: its number is given when it is published
UploadKey = tuple[str, int | None]


class ModelCatalog(Protocol):
    """What is known about models now, in all processes, as far as this gateway has heard."""

    @property
    def snapshot(self) -> Snapshot:
        """Replaced as a whole; never changed in place."""

    @property
    def uploads(self) -> Mapping[UploadKey, State]:
        """Uploads in progress in any gateway: RECEIVING, then PENDING until a check slot is free, then CHECKING."""

    async def refresh(self) -> None:
        """Read the repository and the workers' records again."""

    async def announce(self, model: str) -> None:
        """Tell all gateways and workers that the repository changed, and refresh."""

    async def next_change(self, timeout_s: float) -> bool:
        """Wait until the snapshot changes; False when `timeout_s` passed first."""

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        """Make an upload in progress visible to all gateways; None: it has ended."""
