"""Whether a worker died of what a model did: then the version is held to account, and the worker starts again at once."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from millstream.services.crashes.exit_status import LOAD_STUCK, RUN_STUCK, cause
from millstream.services.crashes.load_marks import blame, left_behind
from millstream.services.crashes.run_marks import take
from millstream.services.errors import Failure
from millstream.services.queue.death_notices import Death
from millstream.services.repository.folder import FolderRepository

#: signals by which people and service managers end processes; SIGKILL is also the kernel's when there is no memory
_SENT = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL}
_VMSTAT = Path("/proc/vmstat")


class Finding(NamedTuple):
    """`blamed`: on a model, so that the worker may start again at once. `death`: for the gateways."""

    blamed: bool
    death: Death


class Culprits:
    """For the workers of one supervisor. `run_dir`, `runs_dir`: where they leave marks of loads and runs.

    Blocking: call it in a thread.
    """

    def __init__(self, run_dir: Path, repository_dir: Path, runs_dir: Path) -> None:
        self._run_dir = run_dir
        self._runs_dir = runs_dir
        self._models_dir = repository_dir
        self._repository: FolderRepository | None = None
        self._out_of_memory = out_of_memory_kills()

    def found(self, worker: str, code: int, *, planned: bool) -> Finding:
        """What `worker` (its id), which ended with `code`, died of. A load that ended it is noted with its version.

        `planned`: it was told to end. Never raises: a death that cannot be noted counts as our own.
        """
        marks = left_behind(self._run_dir, f"{worker}.")
        run = take(self._runs_dir, worker)
        lane = run.lane if run is not None else ""
        # None: it may have been any that it had.
        batches = None if run is None or (lane and not run.batches) else run.batches
        if planned or not self._by_itself(code):
            return Finding(False, Death(worker, batches))
        death = Death(worker, batches, lane)
        if code == LOAD_STUCK:  # it has noted that itself, and may have been running anything
            return Finding(True, Death(worker, batches))
        noted = not marks
        with suppress(Failure):
            if marks and code != RUN_STUCK:
                self._repository = self._repository or FolderRepository(self._models_dir)
                blame(self._repository, marks, cause(code), time.time(), certain=True, busy=bool(lane))  # noqa: TID251 - for people
                noted = True
        return Finding(bool(lane) or code == RUN_STUCK or (bool(marks) and noted), death)

    def _by_itself(self, code: int) -> bool:
        """Whether the process crashed, or the kernel took it for want of memory; not: somebody ended it."""
        before, self._out_of_memory = self._out_of_memory, out_of_memory_kills()
        if -code == signal.SIGKILL:
            return self._out_of_memory > before
        return code > 0 or (code < 0 and -code not in _SENT)


def out_of_memory_kills() -> int:
    """How many processes of this machine the kernel has ended for want of memory, as far as it says so."""
    with suppress(OSError, ValueError):
        for line in _VMSTAT.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
