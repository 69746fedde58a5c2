"""A supervised child process: start it, read its output, restart it when it dies, stop it on request.

fork -> run -> exit -> show a line, wait (back-off) -> fork …      until stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable
from pathlib import Path

from millstream.services.environment import child_environment
from millstream.services.process.exit_status import describe_exit
from millstream.services.process.inheritance import child_setup
from millstream.services.process.waits import Backoff
from millstream.services.settings import LogFormat
from millstream.services.supervisor.log import LINE_BYTES_MAX, ChildLog, LogFile, ShowLine, WriteLine
from millstream.services.supervisor.plan import Program
from millstream.services.wire.worker_id import new_start, worker_id

log = logging.getLogger("millstream.supervisor")

READ_BYTES = 64 << 10
LAST_OUTPUT_S_MAX = 1.0
#: Deaths caused by a model or a request after which a child on trial is given up. A version that keeps killing workers
#: is refused after fewer deaths.
TRIAL_DEATHS_MAX = 20

#: called with the child and its pid; returns whether a model or request caused the death, which needs no back-off
OnDeath = Callable[["Child", int], Awaitable[bool]]


class Child:
    """Keeps one program running.

    Args:
        program: what to run.
        logs: the folder of its log file.
        show_line: shows a line on the terminal.
        on_death: called once for each death, before the restart.
        on_trial: do not restart it until `end_trial`, except after a death that a model or a request caused; otherwise
            hostile requests could make every rolling restart fail.
        log_format: the form of the lines in its log file.
        forward: takes every line of its log; None: none.
    """

    def __init__(
        self,
        program: Program,
        logs: Path,
        show_line: ShowLine,
        on_death: OnDeath,
        *,
        on_trial: bool = False,
        log_format: LogFormat = "text",
        forward: WriteLine | None = None,
    ) -> None:
        self.program = program
        self.log_path = logs / f"{program.name}.log"
        self.backoff = Backoff()
        self.last_line = ""
        self.exit_description = ""  # of the process that ended last
        self.process: Process | None = None
        self.start_id = ""  # of the current or last process
        self.ready = asyncio.Event()  # set by a program with `signals_ready`
        self.signs = 0  # of life, of the current process
        self.hung = False  # whether the process that ended last was killed because it ran, and showed no sign of life
        self._life_fd = -1  # read end of the pipe for them
        self._show_line = show_line
        self._on_death = on_death
        self._on_trial = on_trial
        self._stopping = asyncio.Event()
        self._killed = False
        self._task: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._log_format: LogFormat = log_format
        self._forward = forward

    @property
    def worker(self) -> str:
        """The id of the worker in Redis; of one only."""
        return worker_id(self.program.worker, self.start_id)

    def start(self) -> None:
        """Start the program, and restart it whenever it ends, until `stop`."""
        self._task = asyncio.create_task(self._supervise(), name=f"child {self.program.name}")

    @property
    def code(self) -> int:
        """The last exit code, negative for a signal; 0 before the first exit."""
        return (self.process.returncode or 0) if self.process is not None else 0

    @property
    def stopped(self) -> bool:
        """Whether `stop` or `kill` was called."""
        return self._stopping.is_set()

    @property
    def pid(self) -> int:
        """The pid of the running process; 0 if there is none."""
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    def end_trial(self) -> bool:
        """End the trial: from now on restart the program when it dies. Returns False if it has already ended."""
        self._on_trial = False
        return self._task is not None and not self._task.done()

    async def ended(self) -> None:
        """Wait until the program has ended and will not be restarted."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s` seconds; return when the process is gone. May be called again."""
        self._stopping.set()
        if self._task is None:
            return
        self.signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        if not done:
            self._report(f"{self.program.name} did not stop within {timeout_s:.3g} s: killed")
            self.kill()
        await asyncio.shield(self._task)

    def kill(self) -> None:
        """Kill the process and its own children now, and do not restart it."""
        self._stopping.set()
        self._killed = True
        if self.process is not None and self.process.returncode is None:
            _kill_group(self.process.pid)

    def kill_frozen(self, what: str, *, hung: bool) -> None:
        """Kill the process and its own children, so that it is started again.

        Args:
            what: it did wrong, for the log.
            hung: whether what it ran may be at fault; otherwise it was stopped from outside.
        """
        self._report(f"{self.program.name} {what}: killing it")
        self.hung = hung
        _kill_group(self.pid)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        file = LogFile(self.log_path)
        lines = ChildLog(self.program.name, file, self._log_format, self._show_line, self._forward)
        excused_deaths = 0
        try:
            while not self._stopping.is_set():
                started = loop.time()
                pid, self.exit_description = await self._run_once(lines)
                planned = self._stopping.is_set()
                if planned and not self._killed:
                    log.info("%s ended", self.program.name)
                    return
                excused = await self._on_death(self, pid)
                delay_s = 0.0 if excused else self.backoff.after_death(loop.time() - started)
                excused_deaths += excused
                if planned or (self._on_trial and (not excused or excused_deaths > TRIAL_DEATHS_MAX)):
                    return
                await self._wait_before_restart(delay_s)
        finally:
            lines.close()

    async def _run_once(self, lines: ChildLog) -> tuple[int, str]:
        """Run the program once; return its pid (0 if it could not be started) and a description of its exit."""
        try:
            process = self.process = await self._fork(lines)
        except OSError as error:
            return 0, f"cannot be started ({error.strerror or error})"
        code = await process.wait()
        self._close_life()
        # Processes that it started and left running would keep its pipe, sockets and memory.
        _kill_group(process.pid)
        await self._drain_output()
        return process.pid, describe_exit(code)

    async def _wait_before_restart(self, delay_s: float) -> None:
        when = f"in {delay_s:.2g} s" if delay_s else "at once"
        self._report(f"{self.program.name} {self.exit_description}: restarting it {when} (log: {self.log_path})")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()

    async def _fork(self, lines: ChildLog) -> Process:
        read_fd, write_fd = os.pipe()
        command, fds = self.program.command, self.program.fds
        self.start_id = new_start()
        self.signs, self.hung = 0, False
        if self.program.worker:
            command = (*command, "--start-id", self.start_id)
        ready_fd = self._await_ready() if self.program.signals_ready else None
        if ready_fd is not None:
            command, fds = (*command, "--ready-fd", str(ready_fd)), (*fds, ready_fd)
        life_fd = self._await_signs() if self.program.shows_life else None
        if life_fd is not None:
            command, fds = (*command, "--life-fd", str(life_fd)), (*fds, life_fd)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env=child_environment(dict(self.program.environment), self.program.withheld),
                pass_fds=fds,
                # Ctrl-C signals the terminal's whole process group, and only the supervisor may stop children.
                start_new_session=True,
                preexec_fn=child_setup(),
            )
        except OSError:
            os.close(read_fd)
            self._close_life()
            raise
        finally:
            os.close(write_fd)
            for fd in (ready_fd, life_fd):
                if fd is not None:
                    os.close(fd)
        log.info("%s started (pid %d)", self.program.name, process.pid)
        output = self._read_output(read_fd, process.pid, lines)
        self._reader = asyncio.create_task(output, name=f"log of {self.program.name}")
        # A stop during the fork found no process to signal.
        if self._stopping.is_set():
            process.send_signal(signal.SIGTERM)
        return process

    def _await_ready(self) -> int:
        """Return a pipe's write end for a program about to start; `ready` is set when the program writes to it."""
        self.ready.clear()
        read_fd, write_fd = os.pipe()
        loop = asyncio.get_running_loop()

        def on_readable() -> None:
            loop.remove_reader(read_fd)
            if os.read(read_fd, 1):  # empty if the program ended before it was ready
                self.ready.set()
            os.close(read_fd)

        loop.add_reader(read_fd, on_readable)
        return write_fd

    def _await_signs(self) -> int:
        """Return a pipe's write end for a program about to start; every byte in it counts as a sign of life."""
        self._life_fd, write_fd = os.pipe()
        asyncio.get_running_loop().add_reader(self._life_fd, self._on_sign)
        return write_fd

    def _on_sign(self) -> None:
        signs = len(os.read(self._life_fd, READ_BYTES))
        self.signs += signs
        if not signs:
            self._close_life()

    def _close_life(self) -> None:
        if self._life_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._life_fd)
            os.close(self._life_fd)
            self._life_fd = -1

    async def _drain_output(self) -> None:
        """Read the last lines of a process that ended, for at most LAST_OUTPUT_S_MAX.

        A process that left its group may keep the pipe open forever.
        """
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=LAST_OUTPUT_S_MAX)
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def _read_output(self, read_fd: int, pid: int, log_lines: ChildLog) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(read_fd, "rb", 0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        log_lines.new_process()
        rest = b""
        try:
            while chunk := await reader.read(READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > LINE_BYTES_MAX:
                    lines.append(rest)
                    rest = b""
                for line in lines:
                    self._handle_line(line, pid, log_lines)
            if rest:
                self._handle_line(rest, pid, log_lines)
        finally:
            transport.close()

    def _handle_line(self, line: bytes, pid: int, log_lines: ChildLog) -> None:
        if text := log_lines.write(line, pid, asyncio.get_running_loop().time()):
            self.last_line = text

    def _report(self, event: str) -> None:
        log.warning("%s", event)
        self._show_line(event)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
