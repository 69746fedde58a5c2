"""An in-memory copy of the repository's documents. Only models that changed are read again.

repository.changed_since(token) ─> read these models ─> models, names of the models that changed
unknown, or SCAN_S ago ─> all models: repository.stamp(model) differs from the last read ─> read that model

A change of one model among thousands costs as much as one among few. A scan of all costs a few stat calls per model; it
also finds what was changed by hand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import NamedTuple

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import Verdict

log = logging.getLogger("millstream.repository")

#: After this time a change is an occasion to look at all models, which finds changes that were made by hand.
SCAN_S = 30.0


class StoredModel(NamedTuple):
    """A model's endpoint and, by number, its versions with their verdicts."""

    endpoint: Endpoint
    versions: Mapping[int, tuple[Manifest, Verdict]]


class StoredModels:
    """The models of a repository at the last read. Blocking; not safe for several threads at once."""

    def __init__(self, repository: FolderRepository, clock: Callable[[], float] = time.monotonic) -> None:
        self._repository = repository
        self._clock = clock
        self._stamps: dict[str, Hashable] = {}
        self._token = ""
        self._scanned_at = float("-inf")
        self._incomplete: set[str] = set()  # models that could not be read completely
        self.models: dict[str, StoredModel] = {}
        #: the models that the last `read` looked at, also those without a published version; None: all
        self.looked_at: Collection[str] | None = None

    def read(self) -> set[str]:
        """Read what changed since the last call; return the names of models that are new, changed or removed.

        Raises:
            Failure: the repository cannot be listed; nothing has changed then.
        """
        token = self._repository.token()
        names = None
        if self._clock() < self._scanned_at + SCAN_S:
            names = self._repository.changed_since(self._token, token)
        changed = self._scan() if names is None else self._look_at(names | self._incomplete)
        self._token, self.looked_at = token, names
        return changed

    def _scan(self) -> set[str]:
        names = self._repository.models()
        self._scanned_at = self._clock()
        gone = (self.models.keys() | self._stamps.keys()) - set(names)
        changed = {name for name in gone if self.models.pop(name, None) is not None}
        for name in gone:
            self._stamps.pop(name, None)
        self._incomplete -= gone
        for name in names:
            stamp = self._repository.stamp(name)
            if stamp != self._stamps.get(name):
                self._replace(name, stamp, changed)
        return changed

    def _look_at(self, names: Collection[str]) -> set[str]:
        changed: set[str] = set()
        for name in names:
            self._replace(name, None, changed)
        return changed

    def _replace(self, name: str, stamp: Hashable, changed: set[str]) -> None:
        """Read one model. Add its name to `changed` if it is not what it was."""
        stored, whole = self._read(name)
        # A model that could not be read completely is read again next time, also if it has not changed.
        self._stamps[name] = stamp if whole else None
        if whole:
            self._incomplete.discard(name)
        else:
            self._incomplete.add(name)
        if stored != self.models.get(name):
            changed.add(name)
            if stored is None:
                del self.models[name]
            else:
                self.models[name] = stored

    def _read(self, name: str) -> tuple[StoredModel | None, bool]:
        """Return the model, None if it was removed or is damaged, and whether all of it could be read."""
        try:
            endpoint = self._repository.endpoint(name)
            numbers = self._repository.versions(name)
        except Failure as failure:
            _log_damage(failure)
            return None, failure.code is Code.NOT_FOUND
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
