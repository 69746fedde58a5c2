"""quotas: what a key may keep, and how many uploads it may send at once.

upload begins ─> in flight? models? bytes? ─> received, checked ─> models? bytes? ─> published

Models and bytes count for the key that owns the model, whoever uploads. Uploads in flight at the same time do not see
each other: together they may exceed a quota by what they bring.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from millstream.gateway.access.gate import Gate
from millstream.gateway.access.principal import CALLER, LIMITED, owner_name
from millstream.gateway.catalog.interfaces import ModelCatalog
from millstream.services.access.limits import LimitReached
from millstream.services.errors import Code, Failure
from millstream.services.repository.base import Repository
from millstream.services.sizes import sizes


class Quotas:
    """The quotas of all keys, in one gateway.

    Args:
        gate: has the limits of the keys.
        catalog: says which key owns which model.
        repository: says what a model takes of the disk.
    """

    def __init__(self, gate: Gate, catalog: ModelCatalog, repository: Repository) -> None:
        self._gate = gate
        self._catalog = catalog
        self._repository = repository

    @asynccontextmanager
    async def upload(self, model: str, size_bytes: int) -> AsyncIterator[Callable[[int], None]]:
        """Count an upload of the caller of the current task while the block runs.

        Args:
            model: its name.
            size_bytes: of the upload; 0: not known.

        Yields what checks the quotas again, given the bytes of the version. It blocks, and raises as this does.

        Raises:
            Failure: FORBIDDEN: it would be more than the owner of the model may keep. LimitReached: too many uploads.
        """
        principal = CALLER.get()
        account = None if principal is None else principal.account
        if principal is not None and account is not None:
            try:
                account.begin_upload()
            except LimitReached:
                principal.count(LIMITED)
                raise
        try:
            check = partial(self._check, model, owner_name())
            await asyncio.to_thread(check, size_bytes)
            yield check
        finally:
            if account is not None:
                account.end_upload()

    def _check(self, model: str, key: str, size_bytes: int) -> None:
        """Raise Failure(FORBIDDEN) if a version of so many bytes exceeds a quota. `key`: that of a new model."""
        models = self._catalog.snapshot.models
        owner = models[model].placement.owner if model in models else key
        limits = self._gate.limits_of(owner)
        if limits is None:
            return
        owned = [name for name, view in models.items() if view.placement.owner == owner]
        if limits.models is not None and model not in models and len(owned) >= limits.models:
            raise Failure(
                Code.FORBIDDEN,
                f"key '{owner}' has {len(owned)} models, and its limit is {limits.models}: delete one of them",
            )
        if limits.disk_bytes is None:
            return
        kept = sum(map(self._repository.size_bytes, owned))
        if kept + max(size_bytes, 1) > limits.disk_bytes:
            needed, there = sizes(kept + size_bytes, limits.disk_bytes)
            raise Failure(
                Code.FORBIDDEN,
                f"the models of key '{owner}' would take {needed} of the disk, and its limit is {there}: "
                "delete versions",
            )
