"""stranded_races: fails races that wait for a device which no worker has any longer.

records of workers, races ─> StrandedRaces.look ─> a race without a worker for `wait_s` ─> failed, with what to do
Its worker runs a race under a file lock, so one that runs is never taken from a worker which Redis does not know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from millstream.plugins.compile.stored.races import Race, RaceState, has_worker
from millstream.services.errors import Failure
from millstream.services.repository.base import Repository
from millstream.services.wire.records import WorkerRecord

log = logging.getLogger("millstream.races")

_LOOK_S_MAX = 30.0  # between two looks at the races


class StrandedRaces:
    """Watches the races of a repository.

    Args:
        repository: has them, and the samples of live traffic that they would have used.
        wait_s: seconds that a race waits for a worker with its device.
        clock: returns monotonic seconds.
    """

    def __init__(self, repository: Repository, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._repository = repository
        self._races = repository.races
        self._wait_s = wait_s
        self._clock = clock
        self._look_at = 0.0
        self._since: dict[tuple[str, float], float] = {}  # name, when it was asked for -> without a worker since

    def look(self, workers: Iterable[WorkerRecord]) -> None:
        """Fail the races that have been without a worker for too long. Blocking. Raises Failure(STORAGE, INTERNAL)."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + min(_LOOK_S_MAX, self._wait_s / 2)
        present = [*workers]
        stranded = {
            (race.key.name, race.requested_at): race
            for race in self._races.all()
            if not race.state.ended and not has_worker(race, present)
        }
        self._since = {of: self._since.get(of, now) for of in stranded}
        for of, race in stranded.items():
            if now - self._since[of] >= self._wait_s:
                self._fail(race)

    def _fail(self, race: Race) -> None:
        lock = self._races.try_run(race.key)
        if lock is None:  # a worker runs it
            return
        now = time.time()  # noqa: TID251 - for people
        why = (
            f"no worker of pool '{race.pool}' with its device came within {self._wait_s:g} s: start one "
            f"(`millstream up --pool {race.pool}=1`), then ask again (`millstream race {race.model}`)"
        )

        def change(present: Race | None) -> Race | None:
            waits = present is not None and present.is_same_request(race) and not present.state.ended
            return present.ended(RaceState.FAILED, now, why) if waits and present is not None else None

        try:
            after = self._races.change(race.key, change)
        finally:
            lock.release()
        if after is not None and after.state is RaceState.FAILED:
            with suppress(Failure):  # its version was deleted, and its samples with it
                self._repository.samples.forget_captured(self._repository.manifest(race.model, race.version))
            log.warning("the race of %s version %d failed: %s", race.model, race.version, why)
