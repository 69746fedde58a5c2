"""A measuring process, as the driver sees it: started, told what to run, and killed when its time is over.

Replies are checked: the process runs code that a compiler made of an untrusted model.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from pydantic import BaseModel, ValidationError

from millstream.plugins.compile.race.report import STDERR_CHARACTERS_MAX
from millstream.plugins.compile.worker.messages import (
    LINE_BYTES_MAX,
    MEMORY_SPARE,
    WRITTEN_BYTES_MAX,
    Answer,
    Command,
    Opening,
    Said,
    TimeRuns,
)
from millstream.services.crashes.exit_status import describe_exit
from millstream.services.environment import library_environment
from millstream.services.sandbox.folder_watch import WATCH_S, FolderWatch
from millstream.services.sandbox.group_watch import GroupWatch

_CHUNK_BYTES = 1 << 16
_STDERR_JOIN_S = 2.0  # for the end of what a process wrote


class FailedError(Exception):
    """The process failed to do what it was told, or ended. `stderr`: the end of what it wrote, if it failed to load."""

    stderr = ""


class Measuring:
    """A measuring process. Not for several threads.

    Args:
        opening: what it loads.
        seconds_max: for the load.

    Raises FailedError with the reason if it cannot load, TimeoutError if that takes too long; the process is gone then.
    """

    def __init__(self, opening: Opening, seconds_max: float) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "millstream.plugins.compile.worker.measure",
            "--parent",
            str(os.getpid()),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=library_environment({}),
            process_group=0,
            bufsize=0,
        )
        folder = FolderWatch(opening.folder, WRITTEN_BYTES_MAX, included="")
        memory_bytes = int(opening.memory_bytes * MEMORY_SPARE) or sys.maxsize
        self._watch = GroupWatch(self._process.pid, folder, memory_bytes, alone=not opening.starts_programs)
        self._errors = b""
        self._line = b""
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self.size_bytes = 0
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
        return self._errors.decode(errors="replace")[-STDERR_CHARACTERS_MAX:]

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

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_STDERR_JOIN_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _ask(self, message: BaseModel, seconds_max: float) -> Said:
        """Send a message and return the reply. After an error of the process itself, it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message.model_dump_json().encode() + b"\n")
            said = Said.model_validate_json(self._read_line(time.monotonic() + seconds_max))
        except (BrokenPipeError, EOFError):
            raise FailedError(self._ended()) from None
        except TimeoutError:
            self.close()
            raise
        except ValidationError:
            self.close()
            raise FailedError("its process replied nothing that can be read") from None
        self.size_bytes = said.size_bytes
        if self._watch.due:
            self._look()
        if said.error:
            raise FailedError(" ".join(said.error.split()))
        return said

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._line:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if not poll.poll(min(left_s, WATCH_S) * 1000):
                self._look()
                continue
            chunk = os.read(descriptor, _CHUNK_BYTES)
            if not chunk or len(self._line) > LINE_BYTES_MAX:
                raise EOFError
            self._line += chunk
        line, _, self._line = self._line.partition(b"\n")
        return line

    def _look(self) -> None:
        """Kill the process if it takes more than it may. Raises FailedError then."""
        if exceeded := self._watch.measure():
            self.close()
            raise FailedError(f"it was ended: {exceeded}")

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STDERR_JOIN_S)
        status = self._process.poll()
        self.close()
        return f"its process {describe_exit(status)}" if status is not None else "its process closed its output"

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with suppress(OSError, ValueError), self._process.stderr as stream:
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                self._errors = (self._errors + chunk)[-STDERR_CHARACTERS_MAX:]
