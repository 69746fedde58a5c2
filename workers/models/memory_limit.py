"""Limits the memory of a worker: beyond the limit an allocation fails, which fails one run or load, not the machine.

RLIMIT_DATA is used, not RLIMIT_AS: since Linux 4.7 it counts private writable memory, however it was mapped
(getrlimit(2)). It does not count the gateways' shared memory, files mapped read-only, and reserved address space, of
which GPU libraries take a hundred times the memory that they use. The budget counts resident memory, with mapped files
and without address space that is reserved and not used, so the limit follows what is used.
Instances in other processes have limits of what was free when they were loaded, so their memory is looked at, too.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from millstream.services.process.c_library import c_library
from millstream.services.process.process_memory import IdleTrim, memory_use, resident_bytes, trim
from millstream.services.sizes import sizes
from millstream.services.wire.records import State
from millstream.workers.backends.base import InstanceApart
from millstream.workers.models.loaded_models import USAGE_PUBLISHED_S, LoadedModel, LoadedModels
from millstream.workers.models.memory_budget import MEMORY_OPTION, MemoryBudget

log = logging.getLogger("millstream.memory")

#: Of threads of libraries, and of this process' own that run no library. As on Windows; with the default of 8 MiB the
#: stacks of 1,000 models would reserve more than most machines have.
STACK_BYTES = 1 << 20
STACKS_SPARE = 4  # threads that may start until the limit is set again; their stacks are reserved, and hardly used
_ATTRIBUTES_BYTES = 64  # of pthread_attr_t: 56 on x86-64, 64 on AArch64
OOM_SCORE = 500  # added to the kernel's own score, which is at most 1000


class MemoryLimit:
    """The limit of this process. Allocations fail where the budget would be exceeded.

    Args:
        budget_bytes: memory that the process may use, the interpreter included; 0: no limit.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        if budget_bytes:
            threading.stack_size(STACK_BYTES)
            _set_library_stacks(STACK_BYTES)
        self.follow()

    def follow(self, apart_bytes: int = 0) -> None:
        """Set the limit by the memory that the process and its instances in others have now. Takes about 20 us."""
        if not self._budget_bytes:
            return
        use = memory_use()
        # What may still be added: memory that was returned to the system leaves holes in the address space, which the
        # kernel counts and which no instance has.
        limit = use.data + max(0, self._budget_bytes - use.own_bytes - apart_bytes) + STACKS_SPARE * STACK_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _set_library_stacks(size_bytes: int) -> None:
    """Set the stack of threads that libraries start, of which every loaded model has some. glibc only."""
    library = c_library()
    if not hasattr(library, "pthread_setattr_default_np"):
        return
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    library.pthread_attr_init(attributes)
    library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size_bytes))
    library.pthread_setattr_default_np(attributes)
    library.pthread_attr_destroy(attributes)


def prefer_for_oom_kill() -> None:
    """Let the kernel's out-of-memory killer choose this process before gateways, Redis and the supervisor."""
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))
    except (OSError, ValueError) as error:
        log.debug("the score of the out-of-memory killer cannot be set: %s", error)


CHECK_S = 1.0


class IdleTrimmer:
    """Checks every CHECK_S whether the worker is idle and should return memory; runs until the process ends.

    `runs_at_rest` returns the number of runs so far, without readiness probes; None during a run.
    """

    def __init__(self, runs_at_rest: Callable[[], int | None]) -> None:
        self._runs_at_rest = runs_at_rest
        self._thread = threading.Thread(target=self._run, name="trim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        policy, runs = IdleTrim(resident_bytes()), self._runs_at_rest()
        while True:
            time.sleep(CHECK_S)
            before, runs = runs, self._runs_at_rest()
            idle = runs is not None and runs == before
            resident = resident_bytes()
            if policy.due(idle=idle, quiet=False) and policy.grown(resident):
                trim()
                after = resident_bytes()
                policy.trimmed(after)
                if after < resident:
                    log.info("returned %d MiB of freed memory to the system", (resident - after) >> 20)


LOOK_S = 0.5  # a look reads two files of /proc for each instance in another process
PUBLISHED_STEP = 1 / 8  # a record follows what an instance takes in steps of this share of it


class ApartMemory:
    """Counts what instances in other processes take while they run; runs until the process ends.

    If they grow beyond the budget, the one that grew most since its load is ended: no other version makes room for it.

    Args:
        show: shows what an instance takes, as a metric.
    """

    def __init__(self, models: LoadedModels, budget: MemoryBudget, show: Callable[[LoadedModel, int], None]) -> None:
        self._models, self._budget, self._show = models, budget, show
        self._published = 0.0  # when records were looked at last, monotonic
        self._thread = threading.Thread(target=self._run, name="apart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Measure each of these instances, and end one if the budget does not hold."""
        apart = {}
        for content_id, model in self._models.all().items():
            if model.state is State.READY and model.instance is not None and not model.lost:
                size_bytes = model.instance.size_bytes
                if size_bytes:
                    apart[content_id] = size_bytes
        if not apart:
            return
        self._budget.measured_apart(apart)
        found = self._budget.most_grown()
        if found is not None:
            self._end(*found, apart)
        if now >= self._published + USAGE_PUBLISHED_S:
            self._published = now
            for content_id, size_bytes in apart.items():
                self._publish(content_id, size_bytes)

    def _end(self, content_id: str, grown_bytes: int, apart: dict[str, int]) -> None:
        model = self._models.get(content_id)
        if model is None or model.instance is None or content_id not in apart:
            return
        takes, grew = sizes(apart[content_id], grown_bytes)
        why = (
            f"its process was ended: it takes {takes} of memory, {grew} more than after its load, and this worker has "
            f"no more: raise {MEMORY_OPTION}"
        )
        cast("InstanceApart", model.instance).end(why)
        self._models.lost.set()

    def _publish(self, content_id: str, size_bytes: int) -> None:
        model = self._models.get(content_id)
        if model is None or model.footprint is None:
            return
        known = model.footprint.resident_bytes
        if abs(size_bytes - known) > PUBLISHED_STEP * known:
            self._models.resized(content_id, replace(model.footprint, resident_bytes=size_bytes))
            self._show(model, size_bytes)
