"""Has checkers forked by a fork server, which it starts when the first check comes.

task ─> fork server (services/ingest/fork_server.py) ─> checker process ─> Ended (report, errors, exit status)
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from millstream.services.ingest.fork_server import REQUEST, UNFORKABLE_EXIT, kill_group
from millstream.services.process.cancellation import cancel_all, uninterrupted
from millstream.services.sandbox.child import ERRORS_BYTES_KEPT, REPORT_BYTES_MAX, Ended, WatchOf
from millstream.services.sandbox.group_watch import GroupWatch

#: The fork server, which takes about 45 MiB, ends after this time without a check: uploads come in bursts.
IDLE_S_MAX = 15.0
#: For a check to begin, the start of the server included. One that is stopped would take the time of the check.
BEGIN_S_MAX = 20.0
#: A fork server that does not confirm the end of a check within this time is killed; the next check starts another.
CONFIRM_S_MAX = 5.0
#: Longest wait for the fork server to end when its process ends.
CLOSE_S_MAX = 5.0
_MODULE = "millstream.services.ingest.fork_server"
_MESSAGE_BYTES_MAX = 256
_CHUNK_BYTES = 1 << 16
_PID, _STATUS, _ERROR = b"pid ", b"status ", b"error "
#: bytes of the fork server's command line, which checkers overwrite with the folder that they check
_TITLE_BYTES = 512


class Program(NamedTuple):
    """What a fork server forks.

    Args:
        module: its `main`, called with a function that sets the title, is a checker.
        rehearsal: MODULE:FUNCTION that the server calls first, so that checkers find done what each would do.
        idle_s_max: the server ends after this time without a check; the next check starts it again.
        begin_s_max: for a check to begin, the start of the server included.
    """

    module: str
    rehearsal: str
    idle_s_max: float = IDLE_S_MAX
    begin_s_max: float = BEGIN_S_MAX


class Forker:
    """Starts a fork server, and has it fork checkers.

    Args:
        folder: the working folder of the server and its checkers.
        environment: their environment.
        program: what it forks.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], program: Program) -> None:
        self._folder = folder
        self._environment = environment
        self._program = program
        self._server: _Server | None = None
        self._starting = threading.Lock()
        self._unforkable = False

    @property
    def pid(self) -> int | None:
        """The pid of the fork server; None if none runs."""
        return self._server.process.pid if self._server is not None and self._server.runs() else None

    async def run(self, task: bytes, watch_of: WatchOf) -> Ended | None:
        """Run a checker on `task` (a document as JSON), within its watch's limits, and return its end.

        Returns None if no checker ran, or if the fork server ended before the checker did. The checker has ended on
        return, error and cancellation. Raises OSError if there are too many processes or open files.
        """
        server = self._running_server()
        if server is None:
            return None
        check = _ForkedCheck(server, task, self._program.begin_s_max)
        try:
            return await check.run(watch_of)
        finally:
            await uninterrupted(check.end())

    def close(self) -> None:
        """End the fork server and its checkers. Blocks until it has ended."""
        with self._starting:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _running_server(self) -> _Server | None:
        """Return the server, started if need be; None once one has found that it cannot be forked."""
        with self._starting:
            if self._server is None or not self._server.runs():
                if self._server is not None:
                    self._server.control.close()
                    self._unforkable = self._unforkable or self._server.process.returncode == UNFORKABLE_EXIT
                if self._unforkable:
                    self._server = None
                    return None
                self._server = _Server(self._folder, self._environment, self._program)
            return self._server


class _Server:
    """A fork server process. A thread reaps it, since it ends by itself when it idles."""

    def __init__(self, folder: Path, environment: Mapping[str, str], program: Program) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", _MODULE, str(theirs.fileno()), str(program.idle_s_max)),
                    *(program.module, program.rehearsal, " " * _TITLE_BYTES),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._reaper = threading.Thread(target=self.process.wait, name="reaper of the fork server", daemon=True)
        self._reaper.start()

    def runs(self) -> bool:
        """Return whether the server runs and accepts checks, as far as is known."""
        return self.process.returncode is None and not select.select([self.control], [], [], 0)[0]

    def close(self) -> None:
        self.control.close()
        self._reaper.join(CLOSE_S_MAX)
        self.kill()
        self._reaper.join(CLOSE_S_MAX)

    def kill(self) -> None:
        self.process.kill()  # does nothing if it was reaped


class _ForkedCheck:
    """One check: this process's ends of its pipes and of its status socket."""

    def __init__(self, server: _Server, task: bytes, begin_s_max: float) -> None:
        self._server = server
        self._begin_s_max = begin_s_max
        self._pid = 0
        self._pidfd: int | None = None
        self._ended = False
        with ExitStack() as ours, ExitStack() as theirs:
            self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._status.setblocking(False)
            ours.enter_context(self._status)
            theirs.enter_context(status)
            self._report, report = _pipe(ours, theirs)
            self._errors, errors = _pipe(ours, theirs)
            self._sent = _send(server.control, [_memory_file(task, theirs), report, errors, status.fileno()])
            self._close = ours.pop_all().close

    async def run(self, watch_of: WatchOf) -> Ended | None:
        """Return the end of the checker; None if the server ended first, or did not start the checker."""
        if not self._sent or not await self._started():
            return None
        report, errors = bytearray(), bytearray()

        def keep_report(chunk: bytes) -> None:
            report.extend(chunk[: REPORT_BYTES_MAX - len(report)])

        def keep_errors(chunk: bytes) -> None:
            errors.extend(chunk)
            del errors[:-ERRORS_BYTES_KEPT]

        async with watched(watch_of(self._pid), lambda: kill_group(self._pid)) as watching:
            _, _, status = await asyncio.gather(
                _drain(self._report, keep_report), _drain(self._errors, keep_errors), self._receive()
            )
        if not status.startswith(_STATUS):
            return None
        self._ended = True
        return Ended(bytes(report), bytes(errors), int(status.removeprefix(_STATUS)), watching.exceeded)

    async def _started(self) -> bool:
        try:
            async with asyncio.timeout(self._begin_s_max):
                message = await self._receive()
        except TimeoutError:
            return False
        if message.startswith(_ERROR):
            number = int(message.removeprefix(_ERROR))
            raise OSError(number, os.strerror(number))
        if not message.startswith(_PID):
            return False
        self._pid = int(message.removeprefix(_PID))
        try:
            self._pidfd = os.pidfd_open(self._pid)
        except ProcessLookupError:  # the server has ended, and the checker with it
            return False
        return True

    async def _receive(self) -> bytes:
        """Return the server's next message; b"" when it has closed the socket or has ended."""
        with suppress(ConnectionError):
            return await asyncio.get_running_loop().sock_recv(self._status, _MESSAGE_BYTES_MAX)
        return b""

    async def end(self) -> None:
        """Kill the checker if it runs, and wait until it is gone."""
        try:
            if self._sent:
                await self._let_go()
            if self._pidfd is not None and not self._ended:
                await self._kill(self._pidfd)
        finally:
            if self._pidfd is not None:
                os.close(self._pidfd)
            self._close()

    async def _let_go(self) -> None:
        with suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)  # the server kills the checker if it runs, and reaps it
        try:
            async with asyncio.timeout(CONFIRM_S_MAX):
                while message := await self._receive():
                    self._ended = self._ended or message.startswith(_STATUS)
        except TimeoutError:
            self._server.kill()

    async def _kill(self, pidfd: int) -> None:
        """Kill a checker whose server has ended, and wait: the kernel kills it, too, but perhaps after this."""
        if not select.select([pidfd], [], [], 0)[0]:
            kill_group(self._pid)
        await _drain(pidfd, None)


async def _drain(descriptor: int, keep: Callable[[bytes], None] | None) -> None:
    """Pass on what can be read until the end of the file. `keep` None: only wait until the descriptor is readable.

    Not `connect_read_pipe`: event loops differ in when their transports close the descriptor.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        with suppress(BlockingIOError):
            chunk = os.read(descriptor, _CHUNK_BYTES) if keep is not None else b""
            if chunk and keep is not None:
                keep(chunk)
                return
            loop.remove_reader(descriptor)
            ended.set()

    loop.add_reader(descriptor, read)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


class Watching:
    """Which limit a process was ended for; empty: none."""

    exceeded = ""


@asynccontextmanager
async def watched(watch: GroupWatch, kill: Callable[[], None]) -> AsyncIterator[Watching]:
    """Call `kill` when the limits of `watch` are exceeded within the block."""
    watching = Watching()

    async def follow() -> None:
        watching.exceeded = await watch.until_exceeded()
        kill()

    following = asyncio.create_task(follow(), name="watch of a confined process")
    try:
        yield watching
    finally:
        await cancel_all([following])


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    """Return the two ends of a pipe; the first does not block."""
    readable, writable = os.pipe()
    ours.callback(os.close, readable)
    theirs.callback(os.close, writable)
    os.set_blocking(readable, False)
    return readable, writable


def _memory_file(content: bytes, closing: ExitStack) -> int:
    """Return a file in memory, to be read from its beginning."""
    descriptor = os.memfd_create("check")
    closing.callback(os.close, descriptor)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _send(control: socket.socket, descriptors: list[int]) -> bool:
    """Send a request; return False if the server has ended. Raises OSError."""
    try:
        socket.send_fds(control, [REQUEST], descriptors)
    except (BrokenPipeError, ConnectionResetError):
        return False
    except BlockingIOError as error:
        raise OSError(errno.EAGAIN, "the fork server does not answer") from error
    return True
