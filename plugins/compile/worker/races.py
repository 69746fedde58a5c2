"""races: a thread that runs the races of this worker's versions, one after the other, and follows all verdicts.

races of the repository ─> one that waits for a worker like this ─> lock race and device ─> reserve memory ─> process
its report ─> decide ─> choice ─> variants.swaps, here and in every worker of the kind
A load that needs the memory ends the process; the race goes on later with what is compiled by then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from millstream.plugins.compile.race.estimate import Estimate, estimates_from
from millstream.plugins.compile.race.report import ESTIMATES_MAX, Gate, RaceTask
from millstream.plugins.compile.stored.race_verdicts import decide
from millstream.plugins.compile.stored.races import TRIES_MAX, Lock, Race, RaceState
from millstream.plugins.compile.worker.process import Outcome, RaceProcess
from millstream.plugins.compile.worker.queue import RaceQueue, Racer, change
from millstream.plugins.compile.worker.swaps import VariantSwaps
from millstream.services.device import find_device
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.repository.base import Repository
from millstream.services.repository.footprints import file_bytes
from millstream.services.sizes import sizes
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from millstream.workers.models.memory_budget import MEMORY_OPTION, MemoryBudget
from millstream.workers.models.spare_memory import SpareMemory

log = logging.getLogger("millstream.races")

CHECK_S = 0.5  # interval at which the folder of races is looked at
RETRY_S = 15.0  # pause before a race that found no memory, or failed for a passing reason, is tried again
UNFINISHED_RETRY_S = 60.0  # pause before a race that other work left no time begins again, with a share of it
LONGER_WITH_SHARE = 5.0  # times as long a race with a share may take
DIED_RETRY_S = 2.0  # pause after the process of a race died
PROGRESS_S = 0.5  # between two stored events of a race
#: Memory of each process of a race: the libraries, then what compiling takes for each byte of the files.
PROCESS_BYTES, PROCESS_BYTES_MIN = 768 << 20, 320 << 20
FILE_RATIO = 6
#: Further bytes of a process that uses a GPU: the host memory of CUDA, cuBLAS and cuDNN.
GPU_BYTES = 2 << 30
PROCESSES = 3  # of a race that have their models loaded at the same time


class WorkerRaces:
    """Runs races in a thread of its own. `stop` may be called by any thread."""

    def __init__(
        self,
        racer: Racer,
        repository: Repository,
        at: LoadEnvironment,
        models: LoadedModels,
        swaps: VariantSwaps,
        metrics: WorkerMetrics,
    ) -> None:
        self._racer = racer
        self._repository = repository
        self._at = at
        self._models = models
        self._swaps = swaps
        self._metrics = metrics
        self._budget = at.budget or MemoryBudget(0)
        self._lock = threading.Lock()
        self.memory = SpareMemory(self._budget, lambda: self._stop_race("a load needs the memory"))
        self._process: RaceProcess | None = None
        self._stop_reason = ""  # why the race in progress is stopped
        self._running: Race | None = None
        self._queue = RaceQueue(racer, repository, at)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="races", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Kill the race in progress, which another worker goes on with, and follow no more verdicts."""
        self._stopping.set()
        self._stop_race("the worker stops")
        self._swaps.close()

    def _stop_race(self, why: str) -> None:
        with self._lock:
            self._stop_reason = self._stop_reason or why
            if self._process is not None:
                self._process.stop()

    def _run(self) -> None:
        racing: threading.Thread | None = None
        said = ""  # the failure that the log names: a repository that cannot be read or written fails at each look
        self._repository.samples.sweep()
        while not self._stopping.is_set():
            try:
                races = self._repository.races.all()
                self._check_running(races)
                self._swaps.follow({(race.model, race.version) for race in races})
                if racing is None or not racing.is_alive():
                    racing = self._begin(races)
                said = ""
            except Failure as failure:
                if failure.message != said:
                    said = failure.message
                    log.warning("%s", failure.message)
            except Exception:
                log.exception("following races failed; trying again")
            self._stopping.wait(CHECK_S)

    def _check_running(self, races: Sequence[Race]) -> None:
        """Stop the race in progress if it was cancelled, or its version was deleted or replaced."""
        count = [race.state for race in races]
        waiting = count.count(RaceState.QUEUED) + count.count(RaceState.WAITING)
        self._metrics.races_waiting(waiting, count.count(RaceState.RUNNING))
        running = self._running
        if running is None:
            return
        present = next((race for race in races if race.key == running.key), None)
        if present is None or present.content != running.content:
            self._stop_race("its version was deleted")
        elif present.state is not RaceState.RUNNING or not present.is_same_request(running):
            self._stop_race("it was cancelled")

    # Which race is next.

    def _begin(self, races: Sequence[Race]) -> threading.Thread | None:
        """Start the race that waits the longest for a worker like this one."""
        for race, model in self._queue.ready(races, self._models.all().values()):
            locks = self._locks(race)
            if locks:
                thread = threading.Thread(target=self._race, args=(race, model, locks), name="race", daemon=True)
                thread.start()
                return thread
        return None

    def _locks(self, race: Race) -> tuple[Lock, ...]:
        """Lock the device and the race; (): another worker has one of them."""
        device = self._repository.races.try_device(self._racer.host, self._at.device)
        if device is None:
            return ()
        lock = self._repository.races.try_run(race.key)
        if lock is None:
            device.release()
            return ()
        return device, lock

    # One race.

    def _race(self, race: Race, model: LoadedModel, locks: tuple[Lock, ...]) -> None:
        manifest = model.manifest
        account = f"the race of {manifest.content_id}"
        try:
            bytes_each = self._reserve(account, manifest)
            if not bytes_each and self._budget.budget_bytes:
                self._wait(race, self._no_memory(manifest))
                return
            try:
                self._race_within(race, model, bytes_each)
            finally:
                self.memory.free()
        except Failure as failure:
            log.warning("the race of %s: %s", manifest.content_id, failure.message)
            self._queue.postpone(race, RETRY_S)
        except Exception:
            log.exception("the race of %s failed", manifest.content_id)
            self._queue.postpone(race, RETRY_S)
        finally:
            for lock in locks:
                lock.release()

    def _reserve(self, account: str, manifest: Manifest) -> int:
        """Reserve the memory of a race; return the bytes of each of its processes; 0: no limit, or it is not free.

        A race takes what it wants or, where less is free, all of that, if the smaller part suffices for small models.
        """
        fixed = self._fixed_bytes(manifest)
        each = max(PROCESS_BYTES_MIN + fixed, min(PROCESS_BYTES + fixed, self._budget.free_bytes // PROCESSES))
        with self._lock:
            self._stop_reason = "the worker stops" if self._stopping.is_set() else ""
            reserved = self.memory.reserve(account, Footprint(PROCESSES * each))
            return each if reserved and self._budget.budget_bytes else 0

    def _fixed_bytes(self, manifest: Manifest) -> int:
        """Return what each process of a race takes at least, beyond its own code."""
        on_gpu = self._at.device.partition(":")[0] in {"cuda", "tensorrt"}
        return FILE_RATIO * file_bytes(manifest) + (GPU_BYTES if on_gpu else 0)

    def _no_memory(self, manifest: Manifest) -> str:
        needed = PROCESSES * (PROCESS_BYTES_MIN + self._fixed_bytes(manifest))
        budget = self._budget
        takes, free = sizes(needed, budget.free_bytes)
        numbers = f"it takes {takes} of memory beside the models, and {free} are free"
        return f"it waits for memory: {numbers}; raise {MEMORY_OPTION}, or unload others"

    def _race_within(self, race: Race, model: LoadedModel, bytes_each: int) -> None:
        began = time.monotonic()
        tries = race.tries + 1
        if tries > TRIES_MAX:
            self._fail(race, model.manifest, f"{TRIES_MAX} workers ended while they ran it")
            return
        now = time.time()  # noqa: TID251 - for people
        running = {"state": RaceState.RUNNING, "worker": self._racer.worker, "tries": tries, "began_at": now, "why": ""}
        present = self._change(race, lambda one: one.model_copy(update=running))
        if present is None or present.state is not RaceState.RUNNING:
            return
        self._running = present
        log.info("a race of %s begins", model.manifest.content_id)
        try:
            outcome = self._run_process(present, model, bytes_each)
        except Failure as failure:  # its folder cannot be written at present
            outcome = Outcome(None, failure.message, died=True)
        finally:
            self._running = None
        seconds = time.monotonic() - began
        if outcome.report is not None:
            self._decide(present, model.manifest, outcome.report, seconds)
        elif outcome.unfinished:
            self._unfinished(present, outcome.error)
        elif outcome.error and (not outcome.died or tries >= TRIES_MAX):
            self._fail(present, model.manifest, outcome.error)
        else:
            self._interrupted(present, model.manifest, outcome.error)

    def _run_process(self, race: Race, model: LoadedModel, bytes_each: int) -> Outcome:
        process = RaceProcess(self._task(race, model, bytes_each))
        with self._lock:
            self._process = process
            if self._stop_reason:
                process.stop()
        stored, stage = [0.0], [""]

        def progress(event: dict[str, Any]) -> None:
            if self.memory.asked():
                return  # its end is awaited, and a write to a busy disk takes seconds
            if event["stage"] != stage[0] or time.monotonic() - stored[0] >= PROGRESS_S:
                stored[0], stage[0] = time.monotonic(), event["stage"]
                with suppress(Failure):  # a full disk: the race goes on, and needs space at its end
                    change(self._repository, race, lambda one: one.model_copy(update={"progress": event}))

        try:
            return process.run(progress)
        finally:
            self.memory.free()  # a load may wait for it, and what follows writes to the repository
            with self._lock:
                self._process = None

    def _task(self, race: Race, model: LoadedModel, bytes_each: int) -> RaceTask:
        manifest, options = model.manifest, race.options
        choices, samples = self._repository.choices, self._repository.samples
        cache = choices.make_cache(manifest, self._at.kind, self._racer.environment)
        serving = choices.get(manifest, self._at.kind, self._racer.environment)
        given = samples.find(manifest)
        return RaceTask(
            manifest=manifest,
            folder=self._repository.folder_of(manifest),
            device=self._at.device,
            backend=self._at.backend_name,
            threads=self._at.threads,
            seconds=options.seconds * (LONGER_WITH_SHARE if race.unfinished else 1.0),
            share=race.unfinished > 0,
            gate=Gate(**options.gate.model_dump()),
            samples=given,
            accept_random_samples=options.accept_random_samples,
            memory_bytes=bytes_each,
            targets=options.targets,
            serving=tuple(one.key for one in serving.variants) if serving is not None else (),
            estimates=self._estimates(race, manifest),
            cache=cache,
        )

    def _estimates(self, race: Race, manifest: Manifest) -> dict[str, Estimate]:
        """Return what earlier races of workers of this kind, on such a device, say of candidates."""
        device = find_device(self._at.device).fingerprint
        alike = [
            one
            for one in self._repository.races.all()
            if one.kind == race.kind and (one.device == race.device or (device and one.fingerprint == device))
        ]
        known = estimates_from((trial for one in alike for trial in one.known_trials()), file_bytes(manifest))
        return dict(list(known.items())[:ESTIMATES_MAX])

    # Its end.

    def _decide(self, race: Race, manifest: Manifest, report: dict[str, Any], seconds: float) -> None:
        now = time.time()  # noqa: TID251 - for people
        try:
            won = decide(self._repository, manifest, race, report, now)
        except Failure as failure:
            if failure.code is Code.NOT_FOUND:
                return
            if failure.code is Code.MODEL or race.tries >= TRIES_MAX:
                self._fail(race, manifest, failure.message)
            else:  # a full disk: what is compiled is kept
                self._interrupted(race, manifest, failure.message)
            return
        self._metrics.race_ended("decided", seconds)
        winner = f"{report['winner']} is {report['ratio']:.2f} times as fast"
        what = winner if won else "the version's own file serves on"
        log.info("the race of %s is decided after %.0f s: %s", manifest.content_id, seconds, what)

    def _fail(self, race: Race, manifest: Manifest, why: str) -> None:
        now = time.time()  # noqa: TID251 - for people
        self._change(race, lambda one: one.ended(RaceState.FAILED, now, why))
        self._metrics.race_ended(RaceState.FAILED.value)
        log.warning("the race of %s version %d failed: %s", race.model, race.version, why)

    def _unfinished(self, race: Race, why: str) -> None:
        """End a race that found too little time; a worker queues it again, once, with a share of the processor."""
        self._queue.postpone(race, UNFINISHED_RETRY_S)
        now = time.time()  # noqa: TID251 - for people
        ended = race.ended(RaceState.UNFINISHED, now, why).model_copy(
            update={"unfinished": race.unfinished + 1, "tries": 0}
        )
        change(self._repository, race, lambda _: ended)
        self._metrics.race_ended(RaceState.UNFINISHED.value)
        log.warning("the race of %s version %d is unfinished: %s", race.model, race.version, why)

    def _interrupted(self, race: Race, manifest: Manifest, died: str) -> None:
        """Queue a race again whose process was stopped, unless it was cancelled; only a death costs a try."""
        with self._lock:
            why = died or self._stop_reason
        self._metrics.race_ended("interrupted")
        log.info("the race of %s version %d is interrupted: %s", race.model, race.version, why)
        self._queue.postpone(race, DIED_RETRY_S if died else RETRY_S)
        again = {"state": RaceState.QUEUED, "worker": "", "tries": race.tries - (not died), "why": why, "progress": {}}
        change(self._repository, race, lambda one: one.model_copy(update=again))

    def _wait(self, race: Race, why: str) -> None:
        self._queue.postpone(race, RETRY_S)
        self._change(race, lambda one: one.model_copy(update={"why": why}))

    def _change(self, race: Race, to: Callable[[Race], Race]) -> Race | None:
        """Change a race unless it ended, or was asked for anew. Returns it as it is then; None: it is another one."""

        def changed(one: Race | None) -> Race | None:
            return None if one is None or one.state.ended or not one.is_same_request(race) else to(one)

        present = self._repository.races.change(race.key, changed)
        return present if present is not None and present.is_same_request(race) else None
