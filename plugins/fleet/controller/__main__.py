"""python -m millstream.services.plugin controller: a controller in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import signal
import sys

from millstream.services.extras import exit_unfit, exit_without
from millstream.services.process.gc_tuning import collect_rarely, exit_without_gc, freeze_gc

if __name__ == "__main__":
    collect_rarely()
    exit_without_gc()
    exit_without("worker")
    exit_unfit("millstream.services.queue.redis_parts")

from millstream.plugins.fleet.controller.loops import NAME, ControllerLoops, scale_limits
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Failure
from millstream.services.installation import installation_name
from millstream.services.process.exit_status import end_at_once
from millstream.services.process.log_level import LogLevel
from millstream.services.process.logs import configure_logs, exit_message
from millstream.services.process.private_files import create_files_private
from millstream.services.process.sign_of_life import SignOfLife
from millstream.services.process.threads import lower_process
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import InstallationLevel
from millstream.services.queue.url import RedisAddress
from millstream.services.settings import LOG_LEVELS, Settings, read_settings
from millstream.services.start_log import log_start

log = logging.getLogger("millstream.controller")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m millstream.services.plugin controller",
        description="Run one controller. Of several that share a Redis, one leads and the others wait.",
    )
    parser.add_argument("--ready-fd", type=int, help="write a byte to this descriptor when it runs")
    parser.add_argument("--life-fd", type=int, help="write a byte to this descriptor every two seconds")
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
    keys = InstallationKeys(installation_name(settings))
    loops = ControllerLoops(settings, address, keys, scale_limits(settings))
    level = InstallationLevel(address, keys, NAME)
    LogLevel(NAME, settings.home / "run" / LOG_LEVELS, level.read).start()
    if settings.metrics_port:
        # Imported here: the library takes memory, and gateways serve the metrics of an installation on one machine.
        from millstream.services.metrics.page import serve

        hosts = AllowedHosts(settings.allowed_host_list, (platform.node(),))
        serve(settings.metrics_port, loops.registry, hosts)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if stopping.is_set() and ready_fd is None:
            end_at_once(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    signs = asyncio.create_task(life.show_always(), name="sign of life")
    loops.start()
    freeze_gc()
    if ready_fd is not None:
        os.write(ready_fd, b"r")
        os.close(ready_fd)
    await stopping.wait()
    await loops.stop()
    signs.cancel()
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
