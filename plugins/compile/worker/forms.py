"""Brings the loaded versions of this worker to what their selections say, while the main loop serves.

selection ─> load its form beside the version, measure ─> swap between two runs ─> trial
undone ─> the baseline serves ─> swap back between two runs ─> close the form

Nothing is unloaded to make room: what finds no memory is tried again later, and the present form goes on serving.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from millstream.plugins.compile.stored.job import Jobs, RaceUndone, new_job
from millstream.plugins.compile.stored.selection import Selection, Selections, undo
from millstream.plugins.compile.worker.form import FormWatch, ServingForm
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.placement.views import Footprint
from millstream.services.process.process_memory import return_freed
from millstream.services.process.threads import at_low_priority
from millstream.services.repository.footprints import file_bytes
from millstream.services.sizes import sizes
from millstream.services.wire.records import State
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Instance, OutOfMemory
from millstream.workers.models.load_version import open_form
from millstream.workers.models.loaded_models import LoadedModel
from millstream.workers.models.memory_budget import MemoryBudget
from millstream.workers.parts import WorkerParts

log = logging.getLogger("millstream.races")

RETRY_S = 30.0  # pause before a swap that found no memory is tried again
DEATHS_MAX = 2  # of processes during a trial of a form; then it is undone
TRIAL_RUNS = 256  # runs of a form in which the death of a process counts against it
TRIAL_S_MIN = 10.0  # shortest time likewise
TRIALS_MAX = 256  # of one worker; beyond, the oldest is forgotten
POLL_S = 0.002  # between two looks at the main loop


class Trials:
    """Counts the deaths of a worker's processes while they tried a form, across their restarts.

    begin ─> <run>/variants-<worker>.json: {trial: processes that began it} ─> end removes it; a death leaves it
    """

    def __init__(self, run_dir: Path, worker: str) -> None:
        self._path = run_dir / f"variants-{worker}.json"
        self._lock = threading.Lock()
        self._begun: set[str] = set()  # by this process
        self._counts: dict[str, int] = {}
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(self._path.read_bytes()).items()
            self._counts = {trial: count for trial, count in found if isinstance(count, int)}

    def deaths(self, trial: str) -> int:
        """Return how many processes ended while they tried it."""
        return self._counts.get(trial, 0) - (trial in self._begun)

    def begin(self, trial: str) -> None:
        with self._lock:
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
            self._write()

    def _write(self) -> None:
        kept = {trial: count for trial, count in self._counts.items() if count > 0}
        self._counts = dict([*kept.items()][-TRIALS_MAX:])
        try:
            if not self._counts:
                self._path.unlink(missing_ok=True)
                return
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(self._counts))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)


@dataclass(slots=True)
class _Swapped:
    """A version that a form serves.

    Args:
        measured: profile of the baseline.
        trial: name of the trial, while it lasts.
        since: when the trial began.
    """

    measured: dict[int, float]
    trial: str
    since: float


class Forms:
    """Follows the selections of loaded versions. Called by one thread, except for `close`.

    Args:
        worker: the parts of the worker.
        environment: id of the device and its libraries: selections of others are not followed.
    """

    def __init__(self, worker: WorkerParts, environment: str) -> None:
        self._worker = worker
        self._at = worker.environment
        self._models = worker.models
        self._selections, self._jobs = Selections(worker.repository), Jobs(worker.repository)
        self._environment = environment
        self._trials = Trials(worker.run_dir, worker.name)
        self._budget = self._at.budget or MemoryBudget(0)
        self._swapped: dict[str, _Swapped] = {}  # by content id
        self._retry_at: dict[str, float] = {}  # content id -> monotonic time
        self._said: dict[str, str] = {}  # content id -> the failure that the log names
        self._stopping = threading.Event()

    def close(self) -> None:
        """Begin no further swap."""
        self._stopping.set()
        self._trials.close()

    def follow(self, raced: Collection[tuple[str, int]]) -> None:
        """Swap what differs from its selection. `raced`: models and versions that may have one."""
        models = self._models.all()
        for content_id in self._swapped.keys() - models.keys():
            self._trials.end(self._swapped.pop(content_id).trial)
        self._said = {content_id: said for content_id, said in self._said.items() if content_id in models}
        for model in models.values():
            if self._stopping.is_set():
                return
            manifest, form = model.manifest, _form(model)
            if model.state is State.READY and (form is not None or (manifest.model, manifest.version) in raced):
                try:
                    self._follow(model, form)
                    self._said.pop(manifest.content_id, None)
                except Failure as failure:
                    if self._said.get(manifest.content_id) != failure.message:
                        self._said[manifest.content_id] = failure.message
                        log.warning("%s: %s", manifest.content_id, failure.message)
                except Exception as error:  # other versions, and races, go on
                    log.exception("%s cannot follow its selection", manifest.content_id)
                    self._postpone(manifest.content_id, f"{type(error).__name__}: {error}")

    def _follow(self, model: LoadedModel, form: ServingForm | None) -> None:
        manifest = model.manifest
        if form is not None and form.undo_reason:
            self._undo(manifest, form.undo_reason)
        selection = self._selections.get(manifest, self._at.kind, self._environment)
        if form is None:
            if selection is not None and time.monotonic() >= self._retry_at.get(manifest.content_id, 0.0):
                self._swap_in(model, selection)
        elif selection is None or selection.raced_at != form.selection.raced_at:
            self._swap_back(model, form, "another race decided" if selection is not None else "")
        else:
            self._end_trial(model, form)

    def _undo(self, manifest: Manifest, why: str) -> None:
        """Take the selection back for all workers of this kind."""
        now = time.time()  # noqa: TID251 - for people
        of = new_job(manifest, self._at.kind, self._environment, "", now)
        if undo(self._selections, self._jobs, manifest, of, RaceUndone(why=why, at=now)):
            log.warning("undone: the form of %s serves no longer: %s", manifest.content_id, why)
            self._worker.metrics.variant_undone(manifest)

    def _swap_in(self, model: LoadedModel, selection: Selection) -> None:
        manifest, content_id = model.manifest, model.manifest.content_id
        trial = f"{content_id} {selection.raced_at}"
        if self._trials.deaths(trial) >= DEATHS_MAX:
            self._trials.end(trial)
            self._undo(manifest, f"{DEATHS_MAX} processes ended while they tried it")
            return
        account, need = f"{content_id} variants", self._need(model)
        if not self._budget.reserve(account, need):
            self._postpone(content_id, f"its form takes {sizes(need.load_bytes)[0]} of memory, which are not free")
            return
        self._trials.begin(trial)
        try:
            opened, profile = self._open(model, selection)
        except Exception as error:
            return_freed()
            self._free(account)
            self._trials.end(trial)
            if isinstance(error, OutOfMemory | MemoryError):
                self._postpone(content_id, str(error) or "there is no memory")
                return
            if not isinstance(error, Failure):
                log.exception("the form of %s cannot be loaded", content_id)
            why = error.message if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
            self._undo(manifest, f"it cannot be loaded: {why}")
            return
        self._budget.settle(account, need)
        baseline, before = model.instance, dict(model.measured)
        assert baseline is not None, "it is ready"
        form = ServingForm(
            opened, baseline, manifest.signature, FormWatch(before), selection, lambda: self._free(account)
        )
        if selection.form.single:
            profile = {rows: seconds for rows, seconds in profile.items() if rows == 1}
        if self._serve(model, form, before | profile, selection.form.target):
            self._swapped[content_id] = _Swapped(before, trial, time.monotonic())
            self._worker.metrics.variant_swapped(manifest)
            log.info("swapped: %s is served by %s", content_id, selection.form.target)
        else:  # it was unloaded meanwhile, which closed the baseline
            form.release()
            self._trials.end(trial)

    def _open(self, model: LoadedModel, selection: Selection) -> tuple[Instance, dict[int, float]]:
        """Load, warm up and measure the form of a selection; return it with its profile. Raises Failure."""
        manifest, form = model.manifest, selection.form
        folder = self._worker.repository.folder_of(manifest)
        with self._budget.measuring():
            path = at_low_priority(partial(self._selections.file, manifest, form, folder / manifest.served))
            same = form.backend == self._at.backend_name
            backend = self._at.backend if same else get_backend(form.backend)
            rows_max = 1 if form.single else model.rows_max
            return open_form(manifest, (folder, path), backend, self._at, form.options, rows_max)

    def _end_trial(self, model: LoadedModel, form: ServingForm) -> None:
        """End the trial after enough runs of the form."""
        swapped = self._swapped[model.manifest.content_id]
        if swapped.trial and form.runs >= TRIAL_RUNS and time.monotonic() - swapped.since >= TRIAL_S_MIN:
            self._trials.end(swapped.trial)
            swapped.trial = ""

    def _swap_back(self, model: LoadedModel, form: ServingForm, why: str) -> None:
        content_id = model.manifest.content_id
        swapped = self._swapped[content_id]
        form.fall_back(why or "it was undone")
        if not self._serve(model, form.baseline, swapped.measured, ""):
            return  # it was unloaded meanwhile, which closed the form
        self._wait_for_main_loop()
        form.release()
        return_freed()
        self._trials.end(swapped.trial)
        del self._swapped[content_id]
        log.info("swapped back: %s is served by its own file", content_id)

    def _serve(self, model: LoadedModel, instance: Instance, measured: dict[int, float], variant: str) -> bool:
        """Serve a version with another instance from the next run on; False: it was unloaded."""
        rows = Profile(measured).rows_worth_running(model.rows_max)
        return self._models.swap(model, instance, measured, rows, variant)

    def _wait_for_main_loop(self) -> None:
        """Wait until no run that began before this call is in progress, or the worker stops."""
        loop = self._worker.loop
        runs = loop.runs
        while not self._stopping.is_set():
            # A run that is counted once may have looked up its instance before; the second one did not.
            if loop.waiting or loop.runs >= runs + 2:
                return
            self._stopping.wait(POLL_S)

    def _need(self, model: LoadedModel) -> Footprint:
        """Return what a form of a version takes, by what its own file took."""
        found = model.footprint or Footprint(0)
        return replace(found, resident_bytes=max(found.resident_bytes, file_bytes(model.manifest)), measured=False)

    def _postpone(self, content_id: str, why: str) -> None:
        self._retry_at[content_id] = time.monotonic() + RETRY_S
        log.info("%s is not swapped now: %s", content_id, why)

    def _free(self, account: str) -> None:
        if self._budget.footprint(account) is not None:
            self._budget.begin_unload(account)
            self._budget.freed(account)


def _form(model: LoadedModel) -> ServingForm | None:
    return model.instance if isinstance(model.instance, ServingForm) else None
