"""The versions that the repository has for this worker's pool, with what placement must know about them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.placement.pools import serves
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.stored_models import StoredModel, StoredModels
from millstream.services.repository.verdicts import Verdict

log = logging.getLogger("millstream.reconciler")


@dataclass(slots=True)
class Wanted:
    """A version that workers of this pool may load. Do not change it.

    Args:
        staged: whether it is tried before it is published.
        preloaded: whether it is loaded before it is called.
        outdated: whether it neither is preloaded nor served before the active version: it is unloaded when idle.
    """

    manifest: Manifest
    verdict: Verdict
    placement: EndpointPlacement
    staged: bool = False
    preloaded: bool = True
    outdated: bool = False
    content_id: str = field(init=False)
    instances_max: int = field(init=False)  # most instances in the pool; 0: no limit

    def __post_init__(self) -> None:
        self.content_id = self.manifest.content_id
        limits = [limit for limit in (self.manifest.config.instances_max, self.placement.instances_max) if limit]
        self.instances_max = min(limits, default=0)


class WantedVersions:
    """Reads the versions of one pool from the repository. Blocking; not safe for several threads at once.

    Args:
        formats: model formats that the worker loads; empty: all.
    """

    def __init__(self, repository: FolderRepository, pool: str, formats: frozenset[str] = frozenset()) -> None:
        self._repository = repository
        self._pool = pool
        self._formats = formats
        self._stored = StoredModels(repository)
        self._of_model: dict[str, list[Wanted]] = {}
        self._with_staged: set[str] = set()  # models that had staged versions at the last read

    def read(self) -> dict[str, Wanted]:
        """Return the versions by content id. Raises Failure if the repository cannot be listed."""
        # Read first: a version that is committed in between is then found twice, and not looked on as removed.
        staged_before = self._staged(self._with_staged)
        for name in self._stored.read():
            self._of_model.pop(name, None)
            if name in self._stored.models:
                self._of_model[name] = list(self._published(self._stored.models[name]))
        looked_at = self._stored.looked_at
        staged_now = self._staged(self._repository.staged.models() if looked_at is None else looked_at)
        published = {one.content_id: one for versions in self._of_model.values() for one in versions}
        staged = (staged_before | staged_now).values()
        self._with_staged = {one.manifest.model for one in staged}
        return staged_before | published | staged_now

    def exists(self, name: str, version: str | None) -> bool:
        """Return whether the repository had a model of this name, and a version of this number, at the last read."""
        model = self._stored.models.get(name)
        return model is not None and (version is None or not version.isdecimal() or int(version) in model.versions)

    def _published(self, model: StoredModel) -> Iterator[Wanted]:
        endpoint = model.endpoint
        preloaded = endpoint.preloaded(model.versions)
        for version, (manifest, verdict) in model.versions.items():
            if endpoint.serves(version) and self._serves(manifest, endpoint.placement):
                yield Wanted(
                    manifest,
                    verdict,
                    endpoint.placement_of(version),
                    preloaded=version in preloaded,
                    outdated=version not in preloaded and version != endpoint.previous,
                )

    def _staged(self, models: Collection[str]) -> dict[str, Wanted]:
        """Return the staged versions of `models`, which are loaded beside the served ones."""
        found: dict[str, Wanted] = {}
        for model in sorted(models):
            with _skipping_damage():
                manifests = self._repository.staged.of(model)
                stored = self._stored.models.get(model)
                placement = stored.endpoint.placement if stored is not None else EndpointPlacement()
                for manifest in manifests:
                    if self._serves(manifest, placement):
                        one = Wanted(manifest, self._repository.verdicts.of(manifest), placement, staged=True)
                        found[one.content_id] = one
        return found

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
