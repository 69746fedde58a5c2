"""python -m millstream.plugins.compile.worker: race the compiled candidates of one version on this machine.

stdin: a RaceTask ─> stdout: RaceEvents, a line each; the last one has the report, or an error
It runs with the processor time that others leave, or with a share of it, and may be killed at any time: what it
compiled is in the task's cache, and the next race goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys

from pydantic import ValidationError

from millstream.plugins.compile.race.report import RaceEvent, RaceTask
from millstream.plugins.compile.worker.driver import run_race
from millstream.plugins.compile.worker.track import LateError
from millstream.services.errors import Failure
from millstream.services.process.threads import lower_process
from millstream.services.sandbox.confine import begin

FAILED = 1  # exit code where no race took place


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m millstream.plugins.compile.worker", description="Race one version."
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker that started this one")
    begin(parser.parse_args().parent)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(event: RaceEvent) -> None:
        print(event.model_dump_json(), file=output, flush=True)

    try:
        task = RaceTask.model_validate_json(sys.stdin.readline())
    except ValidationError as error:
        tell(RaceEvent(stage="finished", error=f"the task is no RaceTask: {error.errors()[0]['msg']}"))
        return FAILED
    lower_process(idle=not task.share, session=True)
    try:
        report = run_race(task, tell)
    except LateError as error:
        tell(RaceEvent(stage="finished", error=str(error), late=True))
        return FAILED
    except Failure as failure:
        tell(RaceEvent(stage="finished", error=failure.message))
        return FAILED
    tell(RaceEvent(stage="finished", seconds=report.seconds, report=report))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
