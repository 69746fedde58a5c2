"""trials: counts the deaths of a worker's processes while they tried a variant, across their restarts.

begin ─> <run>/variants-<worker>.json: {trial: processes that began it} ─> end removes it; a death leaves it
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.repository.base import Repository

log = logging.getLogger("millstream.races")

DEATHS_MAX = 2  # of processes during a trial of a variant; then it is undone
TRIALS_MAX = 1024  # beyond, the oldest is forgotten


class VariantTrials:
    """The trials of the workers of one name, one after the other. Safe for several threads."""

    def __init__(self, run_dir: Path, worker: str) -> None:
        self._path = run_dir / f"variants-{worker}.json"
        self._lock = threading.Lock()
        self._begun: set[str] = set()  # by this process
        self._counts = self._read()

    def names(self) -> list[str]:
        """Return the trials that began and have not ended, also those of earlier processes."""
        with self._lock:
            return list(self._counts)

    def deaths(self, trial: str) -> int:
        """Return how many processes ended while they tried it."""
        return self._counts.get(trial, 0) - (trial in self._begun)

    def begin(self, trial: str) -> None:
        with self._lock:
            if trial not in self._begun:
                self._begun.add(trial)
                self._counts[trial] = self._counts.pop(trial, 0) + 1
                self._write()

    def end(self, trial: str) -> None:
        with self._lock:
            self._begun.discard(trial)
            if self._counts.pop(trial, None) is not None:
                self._write()

    def close(self) -> None:
        """End the trials of this process, which leaves without a crash; earlier deaths still count."""
        with self._lock:
            for trial in self._begun:
                self._counts[trial] -= 1
            self._begun.clear()
            self._counts = {trial: count for trial, count in self._counts.items() if count > 0}
            self._write()

    def _read(self) -> dict[str, int]:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        pairs = found.items() if isinstance(found, dict) else ()
        return {trial: count for trial, count in pairs if isinstance(count, int)}

    def _write(self) -> None:
        while len(self._counts) > TRIALS_MAX:
            del self._counts[next(iter(self._counts))]
        try:
            if not self._counts:
                with suppress(FileNotFoundError):
                    self._path.unlink()
                return
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(self._counts))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)


def end_trials_of_deleted(trials: VariantTrials, repository: Repository, loaded: Collection[str]) -> None:
    """Forget the deaths in trials of versions that are gone; a version that cannot be read now is not gone.

    Args:
        trials: named by the content id of their version, a space, and more.
        repository: has the versions.
        loaded: content ids of versions that are not gone, without a look.
    """
    for trial in trials.names():
        content_id = trial.partition(" ")[0]
        if content_id not in loaded and _is_deleted(repository, content_id):
            trials.end(trial)


def _is_deleted(repository: Repository, content_id: str) -> bool:
    try:
        model, version, _ = content_id.split(":")
        return repository.manifest(model, int(version)).content_id != content_id
    except ValueError:  # a name that this program never wrote
        return True
    except Failure as failure:
        return failure.code is Code.NOT_FOUND
