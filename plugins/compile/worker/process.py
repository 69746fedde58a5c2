"""Runs one race in a process of its own and passes on what it reports.

RaceTask ─> stdin of python -m millstream.plugins.compile.worker ─> RaceEvents, a line each ─> report, or why none
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pydantic import ValidationError

from millstream.plugins.compile.race.report import RaceEvent, RaceReport, RaceTask
from millstream.services.environment import library_environment
from millstream.services.sandbox.child import ChildFailedError, ChildProcess

#: The race ends after `seconds_max` by itself; a process that does not is killed after this further time.
GRACE_S = 600.0


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
        self._child: ChildProcess | None = None
        self._stopped = False

    def stop(self) -> None:
        """Kill the process, whose children die with it."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()

    def run(self, on_event: Callable[[RaceEvent], None]) -> Outcome:
        """Run the race; `on_event` is called with each event that is not the last."""
        with self._lock:
            if self._stopped:
                return Outcome(None)
            self._child = child = ChildProcess("millstream.plugins.compile.worker", environment=library_environment({}))
        seconds_max = self._task.seconds_max + GRACE_S
        try:
            outcome = _followed(child, self._task, seconds_max, on_event)
        except ChildFailedError as error:
            said = child.stderr.strip().rpartition("\n")[2]
            outcome = Outcome(None, f"{error}: {said}" if said else str(error), again=True)
        except TimeoutError:
            outcome = Outcome(None, f"it did not end within {seconds_max:g} s", again=True)
        except ValidationError:
            outcome = Outcome(None, "its process reported nothing that can be read", again=True)
        finally:
            with self._lock:
                self._child = None
            child.close()
        return Outcome(None) if self._stopped else outcome


def _followed(
    child: ChildProcess, task: RaceTask, seconds_max: float, on_event: Callable[[RaceEvent], None]
) -> Outcome:
    deadline = time.monotonic() + seconds_max
    line = child.ask(task.model_dump_json().encode(), seconds_max)
    while True:
        event = RaceEvent.model_validate_json(line)
        if event.report is not None or event.error:
            return Outcome(event.report, event.error, again=event.late)
        on_event(event)
        line = child.next_line(deadline - time.monotonic())
