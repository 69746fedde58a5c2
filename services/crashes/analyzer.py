"""Finds out whether a model made a worker die.

exit code + load marks + run mark ─> CrashReport (is a model at fault?, death notice) and the version's verdict
A model's deaths count against its version, and the worker restarts without back-off.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from millstream.services.crashes.load_marks import record_death, take_stale_marks
from millstream.services.crashes.run_marks import take_fatal_run
from millstream.services.errors import Failure
from millstream.services.process.exit_status import LOAD_STUCK, RUN_STUCK, describe_exit
from millstream.services.queue.death_notices import Death
from millstream.services.repository.folder import FolderRepository

#: signals that users and service managers send; SIGKILL also comes from the kernel when memory runs out
_SENT = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL}
_VMSTAT = Path("/proc/vmstat")


class CrashReport(NamedTuple):
    """Why a worker died."""

    model_at_fault: bool
    death: Death


class CrashAnalyzer:
    """Analyzes the deaths of one supervisor's workers. Blocking: call it from a thread."""

    def __init__(self, run_dir: Path, repository_dir: Path, runs_dir: Path) -> None:
        self._run_dir = run_dir
        self._runs_dir = runs_dir
        self._models_dir = repository_dir
        self._repository: FolderRepository | None = None
        self._out_of_memory = out_of_memory_kills()

    def analyze(self, worker: str, code: int, *, planned: bool, hung: bool = False) -> CrashReport:
        """Return why a worker died, and record a death during a load in the version's verdict.

        Never raises: if the verdict cannot be written, no model is at fault.

        Args:
            worker: its id.
            code: its exit code; negative for a signal.
            planned: whether the supervisor asked it to end.
            hung: whether the supervisor killed it because it ran, and showed no sign of life.
        """
        marks = take_stale_marks(self._run_dir, f"{worker}.")
        run = take_fatal_run(self._runs_dir, worker)
        lane = run.lane if run is not None else ""
        # None: any batch that the worker had leased may have been running.
        batches = None if run is None or (lane and not run.batches) else run.batches
        if planned or not (self._by_itself(code) or hung):
            return CrashReport(False, Death(worker, batches))
        death = Death(worker, batches, lane)
        if code == LOAD_STUCK:  # the worker recorded the load itself; its other threads may have been running any batch
            return CrashReport(True, Death(worker, batches))
        recorded = not marks
        with suppress(Failure):
            if marks and code != RUN_STUCK:
                self._repository = self._repository or FolderRepository(self._models_dir)
                record_death(self._repository, marks, describe_exit(code), time.time(), certain=True, busy=bool(lane))  # noqa: TID251 - for people
                recorded = True
        return CrashReport(bool(lane) or code == RUN_STUCK or (bool(marks) and recorded), death)

    def _by_itself(self, code: int) -> bool:
        """Return whether the process crashed or was killed by the kernel for lack of memory, not ended from outside."""
        before, self._out_of_memory = self._out_of_memory, out_of_memory_kills()
        if -code == signal.SIGKILL:
            return self._out_of_memory > before
        return code > 0 or (code < 0 and -code not in _SENT)


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot; 0 if it does not report it."""
    with suppress(OSError, ValueError):
        for line in _VMSTAT.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
