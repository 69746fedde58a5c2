"""python -m millstream.workers --pool cpu: one worker process. Objects of the worker are built here and nowhere else."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from millstream.services.extras import exit_without

if __name__ == "__main__":
    exit_without("worker")

from millstream.services.crashes import run_marks
from millstream.services.crashes.exit_status import LOAD_STUCK, RUN_STUCK
from millstream.services.crashes.load_marks import PROBE, LoadMarks, record_death, take_stale_marks
from millstream.services.crashes.run_marks import RunMark, runs_dir
from millstream.services.errors import Code, Failure
from millstream.services.installation import installation_name
from millstream.services.metrics.exposition import serve
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.gc_tuning import freeze_gc
from millstream.services.process.memory_share import total_bytes, worker_share
from millstream.services.process.private_files import create_files_private
from millstream.services.process.spin_wait import Spin
from millstream.services.queue.clock import RedisClock
from millstream.services.queue.death_notices import Death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.scripts import ATTEMPTS_MAX
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.segments.segment import Segments, host_token
from millstream.services.settings import Settings, read_settings
from millstream.services.supervisor.plan import parse_pools
from millstream.services.wire.batch import BATCH_FORMATS
from millstream.services.wire.records import WorkerRecord
from millstream.services.wire.worker_id import new_start, worker_id
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array
from millstream.workers.batching_off import BatchingOff
from millstream.workers.consumer import Consumer, Finished
from millstream.workers.drain import DrainThread
from millstream.workers.heartbeat import Heartbeat
from millstream.workers.idle_trim import IdleTrimmer
from millstream.workers.lease import ReplyWriter
from millstream.workers.live_check import LiveCheck
from millstream.workers.load_version import Placement
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.loader import Limits
from millstream.workers.memory_limit import go_first, limit_memory
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.reconciler import Reconciler
from millstream.workers.watchdog import GRACE_S, Guarded, Watchdog
from millstream.workers.worker import Worker

log = logging.getLogger("millstream.worker")

HAND_OVER_S_MAX = 5.0
DEVICE_GRACE_S = 60.0  # their libraries look seldom whether they should end, and compile in between
INLINE_BYTES_MAX = 256 * 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m millstream.workers", description="Run one worker of a pool.")
    parser.add_argument("--pool", default="cpu", help="name of the pool (default: cpu)")
    parser.add_argument("--index", help="what tells it from other workers of the pool (default: the host's name)")
    parser.add_argument("--start-id", help="what tells this process from all others (default: a random one)")
    parser.add_argument("--backend", default="onnxruntime", help="inference library (default: onnxruntime)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    create_files_private()
    try:
        settings = read_settings()
        index = arguments.index or platform.node()
        worker = worker_id(f"{arguments.pool}-{index}", arguments.start_id or new_start())
        return serve_pool(settings, arguments.pool, index, worker, arguments.backend)
    except Failure as failure:
        print(f"error: {failure.message}", file=sys.stderr)
        return 1


def serve_pool(settings: Settings, pool: str, index: str, worker: str, backend_name: str) -> int:
    """Build a worker, run it until SIGTERM, leave in order."""
    if settings.redis_url is None:
        print("error: set MILLSTREAM_REDIS_URL to the Redis of the gateway", file=sys.stderr)
        return 1
    address = RedisAddress.parse(settings.redis_url.get_secret_value())
    keys = InstallationKeys(installation_name(settings)).pool(pool)
    threads = settings.worker_threads or os.cpu_count() or 1
    memory_bytes_max = _memory_bytes_max(settings)
    limit_memory(memory_bytes_max)
    go_first()
    started = time.time()  # noqa: TID251 - for people
    host = host_token(settings.shm_dir)
    held = LoadedModels()
    repository = FolderRepository(settings.repository_dir)
    run_dir = settings.home / "run"
    _attribute(repository, run_dir, f"{pool}-{index}-")
    registry = MetricsRegistry(settings.metrics_dir, f"worker-{pool}-{index}")
    # Without its pid: a worker that is started again goes on with its series.
    tallies = WorkerMetrics(registry, pool, f"{pool}-{index}", settings.worker_device)

    tallies.memory_limit(memory_bytes_max)
    clock = RedisClock()
    spin = Spin(settings.busy_poll_us_max / 1e6)

    def connect() -> Consumer:
        return Consumer(address, keys, worker, clock)

    def connect_loop() -> Consumer:
        return Consumer(address, keys, worker, clock, spin, tallies.reply_not_taken, tallies.batch_unreadable)

    def record() -> WorkerRecord:
        return WorkerRecord(
            id=worker,
            pool=pool,
            device=settings.worker_device,
            backend=backend_name,
            pid=os.getpid(),
            host=host,
            batch_formats=BATCH_FORMATS,
            started=started,
            instances=held.records(),
        )

    heartbeat = Heartbeat(connect, record, held.lanes, settings.queue_lease_s)
    held.on_change = heartbeat.beat_now
    stuck = threading.Event()

    def replace() -> None:
        stuck.set()
        drain.begin()

    reconciler = Reconciler(
        repository,
        pool,
        Placement(get_backend(backend_name, settings.home), backend_name, settings.worker_device, threads),
        held,
        connect,
        tallies,
        LoadMarks(run_dir, worker),
        Limits(settings.worker_load_s_max, settings.worker_warm_up_s_max),
        replace,
        # A worker that was started alone has a name, not a number: it holds all.
        int(index) if index.isdecimal() else 0,
    )
    segments = Segments(settings.shm_dir)
    replies = ReplyWriter(worker, segments, INLINE_BYTES_MAX, settings.reply_bytes_max, heartbeat.lease_valid)

    def on_long(guarded: Guarded) -> None:
        """Nothing shall wait behind a run of which nobody knows when it ends."""
        heartbeat.forget_leases()
        with contextlib.suppress(Failure):
            consumer = connect()
            try:
                consumer.give_back(guarded.group)
            finally:
                consumer.close()

    def on_stuck(guarded: Guarded) -> None:
        """A run cannot be ended: its callers are told, all else goes to others, and a fresh process takes over."""
        log.error("a run of %s cannot be ended: this process ends", guarded.group[0].lane)
        giving = threading.Thread(target=_hand_over, args=(connect, heartbeat, loop.abandoned(guarded)), daemon=True)
        giving.start()
        giving.join(HAND_OVER_S_MAX)
        logging.shutdown()
        os._exit(RUN_STUCK)

    grace_s = GRACE_S if settings.worker_device == "cpu" else DEVICE_GRACE_S
    watchdog = Watchdog(clock, settings.worker_run_s_max, on_long, on_stuck, grace_s)
    mark = _run_mark(runs_dir(settings), worker)
    settle = BatchingOff(repository, held, tallies).settle
    live = LiveCheck(settings.live_check_one_in, held, partial(_run_rows, settings.worker_run_s_max), settle)
    loop = Worker(connect_loop, held, segments, replies, tallies, clock, live, watchdog, mark)
    if settings.worker_metrics_port:
        serve(settings.worker_metrics_port, registry)

    def give_back() -> None:
        reconciler.stop()
        _leave(connect)

    drain = DrainThread(loop.stop, give_back, settings.drain_s)
    _tell_of_dead(connect, runs_dir(settings), f"{pool}-{index}-")
    drain.start()
    watchdog.start()
    heartbeat.start()
    reconciler.start()
    IdleTrimmer(lambda: loop.runs, lambda: loop.waiting).start()
    freeze_gc()
    loop.serve()
    # In time, or `drain` has ended the process. First nobody gives this worker work any more (serve has left the idle
    # ones); then nothing new is loaded; the heart stops before the worker leaves, since a beat would bring it back.
    reconciler.stop()
    heartbeat.stop()
    _leave(connect)
    if mark is not None:
        mark.close()
    registry.close()
    if reconciler.loading:  # inside of the library, whose own end would wait for it, or crash
        logging.shutdown()
        os._exit(LOAD_STUCK if stuck.is_set() else 0)
    return LOAD_STUCK if stuck.is_set() else 0


def _attribute(repository: FolderRepository, run_dir: Path, name: str) -> None:
    """What a worker of this name, or a probe, was loading when it died, and no supervisor saw it."""
    for worker in (name, f"{PROBE}-"):
        marks = take_stale_marks(run_dir, worker)
        with contextlib.suppress(Failure):
            record_death(repository, marks, "in a way that nobody saw", time.time(), certain=False)  # noqa: TID251 - for people


def _run_rows(seconds_max: float, holding: LoadedModel, inputs: Mapping[str, Array]) -> Sequence[Array]:
    """Run rows that nobody waits for."""
    if holding.instance is None:
        raise Failure(Code.UNAVAILABLE, "the version is not loaded any more")
    limit = threading.Timer(seconds_max, holding.instance.terminate)
    limit.daemon = True
    limit.start()
    try:
        return holding.instance.run(inputs)
    finally:
        limit.cancel()


def _memory_bytes_max(settings: Settings) -> int:
    """What this worker may take; 0: as much as there is."""
    if settings.worker_memory_bytes_max is not None:
        return settings.worker_memory_bytes_max
    return worker_share(total_bytes(), sum(parse_pools(settings.pools).values()))


def _run_mark(folder: Path, worker: str) -> RunMark | None:
    try:
        return RunMark(folder, worker)
    except OSError as error:
        log.warning("what runs cannot be noted in %s: %s", folder, error.strerror)
        return None


def _tell_of_dead(connect: Callable[[], Consumer], runs: Path, name: str) -> None:
    """Workers of this name that no supervisor saw die: what they were running is not run again beside other work."""
    for worker in run_marks.marked_workers(runs, name):
        run = run_marks.take_fatal_run(runs, worker)
        if run is None:
            continue
        with contextlib.suppress(Failure):
            consumer = connect()
            try:
                consumer.publish(
                    Death(worker, run.batches if run.batches or not run.lane else None, run.lane).message()
                )
            finally:
                consumer.close()


def _hand_over(connect: Callable[[], Consumer], heartbeat: Heartbeat, finished: list[Finished]) -> None:
    """Send what is finished, give back the rest. The heart stops before: a beat would bring the worker back."""
    heartbeat.stop()
    with contextlib.suppress(Failure):
        consumer = connect()
        consumer.send_next(finished, 0, 0)
        consumer.receive_next()
        consumer.leave(ATTEMPTS_MAX, dying=True)
        consumer.announce()


def _leave(connect: Callable[[], Consumer]) -> None:
    """Take the worker out of its pool; what it might still lease goes to others. While Redis is away its leases run out."""
    with contextlib.suppress(Failure):
        consumer = connect()
        try:
            consumer.leave(ATTEMPTS_MAX)
            consumer.announce()
        finally:
            consumer.close()


if __name__ == "__main__":
    sys.exit(main())
