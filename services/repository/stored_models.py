"""An in-memory copy of the repository's documents. Only models that changed are read again.

repository.stamp(model) differs from the last read ─> read that model ─> models, names of the models that changed
A scan of thousands of models costs a few stat calls per model.
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
    """A model's endpoint and, by number, its versions with their verdicts."""

    endpoint: Endpoint
    versions: Mapping[int, tuple[Manifest, Verdict]]


class StoredModels:
    """The models of a repository at the last read. Blocking; not safe for several threads at once."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._stamps: dict[str, Hashable] = {}
        self.models: dict[str, StoredModel] = {}

    def read(self) -> set[str]:
        """Read what changed since the last call; return the names of models that are new, changed or removed.

        Raises:
            Failure: the repository cannot be listed; nothing has changed then.
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
            # A model that could not be read completely is read again next time, also if it has not changed.
            self._stamps[name] = stamp if whole else None
            if stored != self.models.get(name):
                changed.add(name)
                if stored is None:
                    del self.models[name]
                else:
                    self.models[name] = stored
        return changed

    def _read(self, name: str) -> tuple[StoredModel | None, bool]:
        """Return the model, None if it was removed or is damaged, and whether all of it could be read."""
        try:
            endpoint = self._repository.endpoint(name)
            numbers = self._repository.versions(name)
        except Failure as failure:
            _log_damage(failure)
            return None, False
        whole = True
        versions: dict[int, tuple[Manifest, Verdict]] = {}
        for number in numbers:
            try:
                manifest = self._repository.manifest(name, number)
                versions[number] = (manifest, self._repository.verdicts.of(manifest))
            except Failure as failure:
                _log_damage(failure)
                whole = False
        return StoredModel(endpoint, versions), whole


def _log_damage(failure: Failure) -> None:
    """Log a document that was skipped because it is damaged; a document that was removed in between is no damage."""
    if failure.code is not Code.NOT_FOUND:
        log.warning("%s", failure.message)
