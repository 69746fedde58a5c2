"""swaps: brings the loaded versions of this worker to what their choices say, while the main loop serves.

choice ─> load its variants beside the version, measure ─> swap between two runs ─> trial
undone ─> the baseline serves ─> swap back between two runs ─> close the variants

Nothing is unloaded to make room: what finds no memory is tried again later, and the present form goes on serving.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from millstream.plugins.compile.stored.choices import Choice
from millstream.plugins.compile.stored.race_verdicts import undo
from millstream.plugins.compile.stored.races import RaceKey
from millstream.plugins.compile.worker.table import Entry, VariantTable, serving_table
from millstream.plugins.compile.worker.trials import DEATHS_MAX, VariantTrials, end_trials_of_deleted
from millstream.plugins.compile.worker.watch import VariantWatch
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.placement.views import Footprint
from millstream.services.process.allocator import return_freed
from millstream.services.process.low_priority import at_low_priority
from millstream.services.repository.base import Repository
from millstream.services.repository.footprints import file_bytes
from millstream.services.sizes import sizes
from millstream.services.wire.records import State
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Instance, OutOfMemory
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from millstream.workers.models.memory_budget import MemoryBudget
from millstream.workers.models.open_form import open_form

log = logging.getLogger("millstream.races")

RETRY_S = 30.0  # pause before a swap that found no memory is tried again
TRIAL_RUNS = 256  # runs of variants in which the death of a process counts against them
TRIAL_S_MIN = 10.0  # shortest time likewise
POLL_S = 0.002  # between two looks at the main loop
SWEEP_S = 600.0  # between two looks for trials of versions that were deleted


class Progress(NamedTuple):
    """How far the main loop is.

    Args:
        runs: that it began.
        waiting: whether it waits for work.
    """

    runs: int
    waiting: bool


@dataclass(slots=True)
class _Swapped:
    """A version that variants serve.

    Args:
        measured: profile of the baseline.
        trial: name of the trial, while it lasts.
        since: when the trial began.
    """

    measured: dict[int, float]
    trial: str
    since: float


class VariantSwaps:
    """Follows the choices of loaded versions. Called by one thread, except for `close`.

    Args:
        environment: id of the device and its libraries: choices of others are not followed.
        progress: how far the main loop is.
    """

    def __init__(
        self,
        repository: Repository,
        at: LoadEnvironment,
        models: LoadedModels,
        environment: str,
        progress: Callable[[], Progress],
        trials: VariantTrials,
        metrics: WorkerMetrics,
    ) -> None:
        self._repository = repository
        self._at = at
        self._models = models
        self._environment = environment
        self._progress = progress
        self._trials = trials
        self._metrics = metrics
        self._budget = at.budget or MemoryBudget(0)
        self._swapped: dict[str, _Swapped] = {}  # by content id
        self._retry_at: dict[str, float] = {}  # content id -> monotonic time
        self._said: dict[str, str] = {}  # content id -> the failure that the log names
        self._sweep_at = 0.0  # monotonic; at once: versions may have been deleted while no worker ran
        self._stopping = threading.Event()

    def close(self) -> None:
        """Begin no further swap."""
        self._stopping.set()
        self._trials.close()

    def follow(self, raced: Collection[tuple[str, int]]) -> None:
        """Swap what differs from its choice. `raced`: models and versions that may have one."""
        models = self._models.all()
        for content_id in self._swapped.keys() - models.keys():
            self._trials.end(self._swapped.pop(content_id).trial)
        self._said = {content_id: said for content_id, said in self._said.items() if content_id in models}
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + SWEEP_S
            end_trials_of_deleted(self._trials, self._repository, models)
        for model in models.values():
            if self._stopping.is_set():
                return
            manifest, table = model.manifest, _table(model)
            if model.state is State.READY and (table is not None or (manifest.model, manifest.version) in raced):
                try:
                    self._follow(model, table)
                    self._said.pop(manifest.content_id, None)
                except Failure as failure:
                    self._say_once(manifest.content_id, failure.message)
                except Exception as error:  # other versions, and races, go on
                    log.exception("%s cannot follow its choice", manifest.content_id)
                    self._postpone(manifest.content_id, f"{type(error).__name__}: {error}")

    def _follow(self, model: LoadedModel, table: VariantTable | None) -> None:
        manifest = model.manifest
        if table is not None and table.undo_reason:
            self._undo(manifest, table.undo_reason)
        choice = self._repository.choices.get(manifest, self._at.kind, self._environment)
        if table is None:
            if choice is not None and time.monotonic() >= self._retry_at.get(manifest.content_id, 0.0):
                self._swap_in(model, choice)
        elif choice is None or choice.raced_at != table.choice.raced_at:
            self._swap_back(model, table, "another race decided" if choice is not None else "")
        else:
            self._end_trial(model, table)

    def _say_once(self, content_id: str, why: str) -> None:
        """Log why a version cannot follow its choice, unless that is what the log says already."""
        if self._said.get(content_id) != why:
            self._said[content_id] = why
            log.warning("%s: %s", content_id, why)

    def _undo(self, manifest: Manifest, why: str) -> None:
        """Take the choice back for all workers of this kind."""
        key = RaceKey(manifest.model, manifest.version, self._at.kind, self._environment)
        now = time.time()  # noqa: TID251 - for people
        if undo(self._repository, manifest, key, why, now, automatic=True):
            log.warning("undone: the variants of %s serve no longer: %s", manifest.content_id, why)
            self._metrics.variant_undone(manifest)

    # In.

    def _swap_in(self, model: LoadedModel, choice: Choice) -> None:
        manifest, content_id = model.manifest, model.manifest.content_id
        trial = _trial(content_id, choice)
        if self._trials.deaths(trial) >= DEATHS_MAX:
            self._trials.end(trial)
            self._undo(manifest, f"{DEATHS_MAX} processes ended while they tried it")
            return
        account = _account(content_id)
        need = _times(self._need(model), len(choice.variants))
        if not self._budget.reserve(account, need):
            self._postpone(content_id, f"its variants take {sizes(need.load_bytes)[0]} of memory, which are not free")
            return
        self._trials.begin(trial)
        opened: dict[str, Instance] = {}
        try:
            profiles = self._open_all(model, choice, opened)
        except Exception as error:
            for one in opened.values():
                one.close()
            return_freed()
            self._free(account)
            self._trials.end(trial)
            if isinstance(error, OutOfMemory | MemoryError):
                self._postpone(content_id, str(error) or "there is no memory")
                return
            if not isinstance(error, Failure):
                log.exception("the variants of %s cannot be loaded", content_id)
            why = error.message if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
            self._undo(manifest, f"it cannot be loaded: {why}")
            return
        self._budget.settle(account, need)
        baseline = model.instance
        assert baseline is not None, "it is ready"
        entries = serving_table(choice)
        table = VariantTable(
            entries,
            opened,
            baseline,
            manifest.signature,
            VariantWatch(dict(model.measured)),
            choice,
            lambda: self._free(account),
        )
        measured = dict(model.measured) | _measured(entries, profiles)
        swapped = _Swapped(dict(model.measured), trial, time.monotonic())
        if self._models.swap(
            model, table, measured, Profile(measured).rows_worth_running(model.rows_max), choice.names
        ):
            self._swapped[content_id] = swapped
            self._metrics.variant_swapped(manifest)
            log.info("swapped: %s is served by %s", content_id, choice.names)
        else:  # it was unloaded meanwhile, which closed the baseline
            table.release()
            self._trials.end(trial)

    def _open_all(self, model: LoadedModel, choice: Choice, opened: dict[str, Instance]) -> dict[str, dict[int, float]]:
        """Load, warm up and measure the variants of a choice into `opened`; return their profiles. Raises Failure."""
        manifest, choices = model.manifest, self._repository.choices
        folder = self._repository.folder_of(manifest)
        profiles: dict[str, dict[int, float]] = {}
        with self._budget.measuring():
            for variant in choice.variants:
                path = at_low_priority(partial(choices.file, manifest, variant, folder / manifest.served))
                rows_max = 1 if variant.single else model.rows_max
                same = variant.backend == self._at.backend_name
                backend = self._at.backend if same else get_backend(variant.backend)
                opened[variant.key], profiles[variant.key] = open_form(
                    manifest, (folder, path), backend, self._at, variant.options, rows_max
                )
        return profiles

    # Trial.

    def _end_trial(self, model: LoadedModel, table: VariantTable) -> None:
        """End the trial after enough runs of the variants."""
        swapped = self._swapped[model.manifest.content_id]
        if swapped.trial and table.runs >= TRIAL_RUNS and time.monotonic() - swapped.since >= TRIAL_S_MIN:
            self._trials.end(swapped.trial)
            swapped.trial = ""

    # Back.

    def _swap_back(self, model: LoadedModel, table: VariantTable, why: str) -> None:
        content_id = model.manifest.content_id
        swapped = self._swapped[content_id]
        table.fall_back(why or "it was undone")
        rows = Profile(swapped.measured).rows_worth_running(model.rows_max)
        if not self._models.swap(model, table.baseline, swapped.measured, rows, ""):
            return  # it was unloaded meanwhile, which closed the table
        self._wait_for_main_loop()
        table.release()
        return_freed()
        self._trials.end(swapped.trial)
        del self._swapped[content_id]
        log.info("swapped back: %s is served by its own file", content_id)

    # Memory, and the main loop.

    def _wait_for_main_loop(self) -> bool:
        """Wait until no run that began before this call is in progress; False: the worker stops."""
        began = self._progress()
        while not self._stopping.is_set():
            now = self._progress()
            # A run that is counted once may have looked up its instance before; the second one did not.
            if now.waiting or now.runs >= began.runs + 2:
                return True
            self._stopping.wait(POLL_S)
        return False

    def _need(self, model: LoadedModel) -> Footprint:
        """Return what one form of a version takes, by what its own file took."""
        found = model.footprint or Footprint(0)
        files = file_bytes(model.manifest)
        return replace(found, resident_bytes=max(found.resident_bytes, files), measured=False)

    def _postpone(self, content_id: str, why: str) -> None:
        self._retry_at[content_id] = time.monotonic() + RETRY_S
        log.info("%s is not swapped now: %s", content_id, why)

    def _free(self, account: str) -> None:
        if self._budget.footprint(account) is not None:
            self._budget.begin_unload(account)
            self._budget.freed(account)


def _table(model: LoadedModel) -> VariantTable | None:
    return model.instance if isinstance(model.instance, VariantTable) else None


def _trial(content_id: str, choice: Choice) -> str:
    return f"{content_id} {choice.raced_at}"


def _account(content_id: str) -> str:
    return f"{content_id} variants"


def _measured(entries: Sequence[Entry], profiles: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Return the seconds of runs by rows, each of the variant that runs so many rows."""
    found: dict[int, float] = {}
    lower = 0
    for entry in entries:
        upper = entry.rows_max if entry is not entries[-1] else 1 << 30
        found |= {rows: one for rows, one in profiles.get(entry.key, {}).items() if lower < rows <= upper}
        lower = entry.rows_max
    return found


def _times(one: Footprint, count: int) -> Footprint:
    """Return what several forms take together: their peaks do not coincide."""
    return replace(
        one,
        resident_bytes=count * one.resident_bytes,
        device_resident_bytes=count * one.device_resident_bytes,
    )
