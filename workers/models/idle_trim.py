"""idle_trim: a thread that returns freed memory to the system after a burst of runs, once the worker is idle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millstream.services.process.allocator import IdleTrim, resident_bytes, trim

log = logging.getLogger("millstream.memory")

CHECK_S = 0.5


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
