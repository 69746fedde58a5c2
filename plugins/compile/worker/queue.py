"""queue: which races of the repository a worker can run now, the one that was asked for first at first.

races ─> those of this kind of device ─> waiting: the version is ready? unfinished: its pause is over? ─> queued
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.plugins.compile.stored.races import UNFINISHED_MAX, Race, RaceState, new_race
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import content_digest
from millstream.services.wire.records import State
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModel

log = logging.getLogger("millstream.races")


@dataclass(frozen=True, slots=True)
class Racer:
    """Which worker runs races.

    Args:
        worker: its id.
        host: equal for processes of one machine: one race runs on a device there.
        environment: id of the device and its libraries.
    """

    worker: str
    pool: str
    host: str
    environment: str


class RaceQueue:
    """The races that wait for a worker like this one. Used by one thread, except for `postpone`."""

    def __init__(self, racer: Racer, repository: Repository, at: LoadEnvironment) -> None:
        self._racer = racer
        self._repository = repository
        self._at = at
        self._retry_at: dict[tuple[str, float], float] = {}  # name of a race, when it was asked for -> monotonic time

    def postpone(self, race: Race, seconds: float) -> None:
        """Let a race wait at least this time, unless it is asked for again."""
        now = time.monotonic()
        present = {of: at for of, at in list(self._retry_at.items()) if at > now}
        self._retry_at = {**present, (race.key.name, race.requested_at): now + seconds}

    def ready(self, races: Sequence[Race], models: Iterable[LoadedModel]) -> Iterator[tuple[Race, LoadedModel]]:
        """Yield races that can begin, or go on, with their versions; queue those that could not before."""
        if not races:
            return
        known = {
            (model.manifest.model, model.manifest.version): model
            for model in models
            if model.manifest.source_format in self._at.backend.formats
        }
        ready = {of: model for of, model in known.items() if model.state is State.READY}
        self._request_again(races, ready)
        here = (self._at.kind, self._racer.environment, self._racer.pool)
        for race in sorted(races, key=lambda one: one.requested_at):
            model = known.get((race.model, race.version))
            if model is None or (race.kind, race.device, race.pool) != here:
                continue
            if race.content != content_digest(model.manifest):
                continue
            present = self._advanced(race, model)
            waits = present.state in {RaceState.QUEUED, RaceState.RUNNING} and self._is_due(present)
            if waits and model.state is State.READY:
                yield present, model

    def _advanced(self, race: Race, model: LoadedModel) -> Race:
        """Queue a race whose version is ready by now, or for which the machine has time by now. Returns it."""
        update: dict[str, Any] = {}
        if race.state is RaceState.WAITING and model.state is State.READY:
            update = {"state": RaceState.QUEUED, "why": ""}
        elif race.state is RaceState.WAITING and model.state is State.FAILED:
            update = {"why": f"the version cannot be loaded: {model.reason}"}
        elif race.state is RaceState.UNFINISHED and model.state is State.READY and self._may_begin_again(race):
            log.info("queued: the race of %s, which was not finished, with a share of the processor", race.model)
            return change(self._repository, race, Race.resumed)
        return change(self._repository, race, lambda one: one.model_copy(update=update)) if update else race

    def _may_begin_again(self, race: Race) -> bool:
        return race.unfinished < UNFINISHED_MAX and self._is_due(race)

    def _is_due(self, race: Race) -> bool:
        return time.monotonic() >= self._retry_at.get((race.key.name, race.requested_at), 0.0)

    def _request_again(self, races: Sequence[Race], ready: Mapping[tuple[str, int], LoadedModel]) -> None:
        """Ask for the races of versions whose verdicts were reached with another device or other libraries."""
        here = (self._at.kind, self._racer.pool)
        known = {(race.model, race.version) for race in races if race.device == self._racer.environment}
        for race in races:
            of = (race.model, race.version)
            if (race.kind, race.pool) != here or of in known or of not in ready or race.state is RaceState.CANCELLED:
                continue
            known.add(of)
            now = time.time()  # noqa: TID251 - for people
            manifest = ready[of].manifest
            asked = new_race(manifest, self._at.kind, self._racer.environment, self._racer.pool, now)
            why = "the device, or the version of a library, is another than that of the last verdict"
            asked = asked.model_copy(update={"options": race.options, "rows": race.rows, "why": why})
            self._repository.races.change(asked.key, lambda before, asked=asked: before or asked)  # type: ignore[misc]
            log.info("queued: a race of %s: %s", manifest.content_id, why)


def change(repository: Repository, race: Race, to: Callable[[Race], Race]) -> Race:
    """Change a race unless its state is another by now, or it was asked for anew. Returns it as it is then."""

    def changed(one: Race | None) -> Race | None:
        present = one is not None and one.state is race.state and one.is_same_request(race)
        return to(one) if one is not None and present else None

    return repository.races.change(race.key, changed) or race
