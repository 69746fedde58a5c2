"""Runs one race in a process of its own and passes on what it reports.

RaceTask ─> stdin of python -m millstream.plugins.compile.worker ─> RaceEvents, a line each ─> report, or why none
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import NamedTuple

from pydantic import ValidationError

from millstream.plugins.compile.race.report import RaceEvent, RaceReport, RaceTask
from millstream.services.environment import library_environment
from millstream.services.process.exit_status import describe_exit

log = logging.getLogger("millstream.races")

#: The race ends after `seconds_max` by itself; a process that does not is killed after this further time.
GRACE_S = 600.0
LINE_BYTES_MAX = 8 << 20  # of one event; a longer one ends the race
SAID_CHARACTERS_MAX = 2000  # of its standard error


class Outcome(NamedTuple):
    """How the process ended.

    Args:
        report: None: there is none.
        error: why; empty: it was stopped.
        again: whether another try may go further: the process died, or other work left it no time.
    """

    report: RaceReport | None
    error: str = ""
    again: bool = False


class RaceProcess:
    """The process of one race. `stop` may be called by any thread."""

    def __init__(self, task: RaceTask) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._late = False

    def stop(self) -> None:
        """Kill the process, whose children die with it."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def run(self, on_event: Callable[[RaceEvent], None]) -> Outcome:
        """Run the race; `on_event` is called with each event that is not the last."""
        command = [sys.executable, "-P", "-m", "millstream.plugins.compile.worker", "--parent", str(os.getpid())]
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._stopped:
                    return Outcome(None)
                self._process = process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=library_environment({})
                )
            limit = threading.Timer(self._task.seconds_max + GRACE_S, self._end_late)
            limit.daemon = True
            limit.start()
            try:
                last = self._follow(process, on_event)
            finally:
                limit.cancel()
                process.kill()
                process.wait()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - SAID_CHARACTERS_MAX))
            return self._outcome(last, process.returncode, errors.read())

    def _follow(self, process: subprocess.Popen[bytes], on_event: Callable[[RaceEvent], None]) -> RaceEvent | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._task.model_dump_json().encode())
            process.stdin.close()
        except BrokenPipeError:
            pass
        while line := process.stdout.readline(LINE_BYTES_MAX):
            try:
                event = RaceEvent.model_validate_json(line)
            except ValidationError as error:
                log.warning("an event of a race cannot be read: %s", error.errors(include_url=False)[0]["msg"])
                continue
            if event.report is not None or event.error:
                return event
            on_event(event)
        return None

    def _end_late(self) -> None:
        with self._lock:
            self._late = True
            if self._process is not None:
                self._process.kill()

    def _outcome(self, last: RaceEvent | None, code: int, errors: bytes) -> Outcome:
        if self._stopped:
            return Outcome(None)
        if last is not None and last.report is not None:
            return Outcome(last.report)
        if last is not None:
            return Outcome(None, last.error, again=last.late)
        if self._late:
            return Outcome(None, f"it did not end within {self._task.seconds_max + GRACE_S:g} s", again=True)
        said = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return Outcome(None, f"its process {describe_exit(code)}" + (f": {said}" if said else ""), again=True)
