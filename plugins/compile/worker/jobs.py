"""A thread that runs the races of this worker's versions, one after the other, and follows all verdicts.

jobs of the repository ─> one whose version is ready here ─> lock job and device ─> reserve memory ─> process
its report ─> decide ─> selection ─> forms, here and in every worker of the kind
A load that needs the memory ends the process; the race goes on later with what is compiled by then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from millstream.plugins.compile.race.report import Progress, RaceEvent, RaceTask
from millstream.plugins.compile.stored.job import (
    TRIES_MAX,
    Job,
    Jobs,
    RaceState,
    environment,
    find_samples,
    new_job,
    sweep_samples,
)
from millstream.plugins.compile.stored.selection import Selections, decide
from millstream.plugins.compile.worker.forms import Forms
from millstream.plugins.compile.worker.process import Outcome, RaceProcess
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.repository.disk import FileLock
from millstream.services.repository.documents import content_digest
from millstream.services.repository.footprints import file_bytes
from millstream.services.sizes import sizes
from millstream.services.wire.records import State
from millstream.workers.models.loaded_models import LoadedModel
from millstream.workers.models.memory_budget import MEMORY_OPTION, MemoryBudget, SpareMemory
from millstream.workers.parts import WorkerParts

log = logging.getLogger("millstream.races")

CHECK_S = 0.5  # interval at which the jobs are looked at
IDLE_S = 2.0  # the same while there is none
RETRY_S = 15.0  # pause before a race that found no memory, or failed for a passing reason, is tried again
DIED_RETRY_S = 2.0  # pause after the process of a race died
PROGRESS_S = 0.5  # between two stored events of a race
#: Memory of each process of a race: the libraries, then what compiling takes for each byte of the files.
PROCESS_BYTES, PROCESS_BYTES_MIN = 768 << 20, 320 << 20
FILE_RATIO = 6
#: Further bytes of a process that uses a GPU: the host memory of CUDA, cuBLAS and cuDNN.
GPU_BYTES = 2 << 30
PROCESSES = 3  # of a race: the baseline's, and a compilation that may take twice as much
_OTHER_ENVIRONMENT = "the device, or the version of a library, is another than that of the last verdict"


class JobQueue:
    """The jobs that wait for a worker like this one. Used by one thread, except for `postpone`."""

    def __init__(self, worker: WorkerParts, device: str) -> None:
        self._jobs = Jobs(worker.repository)
        self._at = worker.environment
        self._here = (worker.environment.kind, device, worker.pool)
        self._retry_at: dict[tuple[str, int, float], float] = {}  # model, version, request -> monotonic time

    def all(self) -> list[Job]:
        return self._jobs.all()

    def postpone(self, job: Job, seconds: float) -> None:
        """Let a job wait at least this time, unless it is asked for again."""
        now = time.monotonic()
        present = {of: at for of, at in list(self._retry_at.items()) if at > now}
        self._retry_at = {**present, (job.model, job.version, job.requested_at): now + seconds}

    def ready(self, jobs: Sequence[Job], models: Iterable[LoadedModel]) -> Iterator[tuple[Job, LoadedModel]]:
        """Yield jobs that can begin, or go on, with their versions, the one that was asked for first at first."""
        if not jobs:
            return
        known = {
            (model.manifest.model, model.manifest.version): model
            for model in models
            if model.manifest.source_format in self._at.backend.formats
        }
        ready = {of: model for of, model in known.items() if model.state is State.READY}
        self._request_again(jobs, ready)
        for job in sorted(jobs, key=lambda one: one.requested_at):
            model = known.get((job.model, job.version))
            if model is None or job.state.ended or (job.kind, job.device, job.pool) != self._here:
                continue
            if job.content != content_digest(model.manifest):
                continue
            if model.state is State.FAILED and job.state is RaceState.QUEUED:
                why = f"the version cannot be loaded: {model.reason}"
                self._jobs.change(job, lambda one, why=why: one.model_copy(update={"why": why}))  # type: ignore[misc]
            waits_until = self._retry_at.get((job.model, job.version, job.requested_at), 0.0)
            if model.state is State.READY and time.monotonic() >= waits_until:
                yield job, model

    def _request_again(self, jobs: Sequence[Job], ready: Mapping[tuple[str, int], LoadedModel]) -> None:
        """Ask for the races of versions whose verdicts were reached with another device or other libraries."""
        kind, device, pool = self._here
        known = {(job.model, job.version) for job in jobs if job.device == device}
        for job in jobs:
            of = (job.model, job.version)
            if (job.kind, job.pool) != (kind, pool) or of in known or of not in ready:
                continue
            if job.state is RaceState.CANCELLED:
                continue
            known.add(of)
            now = time.time()  # noqa: TID251 - for people
            asked = new_job(ready[of].manifest, kind, device, pool, now)
            asked = asked.model_copy(update={"options": job.options, "why": _OTHER_ENVIRONMENT})
            self._jobs.put(asked, lambda before, asked=asked: before or asked)  # type: ignore[misc]
            log.info("queued: a race of %s: %s", ready[of].manifest.content_id, _OTHER_ENVIRONMENT)


class JobRunner:
    """Runs races in a thread of its own. `stop` may be called by any thread."""

    def __init__(self, worker: WorkerParts) -> None:
        self._worker = worker
        self._device = environment(worker.device.fingerprint, worker.packages)
        self._at = worker.environment
        self._jobs, self._selections = Jobs(worker.repository), Selections(worker.repository)
        self._queue = JobQueue(worker, self._device)
        self._forms = Forms(worker, self._device)
        self._metrics = worker.metrics
        self._budget = worker.environment.budget or MemoryBudget(0)
        self._lock = threading.Lock()
        self.memory = SpareMemory(self._budget, lambda: self._stop_race("a load needs the memory"))
        self._process: RaceProcess | None = None
        self._stop_reason = ""  # why the race in progress is stopped
        self._running: Job | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="races", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Kill the race in progress, which another worker goes on with, and follow no more verdicts."""
        self._stopping.set()
        self._stop_race("the worker stops")
        self._forms.close()

    def _stop_race(self, why: str) -> None:
        with self._lock:
            self._stop_reason = self._stop_reason or why
            if self._process is not None:
                self._process.stop()

    def _run(self) -> None:
        racing: threading.Thread | None = None
        said = ""  # the failure that the log names: a repository that cannot be read or written fails at each look
        sweep_samples(self._worker.repository)
        while not self._stopping.is_set():
            jobs: Sequence[Job] = ()
            try:
                jobs = self._queue.all()
                self._check_running(jobs)
                self._forms.follow({(job.model, job.version) for job in jobs})
                if racing is None or not racing.is_alive():
                    racing = self._begin(jobs)
                said = ""
            except Failure as failure:
                if failure.message != said:
                    said = failure.message
                    log.warning("%s", failure.message)
            except Exception:
                log.exception("following races failed; trying again")
            self._stopping.wait(CHECK_S if jobs else IDLE_S)

    def _check_running(self, jobs: Sequence[Job]) -> None:
        """Stop the race in progress if it was cancelled, or its version was deleted or replaced."""
        states = [job.state for job in jobs]
        self._metrics.races_waiting(states.count(RaceState.QUEUED), states.count(RaceState.RUNNING))
        running = self._running
        if running is None:
            return
        of = (running.model, running.version, running.key)
        present = next((job for job in jobs if (job.model, job.version, job.key) == of), None)
        if present is None or present.content != running.content:
            self._stop_race("its version was deleted")
        elif present.state is not RaceState.RUNNING or not present.is_same_request(running):
            self._stop_race("it was cancelled")

    def _begin(self, jobs: Sequence[Job]) -> threading.Thread | None:
        """Start the race that waits the longest for a worker like this one."""
        for job, model in self._queue.ready(jobs, self._worker.models.all().values()):
            locks = self._jobs.try_locks(job, self._worker.host, self._at.device)
            if locks:
                thread = threading.Thread(target=self._race, args=(job, model, locks), name="race", daemon=True)
                thread.start()
                return thread
        return None

    def _race(self, job: Job, model: LoadedModel, locks: tuple[FileLock, ...]) -> None:
        content_id = model.manifest.content_id
        try:
            bytes_each = self._reserve(model.manifest)
            if not bytes_each and self._budget.budget_bytes:
                self._queue.postpone(job, RETRY_S)
                why = self._no_memory(model.manifest)
                self._jobs.change(job, lambda one: one.model_copy(update={"why": why}))
                return
            try:
                self._race_within(job, model, bytes_each)
            finally:
                self.memory.free()
        except Failure as failure:
            log.warning("the race of %s: %s", content_id, failure.message)
            self._queue.postpone(job, RETRY_S)
        except Exception:
            log.exception("the race of %s failed", content_id)
            self._queue.postpone(job, RETRY_S)
        finally:
            for lock in locks:
                lock.release()

    def _reserve(self, manifest: Manifest) -> int:
        """Reserve the memory of a race; return the bytes of each of its processes; 0: no limit, or it is not free.

        A race takes what it wants or, where less is free, all of that, if the smaller part suffices for small models.
        """
        fixed = self._fixed_bytes(manifest)
        each = max(PROCESS_BYTES_MIN + fixed, min(PROCESS_BYTES + fixed, self._budget.free_bytes // PROCESSES))
        with self._lock:
            self._stop_reason = "the worker stops" if self._stopping.is_set() else ""
            reserved = self.memory.reserve(f"the race of {manifest.content_id}", Footprint(PROCESSES * each))
            return each if reserved and self._budget.budget_bytes else 0

    def _fixed_bytes(self, manifest: Manifest) -> int:
        """Return what each process of a race takes at least, beyond its own code."""
        on_gpu = self._at.device.partition(":")[0] in {"cuda", "tensorrt"}
        return FILE_RATIO * file_bytes(manifest) + (GPU_BYTES if on_gpu else 0)

    def _no_memory(self, manifest: Manifest) -> str:
        needed = PROCESSES * (PROCESS_BYTES_MIN + self._fixed_bytes(manifest))
        takes, free = sizes(needed, self._budget.free_bytes)
        numbers = f"it takes {takes} of memory beside the models, and {free} are free"
        return f"it waits for memory: {numbers}; raise {MEMORY_OPTION}, or unload others"

    def _race_within(self, job: Job, model: LoadedModel, bytes_each: int) -> None:
        began, now = time.monotonic(), time.time()  # noqa: TID251 - for people
        tries = job.tries + 1
        if tries > TRIES_MAX:
            self._fail(job, f"{TRIES_MAX} workers ended while they ran it")
            return
        begin = {"state": RaceState.RUNNING, "worker": self._worker.id, "tries": tries, "began_at": now, "why": ""}
        present = self._jobs.change(job, lambda one: one.model_copy(update=begin))
        if present is None or present.state is not RaceState.RUNNING:
            return
        self._running = present
        log.info("a race of %s begins", model.manifest.content_id)
        try:
            outcome = self._run_process(present, model, bytes_each)
        except Failure as failure:  # its folder cannot be written at present
            outcome = Outcome(None, failure.message, again=True)
        finally:
            self._running = None
        if outcome.report is not None:
            outcome = self._decide(present, model.manifest, outcome, time.monotonic() - began)
        if outcome.error and (not outcome.again or tries >= TRIES_MAX):
            self._fail(present, outcome.error)
        elif outcome.error or outcome.report is None:
            self._interrupted(present, outcome.error)

    def _run_process(self, job: Job, model: LoadedModel, bytes_each: int) -> Outcome:
        process = RaceProcess(self._task(job, model, bytes_each))
        with self._lock:
            self._process = process
            if self._stop_reason:
                process.stop()
        stored_at, stage = 0.0, ""

        def progress(event: RaceEvent) -> None:
            nonlocal stored_at, stage
            if self.memory.asked():
                return  # its end is awaited, and a write to a busy disk takes seconds
            if event.stage != stage or time.monotonic() - stored_at >= PROGRESS_S:
                stored_at, stage = time.monotonic(), event.stage
                shown = Progress.model_validate(event.model_dump())
                with suppress(Failure):  # a full disk: the race goes on, and needs space at its end
                    self._jobs.change(job, lambda one: one.model_copy(update={"progress": shown}))

        try:
            return process.run(progress)
        finally:
            self.memory.free()  # a load may wait for it, and what follows writes to the repository
            with self._lock:
                self._process = None

    def _task(self, job: Job, model: LoadedModel, bytes_each: int) -> RaceTask:
        manifest, repository = model.manifest, self._worker.repository
        serving = self._selections.get(manifest, self._at.kind, self._device)
        return RaceTask(
            manifest=manifest,
            folder=repository.folder_of(manifest),
            device=self._at.device,
            backend=self._at.backend_name,
            threads=self._at.threads,
            share=job.tries > 1,  # the first try may have found no time
            gate=job.options.gate,
            samples=find_samples(repository, manifest),
            accept_random_samples=job.options.accept_random_samples,
            memory_bytes=bytes_each,
            targets=job.options.targets,
            serving=(serving.form.key,) if serving is not None else (),
            cache=self._selections.make_cache(manifest, self._at.kind, self._device),
        )

    def _decide(self, job: Job, manifest: Manifest, outcome: Outcome, seconds: float) -> Outcome:
        """Serve what a report says; return an outcome with an error if that is not possible."""
        report, now = outcome.report, time.time()  # noqa: TID251 - for people
        assert report is not None
        try:
            won = decide(self._selections, self._jobs, manifest, job, report, now)
        except Failure as failure:
            if failure.code is Code.NOT_FOUND:
                return outcome
            # A full disk passes: what is compiled is kept.
            return Outcome(None, failure.message, again=failure.code is not Code.MODEL)
        self._metrics.race_ended("decided", seconds)
        what = f"{report.winner} is {report.ratio:.2f} times as fast" if won else "the version's own file serves on"
        log.info("the race of %s is decided after %.0f s: %s", manifest.content_id, seconds, what)
        return outcome

    def _fail(self, job: Job, why: str) -> None:
        now = time.time()  # noqa: TID251 - for people
        self._jobs.change(job, lambda one: one.ended(RaceState.FAILED, now, why))
        self._metrics.race_ended(RaceState.FAILED.value)
        log.warning("the race of %s version %d failed: %s", job.model, job.version, why)

    def _interrupted(self, job: Job, error: str) -> None:
        """Queue a job again whose process was stopped, unless it was cancelled; only an error costs a try."""
        with self._lock:
            why = error or self._stop_reason
        self._metrics.race_ended("interrupted")
        log.info("the race of %s version %d is interrupted: %s", job.model, job.version, why)
        self._queue.postpone(job, DIED_RETRY_S if error else RETRY_S)
        update = {"state": RaceState.QUEUED, "worker": "", "tries": job.tries - (not error), "why": why}
        update["progress"] = Progress()
        self._jobs.change(job, lambda one: one.model_copy(update=update))


def build(worker: WorkerParts) -> JobRunner:
    """Return the part of a worker that runs races and serves compiled forms."""
    return JobRunner(worker)
