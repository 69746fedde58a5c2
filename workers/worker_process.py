"""The objects of one worker process: built here and nowhere else, started and stopped in order."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from millstream.services.access.access_keys import AccessKeys
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.crashes.load_marks import LoadMarks
from millstream.services.crashes.run_marks import RunMark, runs_dir
from millstream.services.device import find_device, installed_packages, missing_for
from millstream.services.errors import Code, Failure
from millstream.services.installation import installation_name, shared_metrics
from millstream.services.metrics.page import serve
from millstream.services.metrics.process import ProcessMetrics
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.plugin.registry import contributions
from millstream.services.process.exit_status import LOAD_STUCK
from millstream.services.process.gc_tuning import freeze_gc
from millstream.services.process.waits import Spin, busy_poll_s_max
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.reply_links import ReplyLinks
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.segments.segment import Segments, host_token
from millstream.services.settings import Settings
from millstream.services.supervisor.pool_specs import device_budget
from millstream.services.wire.batch import BATCH_FORMATS, INLINE_BYTES_MAX
from millstream.services.wire.records import WorkerRecord
from millstream.services.wire.worker_id import worker_id, worker_name
from millstream.workers.backends import backends_beside, get_backend
from millstream.workers.backends.base import Array
from millstream.workers.batches.consumer import Consumer
from millstream.workers.batches.direct_work import DirectWork
from millstream.workers.batches.lease import LeaseValidity, ReplyWriter
from millstream.workers.batches.live_check import BatchingOff, LiveCheck
from millstream.workers.batches.open_streams import OpenStreams
from millstream.workers.batches.reply_sender import ReplySender
from millstream.workers.batches.watchdog import GRACE_S, LoopState, Watchdog
from millstream.workers.heartbeat import LIFE_LEASES, Heartbeat
from millstream.workers.leave import DrainThread, Leave, record_unseen_load_deaths, report_unseen_deaths
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from millstream.workers.models.memory_budget import SPARE_BYTES, MemoryBudget, MemorySpace
from millstream.workers.models.memory_limit import ApartMemory, IdleTrimmer, MemoryLimit
from millstream.workers.models.profiler import KnownProfiles
from millstream.workers.models.record_parts import BeatSignal
from millstream.workers.models.usage_log import UsageLog
from millstream.workers.models.wanted import WantedVersions
from millstream.workers.orders import OrderThread
from millstream.workers.parts import WorkerPart, WorkerParts
from millstream.workers.reconciler import Reconciler
from millstream.workers.residency.loader import Limits
from millstream.workers.residency.residency import Residency
from millstream.workers.residency.unloads import Unloads
from millstream.workers.residency.version_loads import LoadGuard, VersionLoads
from millstream.workers.run_reports import OverdueReplies, RunReports
from millstream.workers.worker import Worker

log = logging.getLogger("millstream.worker")

DEVICE_GRACE_S = 60.0  # GPU libraries seldom check whether they should stop, and may compile between two checks


class WorkerIdentity(NamedTuple):
    """Which worker this process is."""

    pool: str
    slot: str  # distinguishes it from the other workers of the pool
    start: str  # unique for each start of a process
    backend: str
    device: str
    threads: int

    @property
    def name(self) -> str:
        """The name that stays the same when the worker is started again."""
        return worker_name(self.pool, self.slot)

    @property
    def worker(self) -> str:
        """The id of the worker in Redis."""
        return worker_id(self.name, self.start)

    @property
    def number(self) -> int:
        """The worker's number in its pool, on its host, from 0."""
        return int(self.slot.partition("@")[0])


class WorkerProcess:
    """The objects of one worker process and the order in which they start and stop."""

    def __init__(
        self,
        settings: Settings,
        address: RedisAddress,
        identity: WorkerIdentity,
        budget_bytes: int,
        *,
        supervised: bool,
    ) -> None:
        self._settings = settings
        self._address = address
        self._identity = identity
        self._threads = identity.threads
        self._device, self._packages = find_device(identity.device), installed_packages()
        self._keys = InstallationKeys(installation_name(settings)).pool(identity.pool)
        self._host = host_token(settings.shm_dir)
        self._started = time.time()  # noqa: TID251 - for people
        run_dir, runs = settings.home / "run", runs_dir(settings)
        self._runs = runs
        repository = FolderRepository(settings.repository_dir)
        record_unseen_load_deaths(repository, run_dir, f"{identity.name}-")
        # Named without the process' id, so that a worker that is started again continues its series.
        self._registry = MetricsRegistry(
            shared_metrics(settings), f"worker-{identity.name}", models_max=settings.metrics_models_max
        )
        self._process_metrics = ProcessMetrics(self._registry)
        self.metrics = WorkerMetrics(self._registry, identity.pool, identity.name, identity.device)
        self._clock = RedisClock()
        self._spin = Spin(busy_poll_s_max())
        self._backend = get_backend(identity.backend, settings.home)
        self._budget = self._memory_budget(budget_bytes)
        self._mark = _run_mark(runs, identity.worker)
        self._state = LoopState(self._mark, forwards=self._backend.forwards)
        self._signal, self._leases = BeatSignal(), LeaseValidity(settings.queue_lease_s)
        self._models = LoadedModels(UsageLog(), lambda: self._clock.offset_ms / 1000, self._signal)
        self._drain = DrainThread(settings.drain_s, supervised=supervised)
        self._load_stuck = threading.Event()
        self._was_ready = False
        self._environment = self._load_environment()
        self._loads = self._new_loads(repository, run_dir)
        stopping = threading.Event()
        unloads = self._unloads = Unloads(self._connect_briefly, self._models, self.metrics, stopping, self._budget)
        keys = AccessKeys(settings.repository_dir) if settings.keys == "enforce" else None
        self._residency = Residency(
            identity.worker, identity.number, keys, self._models, self._loads, unloads, self._clock
        )
        versions = WantedVersions(repository, identity.pool, self._environment.formats)
        self._reconciler = Reconciler(
            repository, versions, self._models, self._loads, unloads, self._residency, stopping
        )
        self._parts = self._build_parts(repository, run_dir)
        self._orders = OrderThread(self._connect_briefly, self._residency)
        self._replies = self._new_replies()
        self._heartbeat = Heartbeat(
            self._connect,
            self._record,
            self._models,
            self._leases,
            self._signal,
            self._look_up,
            self.metrics.redis_answers,
        )
        self.loop = self._new_loop(repository)
        self._leave = Leave(self._connect, self._heartbeat, self._signal, self._leases, self._reconciler, self.loop)
        self._watchdog = self._new_watchdog()

    def start(self) -> None:
        """Start the threads; the main loop is run by the caller, in the main thread."""
        if self._settings.metrics_port:
            hosts = AllowedHosts(self._settings.allowed_host_list, (platform.node(),))
            serve(self._settings.metrics_port, self._registry, hosts, ready=self._ready)
        self._process_metrics.start()
        if missing := missing_for(self._backend.name, self._identity.device, self._device, self._packages):
            log.warning("pool %s can load no model: %s", self._identity.pool, missing)
        report_unseen_deaths(self._connect, self._runs, f"{self._identity.name}-")
        self._drain.start(self._leave.begin, self._leave.leave_early)
        self._watchdog.start()
        self._heartbeat.start()
        self._reconciler.start()
        for part in self._parts:
            part.start()
        self._orders.start()
        IdleTrimmer(self._state.runs_at_rest).start()
        ApartMemory(self._models, self._budget, self.metrics.bytes_of).start()
        freeze_gc()

    def _ready(self) -> bool:
        """Return whether it has loaded what it should hold, once, and does not drain.

        Later loads do not count: a worker that loads one more model serves all others.
        """
        self._was_ready |= self._reconciler.synced and not self._loads.pending
        return self._was_ready and not self._state.draining

    def shut_down(self) -> int:
        """Stop in order, after the main loop has run what was leased; returns the exit code.

        If this takes too long, the drain thread ends the process.
        """
        # No entry is delivered any longer: the main loop has left the idle workers.
        self._orders.stop()
        for part in self._parts:
            part.stop()
        self._reconciler.stop()  # no further version is loaded, and no lane is added
        self._heartbeat.stop()  # before the worker leaves its pool: a beat would bring it back
        self._leave.leave()  # what it might still lease goes to other workers
        if self._mark is not None:
            self._mark.close()  # nothing runs: a later process finds no mark
        self._process_metrics.stop()
        self._registry.close()
        code = LOAD_STUCK if self._load_stuck.is_set() else 0
        # Python's own exit would wait for the library, or crash in it.
        if self._loads.busy or self._unloads.closing:
            logging.shutdown()
            os._exit(code)
        return code

    def _look_up(self, consumer: Consumer) -> None:
        """Exchange with Redis what a beat does not: addresses of gateways, and what models of keys with quotas take."""
        self._replies.look_up(consumer)
        taken = self._residency.quotas.exchange(consumer, LIFE_LEASES * self._settings.queue_lease_s)
        self.metrics.taken_of_quotas(taken)

    def _new_loads(self, repository: FolderRepository, run_dir: Path) -> VersionLoads:
        limits = Limits(self._settings.worker_load_s_max, self._settings.worker_warm_up_s_max)
        guard = LoadGuard(LoadMarks(run_dir, self._identity.worker), limits, self._replace)
        return VersionLoads(
            repository, self._environment, self._models, self.metrics, guard, lambda: self._clock.now_ms() / 1000
        )

    def _new_watchdog(self) -> Watchdog:
        settings = self._settings
        reports = RunReports(self._connect, self.loop)
        overdue = OverdueReplies(self._connect, self.loop)
        grace_s = GRACE_S if self._identity.device == "cpu" else DEVICE_GRACE_S
        return Watchdog(
            self._state,
            self._clock,
            settings.worker_run_s_max,
            self._leave.give_back_waiting,
            self._leave.end_stuck,
            grace_s,
            (reports.look, overdue.look),
        )

    def _new_replies(self) -> ReplySender:
        settings, valid = self._settings, self._leases.holds
        segments = Segments(settings.shm_dir)
        writer = ReplyWriter(self._identity.worker, segments, INLINE_BYTES_MAX, settings.reply_bytes_max, valid)
        direct = DirectWork(
            ReplyLinks(settings.shm_dir, self._keys),
            self._keys,
            self._identity.worker,
            self._models,
            self._clock,
            Spin(busy_poll_s_max()),
            on=settings.queue_direct,
        )
        streams = OpenStreams(self._connect, self._keys, settings.shm_dir, self._identity.worker, segments, self._clock)
        return ReplySender(writer, ReplyLinks(settings.shm_dir, self._keys), valid, direct, streams)

    def _new_loop(self, repository: FolderRepository) -> Worker:
        live_check = LiveCheck(
            self._settings.live_check_one_in,
            self._models,
            partial(_run_rows, self._settings.worker_run_s_max),
            BatchingOff(repository, self._models, self.metrics).settle,
        )
        return Worker(
            self._connect_loop, self._models, self._replies, self.metrics, self._clock, live_check, self._state
        )

    def _build_parts(self, repository: FolderRepository, run_dir: Path) -> tuple[WorkerPart, ...]:
        """Return what plug-ins add to the worker."""
        parts = WorkerParts(
            id=self._identity.worker,
            name=self._identity.name,
            pool=self._identity.pool,
            host=self._host,
            device=self._device,
            packages=self._packages,
            repository=repository,
            environment=self._environment,
            models=self._models,
            metrics=self.metrics,
            loop=self._state,
            run_dir=run_dir,
        )
        return tuple(build(parts) for build in contributions("worker", FunctionType))

    def _load_environment(self) -> LoadEnvironment:
        settings, backend = self._settings, self._identity.backend
        return LoadEnvironment(
            self._backend,
            backend,
            self._identity.device,
            self._threads,
            self._budget,
            self._state.runs_at_rest,
            FolderRepository(settings.repository_dir).variants,
            profiles=KnownProfiles(),
            beside=backends_beside(backend, self._identity.device, settings.home),
        )

    def _memory_budget(self, budget_bytes: int) -> MemoryBudget:
        settings, device = self._settings, self._identity.device
        total_bytes = self._device.memory_bytes if self._device.kind == "gpu" else 0
        device_bytes = device_budget(settings.pools, self._identity.pool, device, total_bytes)
        limit = MemoryLimit(budget_bytes)
        return MemoryBudget(
            budget_bytes,
            spare_bytes=SPARE_BYTES,
            follow=limit.follow,
            device=MemorySpace(device_bytes, partial(self._backend.device_bytes, device)) if device_bytes else None,
        )

    def _connect(self) -> Consumer:
        return Consumer(self._address, self._keys, self._identity.worker, self._clock)

    def _connect_briefly(self) -> Consumer:
        """Open a consumer for changes of lanes, for which the heartbeat waits: a reply takes less than a lease."""
        limit_s = min(self._address.reply_s_max, self._settings.queue_lease_s / 2)
        return Consumer(self._address, self._keys, self._identity.worker, self._clock, reply_s_max=limit_s)

    def _connect_loop(self) -> Consumer:
        return Consumer(self._address, self._keys, self._identity.worker, self._clock, self._spin, losses=self.metrics)

    def _record(self) -> WorkerRecord:
        used_bytes, device_used_bytes = self._budget.used_bytes, self._budget.device.used_bytes
        self.metrics.memory(self._budget.budget_bytes, used_bytes)
        if self._budget.device.budget_bytes:
            self.metrics.device_memory(self._budget.device.budget_bytes, device_used_bytes)
        self.metrics.instances(len(self._models.lanes()))
        token = self._reconciler.token  # first: the instances follow this state, or a later one
        return WorkerRecord(
            id=self._identity.worker,
            pool=self._identity.pool,
            device=self._identity.device,
            backend=self._identity.backend,
            pid=os.getpid(),
            host=self._host,
            batch_formats=BATCH_FORMATS,
            formats=tuple(sorted(self._environment.formats)),
            hardware=self._device,
            packages=self._packages,
            started=self._started,
            instances=self._models.records(),
            budget_bytes=self._budget.budget_bytes,
            used_bytes=used_bytes,
            device_budget_bytes=self._budget.device.budget_bytes,
            device_used_bytes=device_used_bytes,
            room_bytes=self._budget.room_bytes if self._budget.budget_bytes else 0,
            device_room_bytes=self._budget.device.room_bytes if self._budget.device.budget_bytes else 0,
            draining=self._state.draining,
            token=token,
            ready=self._ready(),
            clock_ahead_s=round(time.time() - self._clock.now_ms() / 1000),  # noqa: TID251 - the clock that is compared
            refusals=self._residency.refusals.records(),
            loads=self._loads.records() + self._residency.turns.line.records(),
        )

    def _replace(self) -> None:
        """Shut down because a load cannot be ended; the supervisor starts a new process."""
        self._load_stuck.set()
        self._drain.begin()


def _run_rows(seconds_max: float, model: LoadedModel, inputs: Mapping[str, Array]) -> Sequence[Array]:
    """Run rows for the live check, within `seconds_max`."""
    if model.instance is None:
        raise Failure(Code.UNAVAILABLE, "the version is no longer loaded")
    limit = threading.Timer(seconds_max, model.instance.terminate)
    limit.daemon = True
    limit.start()
    try:
        return model.instance.run(inputs)
    finally:
        limit.cancel()


def _run_mark(folder: Path, worker: str) -> RunMark | None:
    try:
        return RunMark(folder, worker)
    except OSError as error:
        log.warning("runs cannot be noted in %s: %s", folder, error.strerror)
        return None
