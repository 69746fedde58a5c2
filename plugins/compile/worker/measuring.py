"""A measuring process, as the driver sees it: it loads one form, and runs what it is told.

Replies are checked: the process runs code that a compiler made of an untrusted model.
"""

from __future__ import annotations

import sys
from functools import partial

from pydantic import BaseModel, ValidationError

from millstream.plugins.compile.child import Child, FailedError
from millstream.plugins.compile.race.report import STDERR_CHARACTERS_MAX
from millstream.plugins.compile.worker.messages import (
    MEMORY_SPARE,
    WRITTEN_BYTES_MAX,
    Answer,
    Command,
    Opening,
    Said,
    TimeRuns,
)
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch


class Measuring:
    """A measuring process. Not for several threads.

    Args:
        opening: what it loads.
        seconds_max: for the load.

    Raises FailedError with the reason if it cannot load, TimeoutError if that takes too long; the process is gone then.
    """

    def __init__(self, opening: Opening, seconds_max: float) -> None:
        self._child = Child("millstream.plugins.compile.worker.measure", partial(_watch, opening), {})
        try:
            self._ask(opening, seconds_max)
        except BaseException as error:
            self.close()
            if isinstance(error, FailedError):
                error.stderr = self.stderr
            raise

    @property
    def stderr(self) -> str:
        """The end of what it wrote to its standard error."""
        return self._child.stderr[-STDERR_CHARACTERS_MAX:]

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._child.ended

    def close(self) -> None:
        """Kill the process and those that it started."""
        self._child.close()

    def times(self, rows: int, seconds: float, seconds_max: float) -> tuple[float, ...]:
        """Return the seconds of runs in a block of about `seconds`. Raises FailedError, TimeoutError."""
        said = self._ask(Command(time=TimeRuns(rows=rows, seconds=seconds)), seconds_max)
        if not said.times_s or min(said.times_s) <= 0:
            self.close()
            raise FailedError("its process reported no times")
        return said.times_s

    def answer(self, command: Answer, seconds_max: float) -> None:
        """Have samples run and the outputs written. Raises FailedError, TimeoutError."""
        self._ask(Command(answer=command), seconds_max)

    def _ask(self, message: BaseModel, seconds_max: float) -> Said:
        """Send a message and return the reply. After an error of the process itself, it is gone."""
        try:
            said = Said.model_validate_json(self._child.ask(message, seconds_max))
        except ValidationError:
            self.close()
            raise FailedError("its process replied nothing that can be read") from None
        if said.error:
            raise FailedError(" ".join(said.error.split()))
        return said


def _watch(opening: Opening, pid: int) -> GroupWatch:
    folder = FolderWatch(opening.folder, WRITTEN_BYTES_MAX, included="")
    memory_bytes = int(opening.memory_bytes * MEMORY_SPARE) or sys.maxsize
    return GroupWatch(pid, folder, memory_bytes, alone=not opening.starts_programs)
