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
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

from millstream.services.environment import library_environment
from millstream.services.process.cancellation import uninterrupted
from millstream.services.process.exit_status import describe_exit
from millstream.services.sandbox.group_watch import WATCH_S, GroupWatch

#: The folder of the package, in which confined processes run: it is there as long as this process.
IMPORT_ROOT = Path(__file__).parents[3]
#: Bounds what is kept of what a process prints: the beginning of its output, the end of its errors. What it prints
#: beyond is read and dropped, so that it never blocks.
REPORT_BYTES_MAX = 16 << 20
ERRORS_BYTES_KEPT = 8192
_CHUNK_BYTES = 1 << 16
_END_S = 2.0  # for a process that closed its output to end
_PIPE_CHUNKS = 32  # no pipe holds more after the end of the process

T = TypeVar("T")
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


class ChildFailedError(Exception):
    """The process ended, or failed to do what it was told. `stderr`: the end of what it printed, if it did not load."""

    stderr = ""


class ProcessOutput:
    """What a process prints, read within bounds, and the limits of its group meanwhile.

    Args:
        output: its standard output, and `errors` its standard error.
        watch: what bounds its group; None: nothing does.
        kill: kills the group.

    Attributes:
        selector: what `step` waits for; a value is called when its file is ready. It is empty when all have ended.
    """

    def __init__(self, output: int, errors: int, watch: GroupWatch | None, kill: Callable[[], None]) -> None:
        self.report, self.errors = bytearray(), bytearray()
        self.report_ended = False
        self.exceeded = ""
        self.selector = selectors.DefaultSelector()
        self.selector.register(output, selectors.EVENT_READ, partial(self._read, output, self._keep_report))
        self.selector.register(errors, selectors.EVENT_READ, partial(self._read, errors, self._keep_errors))
        self._watch = watch
        self._kill = kill

    def step(self, seconds_max: float) -> None:
        """Wait for what can be read, or for a moment; kill the process if it takes more than it may."""
        for key, _ in self.selector.select(min(WATCH_S, max(0.0, seconds_max))):
            key.data()
        if self._watch is not None and self._watch.due and not self.exceeded:
            self.exceeded = self._watch.measure()
            if self.exceeded:
                self._kill()

    def _read(self, descriptor: int, keep: Callable[[bytes], None]) -> None:
        chunk = os.read(descriptor, _CHUNK_BYTES)
        keep(chunk)
        if not chunk:
            self.selector.unregister(descriptor)

    def _keep_report(self, chunk: bytes) -> None:
        self.report_ended = not chunk
        self.report += chunk[: REPORT_BYTES_MAX - len(self.report)]

    def _keep_errors(self, chunk: bytes) -> None:
        self.errors += chunk
        del self.errors[:-ERRORS_BYTES_KEPT]


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
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = process.pid
        self._killing = threading.Lock()
        self._closed = False  # then nothing is killed: the number of its group may be used again
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018 - for mypy
        self._input, self._unsent, self._is_last = process.stdin, b"", False
        os.set_blocking(self._input.fileno(), False)
        watch = watch_of(self.pid) if watch_of is not None else None
        self._output = ProcessOutput(process.stdout.fileno(), process.stderr.fileno(), watch, self.kill)

    @property
    def stderr(self) -> str:
        """The end of what it printed to its standard error."""
        return self._output.errors.decode(errors="replace")

    @property
    def status(self) -> int | None:
        """Its exit status, as of `Ended`; None: it runs."""
        return self._process.poll()

    def run(self, task: bytes, seconds_max: float = inf) -> Ended:
        """Hand over the task, and return what came of it when the process has ended.

        Of an output that is too long, the beginning is kept. Raises TimeoutError after `seconds_max`.
        """
        deadline, output = time.monotonic() + seconds_max, self._output
        try:
            self.send(task, last=True)
            while output.selector.get_map() or self._process.poll() is None:
                self._step(deadline)
            return Ended(bytes(output.report), bytes(output.errors), self._process.returncode, output.exceeded)
        finally:
            self.close()

    def ask(self, message: bytes, seconds_max: float) -> bytes:
        """Send a line and return the reply to it, as `next_line` does."""
        self.send(message + b"\n")
        return self.next_line(seconds_max)

    def next_line(self, seconds_max: float) -> bytes:
        """Return the next line of its output.

        Raises ChildFailedError if it ended, took more than it may or wrote too much, and TimeoutError; it is gone then.
        """
        deadline, report = time.monotonic() + seconds_max, self._output.report
        try:
            while b"\n" not in report:
                if self._output.report_ended or len(report) >= REPORT_BYTES_MAX:
                    raise ChildFailedError(self._why_ended())
                self._step(deadline)
        except BaseException:
            self.close()
            raise
        line, _, rest = bytes(report).partition(b"\n")
        report[:] = rest
        return line

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Have it written while the process is listened to; after the `last` one its input ends."""
        self._unsent += message
        self._is_last = last
        if self._input not in self._output.selector.get_map():
            self._output.selector.register(self._input, selectors.EVENT_WRITE, self._write)

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
            if self._output.selector.get_map():
                self._output.step(0.0)
        self._output.selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _step(self, deadline: float) -> None:
        """Write and read what can be written and read now, and see to the limits. Raises TimeoutError."""
        self._output.step(deadline - time.monotonic())
        if not self._output.selector.get_map():  # it closed its output, and ends
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(WATCH_S)
        if self._process.poll() is not None:
            self.kill()  # what it started may hold its output open
        elif time.monotonic() >= deadline:
            raise TimeoutError

    def _why_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._output.exceeded:
            return f"it was ended: {self._output.exceeded}"
        status = self.status
        return f"its process {describe_exit(status)}" if status is not None else "its process closed its output"

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._input.fileno(), self._unsent[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            self._unsent = b""
        if not self._unsent:
            self._output.selector.unregister(self._input)
            if self._is_last:
                self._input.close()


async def in_its_thread(run: Callable[[], T], end: Callable[[], None]) -> T:
    """Return `run()`, called in a thread of its own, and call `end` when it is over, and if this task is cancelled.

    `run` has returned on return, error and cancellation. The threads of the event loop are few, and a process may take
    minutes.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            settle = partial(ended.set_result, run())
        except Exception as error:
            settle = partial(ended.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    # A daemon: the end of this process, with which the kernel ends the other one, does not wait for it.
    threading.Thread(target=work, name="child", daemon=True).start()
    try:
        return await asyncio.shield(ended)
    finally:
        end()
        await uninterrupted(ended)


async def run_confined(
    module: str, folder: Path, task: bytes, environment: Mapping[str, str], watch_of: WatchOf
) -> Ended:
    """Run a module that reads the files in `folder`, which `ps` shows. Raises OSError if it cannot be started."""
    child = ChildProcess(module, str(folder), environment=environment, watch_of=watch_of, folder=IMPORT_ROOT)
    return await in_its_thread(partial(child.run, task), child.kill)


def confined_environment(**overrides: str) -> dict[str, str]:
    """Return the environment of a check or import; libraries get one thread, since threads reserve memory."""
    few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return library_environment({**few, **overrides})
