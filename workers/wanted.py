"""wanted: the versions that the repository has for this worker's pool, with what placement must know about them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.placement.pools import serves
from millstream.services.repository.base import Repository
from millstream.services.repository.stored_models import StoredModels
from millstream.services.repository.verdicts import Verdict

log = logging.getLogger("millstream.reconciler")


class Wanted(NamedTuple):
    """A version that workers of this pool may load."""

    manifest: Manifest
    verdict: Verdict
    placement: EndpointPlacement
    staged: bool = False  # tried before it is published

    @property
    def content_id(self) -> str:
        return self.manifest.content_id

    @property
    def instances_max(self) -> int:
        """Most instances in the pool; 0: no limit."""
        limits = [limit for limit in (self.manifest.config.instances_max, self.placement.instances_max) if limit]
        return min(limits, default=0)


class WantedVersions:
    """Reads the versions of one pool from the repository. Blocking; not safe for several threads at once.

    Args:
        formats: model formats that the worker loads; empty: all.
    """

    def __init__(self, repository: Repository, pool: str, formats: frozenset[str] = frozenset()) -> None:
        self._repository = repository
        self._pool = pool
        self._formats = formats
        self._stored = StoredModels(repository)
        self._with_staged: set[str] = set()  # models that had staged versions at the last read

    def read(self) -> dict[str, Wanted]:
        """Return the versions by content id. Raises Failure if the repository cannot be listed."""
        self._stored.read()
        return {wanted.content_id: wanted for wanted in (*self._published(), *self._staged())}

    def _published(self) -> Iterator[Wanted]:
        for endpoint, versions in self._stored.models.values():
            for version, (manifest, verdict) in versions.items():
                if endpoint.serves(version) and self._serves(manifest, endpoint.placement):
                    yield Wanted(manifest, verdict, endpoint.placement_of(version))

    def _staged(self) -> Iterator[Wanted]:
        """Yield versions that are tried before they are published; they are loaded besides those that serve."""
        looked_at = self._stored.looked_at
        models = self._repository.staged.models() if looked_at is None else sorted(self._with_staged | set(looked_at))
        self._with_staged = set()
        for model in models:
            with _skipping_damage():
                manifests = self._repository.staged.of(model)
                if manifests:
                    self._with_staged.add(model)
                stored = self._stored.models.get(model)
                placement = stored.endpoint.placement if stored is not None else EndpointPlacement()
                for manifest in manifests:
                    if self._serves(manifest, placement):
                        yield Wanted(manifest, self._repository.verdicts.of(manifest), placement, staged=True)

    def _serves(self, manifest: Manifest, placement: EndpointPlacement) -> bool:
        return serves(self._pool, self._formats, manifest, placement)


@contextmanager
def _skipping_damage() -> Iterator[None]:
    """Skip a model that was just removed or is damaged, so that the others are still handled."""
    try:
        yield
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            log.warning("%s", failure.message)
