"""python -m millstream.plugins.fleet.controller: one controller process. Its objects are built here alone."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import signal
import sys
from dataclasses import replace

from millstream.services.extras import exit_unfit, exit_without
from millstream.services.process.gc_tuning import collect_rarely, exit_without_gc, freeze_gc

if __name__ == "__main__":
    collect_rarely()
    exit_without_gc()
    exit_without("worker")
    exit_unfit("millstream.services.queue.redis_parts")

from millstream.plugins.fleet.controller.autoscale.decision import ScaleLimits
from millstream.plugins.fleet.controller.autoscaler import Autoscaler
from millstream.plugins.fleet.controller.controller import Controller
from millstream.plugins.fleet.controller.leadership import LEASE_S, Leadership
from millstream.plugins.fleet.controller.metrics import ControllerMetrics
from millstream.plugins.fleet.controller.scale_metrics import ScaleMetrics
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Failure
from millstream.services.installation import installation_name
from millstream.services.metrics.process import ProcessMetrics
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.log_level import LogLevel
from millstream.services.process.logs import configure_logs, exit_message
from millstream.services.process.low_priority import lower_process
from millstream.services.process.private_files import create_files_private
from millstream.services.process.second_signal import end_at_once
from millstream.services.process.sign_of_life import SignOfLife
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.leader_lock import LeaderLock
from millstream.services.queue.log_levels import InstallationLevel
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import LOG_LEVELS, Settings, read_settings
from millstream.services.start_log import log_start
from millstream.services.supervisor.pool_specs import WORKERS_MAX, parse_pools
from millstream.services.wire.worker_id import new_start

log = logging.getLogger("millstream.controller")

NAME = "controller"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m millstream.plugins.fleet.controller",
        description="Run one controller. Of several that share a Redis, one leads and the others wait.",
    )
    parser.add_argument("--ready-fd", type=int, help="write a byte to this descriptor when it runs")
    parser.add_argument("--life-fd", type=int, help="write a byte to this descriptor every second")
    arguments = parser.parse_args()
    life = SignOfLife(arguments.life_fd)
    configure_logs("text", NAME)
    lower_process()  # no request waits for it
    create_files_private()
    try:
        settings = read_settings()
        configure_logs(settings.log_format, NAME)
        return asyncio.run(run_controller(settings, arguments.ready_fd, life))
    except Failure as failure:
        exit_message(failure.message)
        return 1


async def run_controller(settings: Settings, ready_fd: int | None, life: SignOfLife) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code: 0 after a clean stop.

    Args:
        settings: of the process.
        ready_fd: gets a byte when it runs; None: no supervisor started it, so a second signal ends it at once.
        life: shows the supervisor that it runs.
    """
    if settings.redis_url is None:
        exit_message("set MILLSTREAM_REDIS_URL to the Redis of the gateway")
        return 1
    log_start(settings, NAME, supervised=ready_fd is not None)
    address = RedisAddress.parse(settings.redis_url.get_secret_value())
    process = ControllerProcess(settings, address)
    level = InstallationLevel(address, InstallationKeys(installation_name(settings)), NAME)
    LogLevel(NAME, settings.home / "run" / LOG_LEVELS, level.read).start()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if stopping.is_set() and ready_fd is None:
            end_at_once(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    signs = asyncio.create_task(life.show_always(), name="sign of life")
    process.start()
    if ready_fd is not None:
        os.write(ready_fd, b"r")
        os.close(ready_fd)
    waits = [asyncio.create_task(event.wait()) for event in (stopping, process.controller.stuck)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await process.stop()
    signs.cancel()
    log.info("stopped")
    code = 0 if stopping.is_set() else 1
    if process.controller.reading:  # Python's own exit would wait for the file system
        logging.shutdown()
        os._exit(code)
    return code


class ControllerProcess:
    """The objects of one controller process and the order in which they start and stop."""

    def __init__(self, settings: Settings, address: RedisAddress) -> None:
        keys = InstallationKeys(installation_name(settings))
        repository = FolderRepository(settings.repository_dir)
        self._metrics_port = settings.controller_metrics_port
        self._hosts = AllowedHosts(settings.allowed_host_list, (platform.node(),))
        self._registry = MetricsRegistry(settings.metrics_dir, NAME)
        self._process_metrics = ProcessMetrics(self._registry)
        self._cluster_state = ClusterState(address, keys)
        name = f"{NAME}-{platform.node()}-{new_start()}"
        self._lock = LeaderLock(address, keys, name, LEASE_S)
        self._leadership = Leadership(self._lock, self._on_lead)
        self.controller = Controller(
            self._leadership,
            self._lock,
            self._cluster_state,
            repository,
            ControllerMetrics(self._registry),
        )
        self._autoscaler = Autoscaler(
            lambda: self._leadership.token > 0,
            self._cluster_state,
            ScaleState(address, keys),
            scale_limits(settings),
            replace(_limits(settings, 0, WORKERS_MAX), bounded=False),
            ScaleMetrics(self._registry),
        )

    def start(self) -> None:
        if self._metrics_port:
            # Imported here: the library takes memory, and gateways serve the metrics of an installation on one machine.
            from millstream.services.metrics.exposition import serve

            serve(self._metrics_port, self._registry, self._hosts)
        self._process_metrics.start()
        self._leadership.start()
        self.controller.start()
        self._autoscaler.start()
        freeze_gc()

    async def stop(self) -> None:
        """Stop in order: no order after the lead is released."""
        await self._autoscaler.stop()
        await self.controller.stop()
        await self._leadership.stop()
        await self._lock.close()
        await self._cluster_state.close()
        self._process_metrics.stop()
        self._registry.close()

    def _on_lead(self) -> None:
        self.controller.wake()


def scale_limits(settings: Settings) -> dict[str, ScaleLimits]:
    """Return what autoscaling may do with each pool that an operator has named; the setting's default names none."""
    if "pools" not in settings.model_fields_set or not settings.pools.strip():
        return {}
    specs = parse_pools(settings.pools)
    return {pool: _limits(settings, spec.least, spec.workers) for pool, spec in specs.items()}


def _limits(settings: Settings, workers_min: int, workers_max: int) -> ScaleLimits:
    return ScaleLimits(workers_min, workers_max, settings.scale_latency_ms / 1000, settings.scale_down_s)


if __name__ == "__main__":
    sys.exit(main())
