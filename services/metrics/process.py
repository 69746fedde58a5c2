"""A thread that shows what this process takes of the machine: CPU, memory, files, threads.

/proc/self, os, gc ─(every UPDATE_S)─> series with the label `process`, in the metric file of this process

Only this process measures itself: processes may be in containers of their own and have other process ids there.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
import resource
import threading
import time
from pathlib import Path

from millstream.services.environment import revision
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.process_memory import resident_bytes
from millstream.services.version import VERSION

log = logging.getLogger("millstream.metrics")

UPDATE_S = 2.0  # at most this much older than a scrape are the values on it
_PROC = Path("/proc")
#: fields of /proc/self/stat after the program's name: threads, start in clock ticks since boot (proc_pid_stat(5))
_THREADS_FIELD, _START_FIELD = 17, 19


class ProcessMetrics:
    """The series of this process. `start` begins the updates, `stop` ends them with a last one."""

    def __init__(self, registry: MetricsRegistry) -> None:
        name = registry.process
        registry.gauge(catalogue.BUILD_INFO, VERSION, revision(), platform.python_version()).set(1)
        registry.gauge(catalogue.PROCESS_START_TIME, name).set(start_time())
        self._cpu = registry.counter(catalogue.PROCESS_CPU_SECONDS, name)
        self._memory = registry.gauge(catalogue.PROCESS_RESIDENT_BYTES, name)
        self._open_fds = registry.gauge(catalogue.PROCESS_OPEN_FDS, name)
        self._max_fds = registry.gauge(catalogue.PROCESS_MAX_FDS, name)
        self._threads = registry.gauge(catalogue.PROCESS_THREADS, name)
        self._collections = [
            registry.counter(catalogue.PROCESS_GC_COLLECTIONS, name, str(generation))
            for generation in range(len(gc.get_stats()))
        ]
        self._cpu_s = 0.0  # counted so far
        self._collected = [0] * len(self._collections)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process metrics", daemon=True)

    def start(self) -> None:
        self._try_update()
        self._thread.start()

    def stop(self) -> None:
        """End the updates. The last one counts the CPU time until now."""
        self._stopping.set()
        self._thread.join()
        self._try_update()

    def update(self) -> None:
        """Measure this process. Called by one thread at a time. Raises OSError."""
        # Counters continue those of earlier processes of the same name, so the growth since the last update is added.
        cpu_s = time.process_time()
        self._cpu.add(cpu_s - self._cpu_s)
        self._cpu_s = cpu_s
        for generation, stats in enumerate(gc.get_stats()):
            self._collections[generation].add(stats["collections"] - self._collected[generation])
            self._collected[generation] = stats["collections"]
        fds_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_fds.set(math.inf if fds_max == resource.RLIM_INFINITY else fds_max)
        self._memory.set(resident_bytes())
        self._open_fds.set(_open_fds())
        self._threads.set(int(_stat_fields()[_THREADS_FIELD]))

    def _run(self) -> None:
        while not self._stopping.wait(UPDATE_S):
            self._try_update()

    def _try_update(self) -> None:
        try:
            self.update()
        except OSError as error:  # no descriptor is free, or this is not Linux
            log.debug("this process could not be measured: %s", error)


def start_time() -> float:
    """Return when this process started, in seconds since the epoch."""
    try:
        ticks = int(_stat_fields()[_START_FIELD])
        boot = next(line for line in (_PROC / "stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):  # not Linux, or /proc is hidden
        return time.time()  # noqa: TID251 - shown to people
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _stat_fields() -> list[str]:
    return (_PROC / "self/stat").read_text().rpartition(")")[2].split()


def _open_fds() -> int:
    """Return the number of open descriptors. Since Linux 6.2 the folder's size is that number (proc_pid_fd(5))."""
    folder = _PROC / "self/fd"
    return folder.stat().st_size or len(list(folder.iterdir())) - 1  # without the descriptor of the listing
