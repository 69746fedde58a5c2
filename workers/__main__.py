"""python -m millstream.workers --pool cpu: one worker process."""

from __future__ import annotations

import argparse
import logging
import platform
import sys

from millstream.services.extras import backends, exit_unfit, exit_without, require
from millstream.services.process.gc_tuning import collect_rarely, exit_without_gc

if __name__ == "__main__":
    collect_rarely()
    exit_without_gc()
    exit_without("worker")
    exit_unfit("millstream.services.queue.redis_parts")

from millstream.services.errors import Failure
from millstream.services.installation import installation_name
from millstream.services.process.log_level import LogLevel
from millstream.services.process.logs import configure_logs, exit_message
from millstream.services.process.machine_share import cpus, worker_budget
from millstream.services.process.private_files import create_files_private
from millstream.services.process.process_memory import use_one_arena
from millstream.services.process.sign_of_life import SignOfLife
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import InstallationLevel
from millstream.services.queue.url import RedisAddress
from millstream.services.settings import LOG_LEVELS, Settings, read_settings
from millstream.services.start_log import log_start
from millstream.services.supervisor.pool_specs import device_of, worker_counts
from millstream.services.wire.worker_id import new_start, read_slot, slot_of
from millstream.workers.models.memory_limit import prefer_for_oom_kill
from millstream.workers.worker_process import WorkerIdentity, WorkerProcess

log = logging.getLogger("millstream.worker")

BACKEND_DEFAULT = "onnxruntime"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m millstream.workers", description="Run one worker of a pool.")
    parser.add_argument("--pool", default="cpu", help="name of the pool (default: cpu)")
    parser.add_argument("--index", help="N, N@HOST or HOST: tells the workers of a pool apart (default: this host)")
    parser.add_argument("--device", help="cpu, cuda[:N] or tensorrt[:N] (default: cuda of the pool gpu, else cpu)")
    parser.add_argument("--threads", type=int, default=0, help="threads of a run (default: the CPUs)")
    parser.add_argument("--start-id", help="distinguishes this process from all others (default: random)")
    parser.add_argument("--backend", default=BACKEND_DEFAULT, help="inference library (default: onnxruntime)")
    parser.add_argument("--life-fd", type=int, help="write a byte to this descriptor every two seconds")
    arguments = parser.parse_args()
    SignOfLife(arguments.life_fd).start_thread()
    start = arguments.start_id or new_start()
    slot = read_slot(arguments.index) if arguments.index else slot_of(0, platform.node())
    device = arguments.device or device_of(arguments.pool)
    identity = WorkerIdentity(arguments.pool, slot, start, arguments.backend, device, arguments.threads or cpus())
    configure_logs("text", identity.name)
    create_files_private()
    try:
        chosen = backends().get(identity.backend)
        if chosen is not None and chosen.extra:
            require(chosen.extra)
        settings = read_settings()
        configure_logs(settings.log_format, identity.name)
        return run_worker(settings, identity, supervised=arguments.start_id is not None)
    except Failure as failure:
        exit_message(failure.message)
        return 1


def run_worker(settings: Settings, identity: WorkerIdentity, *, supervised: bool) -> int:
    """Build a worker, serve until SIGTERM, shut down. Returns the exit code."""
    if settings.redis_url is None:
        exit_message("set MILLSTREAM_REDIS_URL to the Redis of the gateway")
        return 1
    log_start(settings, identity.name, supervised=supervised)
    workers = sum(worker_counts(settings.pools).values())
    budget_bytes = worker_budget(settings.worker_memory, identity.pool, workers)
    prefer_for_oom_kill()
    use_one_arena()
    address = RedisAddress.parse(settings.redis_url.get_secret_value())
    process = WorkerProcess(settings, address, identity, budget_bytes, supervised=supervised)
    level = InstallationLevel(address, InstallationKeys(installation_name(settings)), "worker")
    LogLevel("worker", settings.home / "run" / LOG_LEVELS, level.read).start()
    process.start()
    process.loop.serve()
    log.info("draining: leases no more batches")
    code = process.shut_down()
    log.info("drained")
    return code


if __name__ == "__main__":
    sys.exit(main())
