"""Runs a module in a process of its own: hands it a task, reads what it says within bounds, and ends all it started.

task ─> stdin │ python -m MODULE … --parent PID (own session) │ stdout, stderr ─> Ended: report, errors, status
The module asks the kernel to kill it with its parent, and ends at once if that is gone already (`confine.begin`).
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import IO, NamedTuple

from millstream.services.environment import library_environment
from millstream.services.process.cancellation import uninterrupted
from millstream.services.sandbox.group_watch import WATCH_S, GroupWatch

#: The folder of the package, in which confined processes run: it is there as long as this process.
IMPORT_ROOT = Path(__file__).parents[3]
#: Bounds what is kept of what a process prints: the beginning of its output, the end of its errors. What it prints
#: beyond is read and dropped, so that it never blocks.
REPORT_BYTES_MAX = 16 << 20
ERRORS_BYTES_KEPT = 8192
_CHUNK_BYTES = 1 << 16
_PIPE_CHUNKS = 32  # no pipe holds more after the end of the process

WatchOf = Callable[[int], GroupWatch]  # the process that leads a group -> what bounds the group


class Ended(NamedTuple):
    """A process that has ended.

    Args:
        report: the beginning of what it wrote to its standard output.
        errors: the end of what it wrote to its standard error.
        status: its exit status; negative: the signal that ended it.
        exceeded: which limit it was ended for; empty: none.
    """

    report: bytes
    errors: bytes
    status: int
    exceeded: str = ""


class ChildProcess:
    """A process that was started for a task. One thread uses it; any may `kill` it.

    The kernel ends the process with the thread that creates this object, so that thread has to outlive it.

    Args:
        module: what it runs.
        arguments: of its command line, which ends with `--parent PID`.
        environment: all its variables.
        watch_of: what bounds the process and those that it starts; None: nothing does.
        folder: its working folder; None: that of this process.

    Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        watch_of: WatchOf | None = None,
        folder: Path | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._output, self._errors, self._unsent = bytearray(), bytearray(), b""
        self._is_last = self._closed = False
        self._exceeded = ""
        self._killing = threading.Lock()  # a group that is gone is not killed: its number may be used again
        self._selector = selectors.DefaultSelector()
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        for stream, read in ((self._process.stdout, self._read_output), (self._process.stderr, self._read_errors)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, read)
        self._watch = watch_of(self.pid) if watch_of is not None else None

    def run(self, task: bytes, seconds_max: float = inf) -> Ended:
        """Hand over the task, and return what came of it when the process has ended.

        Of an output that is too long, the beginning is kept. Raises TimeoutError after `seconds_max`.
        """
        deadline = time.monotonic() + seconds_max
        try:
            self.send(task, last=True)
            while self._selector.get_map():
                self._step(deadline)
            while self._process.poll() is None:  # it closed its output
                self._look(deadline)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(min(WATCH_S, max(0.0, deadline - time.monotonic())))
            return Ended(bytes(self._output), bytes(self._errors), self._process.returncode, self._exceeded)
        finally:
            self.close()

    async def run_async(self, task: bytes) -> Ended:
        """Do the same in a thread of its own. The process has ended on return, error and cancellation.

        An executor of the event loop has few threads, which a process may keep for minutes.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="child") as thread:
            running = asyncio.get_running_loop().run_in_executor(thread, self.run, task)
            try:
                return await asyncio.shield(running)
            finally:
                self.kill()
                await uninterrupted(running)

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Have it written while the process is listened to; after the `last` one its input ends."""
        stream = self._process.stdin
        assert stream is not None
        self._unsent += message
        self._is_last = last
        if stream not in self._selector.get_map():
            self._selector.register(stream, selectors.EVENT_WRITE, self._write)

    def kill(self) -> None:
        """Kill the process and those that it started. Any thread may call it."""
        with self._killing, suppress(ProcessLookupError, PermissionError):
            if not self._closed:
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and those that it started, and wait for its end."""
        if self._closed:
            return
        self.kill()
        with self._killing:
            self._process.wait()
            self._closed = True
        for _ in range(_PIPE_CHUNKS):  # what it printed last
            ready = self._selector.select(0) if self._selector.get_map() else []
            for key, _ in ready:
                key.data(key.fileobj)
            if not ready:
                break
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _step(self, deadline: float) -> None:
        """Write and read what can be written and read now, and see to the limits. Raises TimeoutError."""
        for key, _ in self._selector.select(min(WATCH_S, max(0.0, deadline - time.monotonic()))):
            key.data(key.fileobj)
        self._look(deadline)

    def _look(self, deadline: float) -> None:
        """Kill the process if it takes more than it may, and what is left of its group. Raises TimeoutError."""
        if time.monotonic() >= deadline:
            raise TimeoutError
        if self._process.poll() is not None:
            self.kill()  # what it started may hold its output open
        elif self._watch is not None and self._watch.due and not self._exceeded:
            self._exceeded = self._watch.measure()
            if self._exceeded:
                self.kill()

    def _write(self, stream: IO[bytes]) -> None:
        try:
            self._unsent = self._unsent[os.write(stream.fileno(), self._unsent[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            self._unsent = b""
        if not self._unsent:
            self._selector.unregister(stream)
            if self._is_last:
                stream.close()

    def _read_output(self, stream: IO[bytes]) -> None:
        chunk = os.read(stream.fileno(), _CHUNK_BYTES)
        self._output += chunk[: REPORT_BYTES_MAX - len(self._output)]
        if not chunk:
            self._selector.unregister(stream)

    def _read_errors(self, stream: IO[bytes]) -> None:
        chunk = os.read(stream.fileno(), _CHUNK_BYTES)
        self._errors = (self._errors + chunk)[-ERRORS_BYTES_KEPT:]
        if not chunk:
            self._selector.unregister(stream)


async def run_confined(
    module: str, folder: Path, task: bytes, environment: Mapping[str, str], watch_of: WatchOf
) -> Ended:
    """Run a module that reads the files in `folder`, which `ps` shows. Raises OSError if it cannot be started."""
    child = ChildProcess(module, str(folder), environment=environment, watch_of=watch_of, folder=IMPORT_ROOT)
    return await child.run_async(task)


def confined_environment(**overrides: str) -> dict[str, str]:
    """Return the environment of a check or import; libraries get one thread, since threads reserve memory."""
    few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return library_environment({**few, **overrides})
