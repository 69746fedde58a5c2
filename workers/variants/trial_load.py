"""python -m millstream.workers.variants.trial_load: load one version as a worker would, and exit.

stdin: a Manifest as JSON; exit code: whether the load succeeded, failed with an error or crashed, or that SIGALRM ended
its warm-up
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from millstream.services.crashes.load_marks import PROBE, LoadMarks
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.process.inheritance import die_with_parent
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import read_settings
from millstream.services.wire.worker_id import worker_id
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Instance, Stop
from millstream.workers.models.load_version import REFUSED, LoadEnvironment, load


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m millstream.workers.variants.trial_load", description="Load one version and end."
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker that started this one")
    parser.add_argument("--start-id", required=True, help="distinguishes this process from all others")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--warm-up-s-max", type=float, required=True, help="seconds after which a warm-up is ended")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    manifest = Manifest.model_validate_json(sys.stdin.read())
    settings = read_settings()
    folder = FolderRepository(settings.repository_dir).folder_of(manifest)
    backend = get_backend(arguments.backend, settings.home)
    at = LoadEnvironment(backend, arguments.backend, arguments.device, arguments.threads)
    marks = LoadMarks(settings.home / "run", worker_id(PROBE, arguments.start_id))

    def warming(_: Instance) -> None:
        # The signal's default action ends the process even during a run that holds the interpreter's lock.
        signal.setitimer(signal.ITIMER_REAL, arguments.warm_up_s_max)

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
