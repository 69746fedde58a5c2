"""python -m millstream.workers.variants.trial_load: load one version as a worker would, and exit.

stdin: a LoadTask; exit code: whether the load succeeded, failed with an error or crashed, or that SIGALRM ended
its warm-up
"""

from __future__ import annotations

import os
import signal
import sys

from millstream.services.crashes.load_marks import PROBE, LoadMarks
from millstream.services.errors import Failure
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import read_settings
from millstream.services.wire.worker_id import worker_id
from millstream.workers.backends import backends_beside, get_backend
from millstream.workers.backends.base import Instance, Stop
from millstream.workers.models.load_version import REFUSED, LoadEnvironment, load, read_task


def main() -> int:
    task, settings = read_task(), read_settings()
    manifest = task.manifest
    folder = FolderRepository(settings.repository_dir).folder_of(manifest)
    backend = get_backend(task.backend, settings.home)
    beside = backends_beside(task.backend, task.device, settings.home)
    at = LoadEnvironment(backend, task.backend, task.device, task.threads, beside=beside)
    marks = LoadMarks(settings.home / "run", worker_id(PROBE, task.start))

    def warming(_: Instance) -> None:
        # The signal's default action ends the process even during a run that holds the interpreter's lock.
        signal.setitimer(signal.ITIMER_REAL, task.warm_up_s_max)

    try:
        with marks.loading(manifest, at.kind, alone=True):
            load(manifest, folder, at, Stop(), warming)
    except Failure:
        return REFUSED  # the worker loads it next, and reports the same error
    return 0


if __name__ == "__main__":
    # Destructors are skipped: a crash in them would say nothing about the load.
    code = main()
    sys.stdout.flush()
    os._exit(code)
