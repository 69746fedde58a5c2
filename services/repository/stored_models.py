"""stored_models: what the repository has, read again where it changed.

repository.stamp(model) differs from last time ─> read that model ─> models, names of the models that changed
A repository of thousands of models is scanned by its stamps, which are a few stats each, and hardly ever read.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import Verdict

log = logging.getLogger("millstream.repository")


class StoredModel(NamedTuple):
    """A model's endpoint and, by number, its versions with what running them has shown."""

    endpoint: Endpoint
    versions: Mapping[int, tuple[Manifest, Verdict]]


class StoredModels:
    """The models of a repository as they were read last. Blocking; not for several threads at once."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._stamps: dict[str, Hashable] = {}
        self.models: dict[str, StoredModel] = {}

    def read(self) -> set[str]:
        """Read what changed since the last call. Returns the names of models that are new, different or gone.

        Raises:
            Failure: when the repository cannot be listed; nothing has changed then.
        """
        names = self._repository.models()
        changed = self.models.keys() - set(names)
        for name in changed:
            del self.models[name]
        for name in self._stamps.keys() - set(names):
            del self._stamps[name]
        for name in names:
            stamp = self._repository.stamp(name)
            if stamp == self._stamps.get(name):
                continue
            stored, whole = self._read(name)
            # What could not be read is read again next time, whether it changed or not.
            self._stamps[name] = stamp if whole else None
            if stored != self.models.get(name):
                changed.add(name)
                if stored is None:
                    del self.models[name]
                else:
                    self.models[name] = stored
        return changed

    def _read(self, name: str) -> tuple[StoredModel | None, bool]:
        """The model, None if it was removed in between or is damaged; and whether all of it could be read."""
        try:
            endpoint = self._repository.endpoint(name)
            numbers = self._repository.versions(name)
        except Failure as failure:
            _say(failure)
            return None, False
        whole = True
        versions: dict[int, tuple[Manifest, Verdict]] = {}
        for number in numbers:
            try:
                manifest = self._repository.manifest(name, number)
                versions[number] = (manifest, self._repository.verdicts.of(manifest))
            except Failure as failure:
                _say(failure)
                whole = False
        return StoredModel(endpoint, versions), whole


def _say(failure: Failure) -> None:
    """What was removed in between, or is damaged, is left out; everything else goes on."""
    if failure.code is not Code.NOT_FOUND:
        log.warning("%s", failure.message)
