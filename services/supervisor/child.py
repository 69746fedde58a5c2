"""A child process: started, listened to, started again when it dies, stopped when told.

fork -> runs -> dies -> says so, waits (back-off) -> fork …      until stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable
from pathlib import Path

from millstream.services.crashes.exit_status import describe_exit
from millstream.services.process.backoff import Backoff
from millstream.services.settings import child_environment
from millstream.services.supervisor.log import LINE_BYTES_MAX, Alerts, LogFile
from millstream.services.supervisor.parent_death import tied_to_this_process
from millstream.services.supervisor.plan import Program
from millstream.services.wire.worker_id import new_start

READ_BYTES = 64 << 10
LAST_WORDS_S_MAX = 1.0
#: Deaths that others are to blame for which a child on trial survives. A version that keeps ending workers is refused
#: after fewer.
TRIAL_DEATHS_MAX = 20

Say = Callable[[str], None]
#: whether somebody else is to blame, so that there is no reason to wait before it is started again
Died = Callable[["Child", int], Awaitable[bool]]


class Child:
    """Keeps one program running. `say`: a line for the terminal. `died`: called with the pid, once for each death, before
    it is started again.

    `on_trial`: until `keep` its end is the end, and no reason to start it again; unless a model or a request is to blame,
    which would keep hostile callers in the way of every restart.
    """

    def __init__(self, program: Program, logs: Path, say: Say, died: Died, *, on_trial: bool = False) -> None:
        self.program = program
        self.log_path = logs / f"{program.name}.log"
        self.backoff = Backoff()
        self.last_line = ""
        self.how = ""  # it ended last
        self.process: Process | None = None
        self.start_id = ""  # of the process that was started last
        self.ready = asyncio.Event()  # set when a program that says so is
        self._say = say
        self._died = died
        self._on_trial = on_trial
        self._stopping = asyncio.Event()
        self._killed = False
        self._task: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._alerts = Alerts()

    def start(self) -> None:
        """Start the program, and again whenever it ends, until `stop`."""
        self._task = asyncio.create_task(self._keep_running(), name=f"child {self.program.name}")

    @property
    def code(self) -> int:
        """How it ended last: an exit code, or minus a signal's number; 0 before its first end."""
        return (self.process.returncode or 0) if self.process is not None else 0

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop, or killed."""
        return self._stopping.is_set()

    @property
    def pid(self) -> int:
        """Of the process that runs; 0 while there is none."""
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    def keep(self) -> bool:
        """The trial is over: from now on it is started again when it dies. False: it has ended."""
        self._on_trial = False
        return self._task is not None and not self._task.done()

    async def ended(self) -> None:
        """Return when it has, for good."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after `timeout_s` seconds; returns when the process is gone. May be called again."""
        self._stopping.set()
        if self._task is None:
            return
        self.signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        if not done:
            self._say(f"{self.program.name} did not stop within {timeout_s:.3g} s: killed")
            self.kill()
        await asyncio.shield(self._task)

    def kill(self) -> None:
        """End the process and its own children now, and do not start it again."""
        self._stopping.set()
        self._killed = True
        if self.process is not None and self.process.returncode is None:
            _kill_group(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        log = LogFile(self.log_path)
        blamed_deaths = 0
        try:
            while not self._stopping.is_set():
                started = loop.time()
                pid, self.how = await self._live(log)
                planned = self._stopping.is_set()
                if planned and not self._killed:
                    return
                blamed = await self._died(self, pid)
                delay_s = 0.0 if blamed else self.backoff.after_death(loop.time() - started)
                blamed_deaths += blamed
                if planned or (self._on_trial and (not blamed or blamed_deaths > TRIAL_DEATHS_MAX)):
                    return
                await self._mourn(delay_s)
        finally:
            log.close()

    async def _live(self, log: LogFile) -> tuple[int, str]:
        """Run the program once: the pid it had (0 if it could not be started), and how it ended."""
        try:
            process = self.process = await self._fork(log)
        except OSError as error:
            return 0, f"cannot be started ({error.strerror or error})"
        code = await process.wait()
        # What it started and left behind would hold its pipe, its sockets and its memory.
        _kill_group(process.pid)
        await self._hear_out()
        return process.pid, describe_exit(code)

    async def _mourn(self, delay_s: float) -> None:
        when = f"in {delay_s:g} s" if delay_s else "at once"
        self._say(f"{self.program.name} {self.how}: starting it again {when} (log: {self.log_path})")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _fork(self, log: LogFile) -> Process:
        read_fd, write_fd = os.pipe()
        command, fds = self.program.command, self.program.fds
        self.start_id = new_start()
        if self.program.worker:
            command = (*command, "--start-id", self.start_id)
        ready_fd = self._await_ready() if self.program.says_ready else None
        if ready_fd is not None:
            command, fds = (*command, "--ready-fd", str(ready_fd)), (*fds, ready_fd)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env=child_environment(dict(self.program.environment), self.program.withheld),
                pass_fds=fds,
                # Ctrl-C goes to the whole group of the terminal; in which order children stop is decided here alone.
                start_new_session=True,
                preexec_fn=tied_to_this_process(self.program.cores),
            )
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
            if ready_fd is not None:
                os.close(ready_fd)
        self._listening = asyncio.create_task(self._listen(read_fd, log), name=f"log of {self.program.name}")
        # A stop that came while the fork was on its way had nobody to send its signal to.
        if self._stopping.is_set():
            process.send_signal(signal.SIGTERM)
        return process

    def _await_ready(self) -> int:
        """A descriptor for a program that is about to start: `ready` is set when it writes there."""
        self.ready.clear()
        read_fd, write_fd = os.pipe()
        loop = asyncio.get_running_loop()

        def hear() -> None:
            loop.remove_reader(read_fd)
            if os.read(read_fd, 1):  # nothing: it ended before it was
                self.ready.set()
            os.close(read_fd)

        loop.add_reader(read_fd, hear)
        return write_fd

    async def _hear_out(self) -> None:
        """Take the last lines of a process that ended; one that escaped its group may hold the pipe for ever."""
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=LAST_WORDS_S_MAX)
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._listening = None

    async def _listen(self, read_fd: int, log: LogFile) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(read_fd, "rb", 0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._alerts.new_process()
        rest = b""
        try:
            while chunk := await reader.read(READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > LINE_BYTES_MAX:
                    lines.append(rest)
                    rest = b""
                for line in lines:
                    self._hear(line, log)
            if rest:
                self._hear(rest, log)
        finally:
            transport.close()

    def _hear(self, line: bytes, log: LogFile) -> None:
        log.write(line + b"\n")
        text = line.decode(errors="replace").rstrip()
        if text:
            self.last_line = text
        # Redis calls advice about the machine a warning at every start: its log has it.
        if self.program.name == "redis":
            return
        if (shown := self._alerts.shown(text, asyncio.get_running_loop().time())) is not None:
            self._say(f"{self.program.name}: {shown}")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
