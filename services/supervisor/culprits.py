"""Whether a worker died of what a model did: then the version is held to account, and the worker starts again at once."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

from services.errors import Failure
from services.exit_status import LOAD_STUCK, RUN_STUCK, cause
from services.load_marks import blame, left_behind
from services.repository.folder import FolderRepository

#: signals by which people and service managers end processes; SIGKILL is also the kernel's when there is no memory
_SENT = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL}
_VMSTAT = Path("/proc/vmstat")


class Culprits:
    """For the workers of one supervisor. `run_dir`: where they leave marks. Blocking: call it in a thread."""

    def __init__(self, run_dir: Path, models_dir: Path) -> None:
        self._run_dir = run_dir
        self._models_dir = models_dir
        self._repository: FolderRepository | None = None
        self._out_of_memory = out_of_memory_kills()

    def found(self, worker: str, code: int, *, planned: bool) -> bool:
        """Whether the death of `worker` (its id), which ended with `code`, is blamed on a version; it is noted there then.

        `planned`: it was told to end. Never raises: a death that cannot be noted counts as our own.
        """
        marks = left_behind(self._run_dir, f"{worker}.")
        if planned or not self._by_itself(code):
            return False
        if code in {LOAD_STUCK, RUN_STUCK}:  # it has noted that itself
            return True
        if not marks:
            return False
        with suppress(Failure):
            self._repository = self._repository or FolderRepository(self._models_dir)
            blame(self._repository, marks, cause(code), time.time(), certain=True)  # noqa: TID251 - for people
            return True
        return False

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
