"""A process of a race: started, told what to do, and killed with all that it started.

message, a line of JSON ─> stdin │ stdout ─> reply, a line of JSON          time, memory and files are bounded meanwhile
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from pydantic import BaseModel

from millstream.services.environment import library_environment
from millstream.services.process.exit_status import describe_exit
from millstream.services.sandbox.group_watch import WATCH_S, GroupWatch

LINE_BYTES_MAX = 8 << 20  # of a reply; a longer one ends the process
STDERR_BYTES_KEPT = 8192  # the end of what a process wrote to its standard error
_CHUNK_BYTES = 1 << 16
_END_S = 2.0  # for a process that closed its output to end, and for the end of what it wrote


class FailedError(Exception):
    """The process failed to do what it was told, or ended. `stderr`: the end of what it wrote, if it failed to load."""

    stderr = ""


class Child:
    """A process. `kill` may be called by any thread, all else by one.

    Args:
        module: that it runs, with the option --parent.
        environment: variables beside those of libraries.
        watch: returns what measures the process with this id, and those that it starts; None: nothing is measured.

    Raises OSError if it cannot be started.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], watch: Callable[[int], GroupWatch] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=library_environment(dict(environment)),
            process_group=0,
            bufsize=0,
        )
        self._watch = watch(self.process.pid) if watch is not None else None
        self._errors = b""
        self._line = b""
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    @property
    def stderr(self) -> str:
        """The end of what it wrote to its standard error."""
        return self._errors.decode(errors="replace")

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def ask(self, message: BaseModel, seconds_max: float) -> bytes:
        """Send a message and return the next line of the process.

        Raises FailedError if it ended, or took more than it may, and TimeoutError; the process is gone then.
        """
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: the next line says how
            self.process.stdin.write(message.model_dump_json().encode() + b"\n")
        return self.line(time.monotonic() + seconds_max)

    def line(self, deadline: float) -> bytes:
        """Return its next line; raises as `ask` does. `deadline`: monotonic time."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._line:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.close()
                raise TimeoutError
            if not poll.poll(min(left_s, WATCH_S) * 1000):
                self._look()
                continue
            chunk = os.read(descriptor, _CHUNK_BYTES)
            self._line += chunk
            if not chunk or len(self._line) > LINE_BYTES_MAX:
                raise FailedError(self._ended())
        line, _, self._line = self._line.partition(b"\n")
        if self._watch is not None and self._watch.due:
            self._look()
        return line

    def kill(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill them, and free what they left."""
        self.kill()
        self.process.wait()
        self._reader.join(_END_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _look(self) -> None:
        """Kill the process if it takes more than it may. Raises FailedError then."""
        if self._watch is not None and (exceeded := self._watch.measure()):
            self.close()
            raise FailedError(f"it was ended: {exceeded}")

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        status = self.process.poll()
        self.close()
        return f"its process {describe_exit(status)}" if status is not None else "its process closed its output"

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with suppress(OSError, ValueError), self.process.stderr as stream:
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                self._errors = (self._errors + chunk)[-STDERR_BYTES_KEPT:]
