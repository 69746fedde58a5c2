"""Has checkers forked by a fork server, which it starts when the first check comes.

task ─> fork server (services/ingest/fork_server.py) ─> checker process ─> Ended (report, errors, exit status)
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from millstream.services.ingest.fork_server import REQUEST, UNFORKABLE_EXIT, kill_group
from millstream.services.sandbox.child import IMPORT_ROOT, Ended, ProcessOutput, WatchOf, in_its_thread
from millstream.services.sandbox.group_watch import WATCH_S

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
_PID, _STATUS, _ERROR = b"pid ", b"status ", b"error "
#: bytes of the fork server's command line, which checkers overwrite with the folder that they check
_TITLE_BYTES = 512


class ForkedProgram(NamedTuple):
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

    def __init__(self, folder: Path, environment: Mapping[str, str], program: ForkedProgram) -> None:
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
        return await in_its_thread(partial(check.run, watch_of), check.let_go)

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


_forkers: dict[ForkedProgram, Forker] = {}


def forker_of(program: ForkedProgram, environment: Callable[[], Mapping[str, str]]) -> Forker:
    """Return what forks a program in this process, made at the first call. Its server ends with the process."""
    if program not in _forkers:
        _forkers[program] = Forker(IMPORT_ROOT, environment(), program)
        atexit.register(_forkers[program].close)
    return _forkers[program]


async def end_fork_servers() -> None:
    """End the processes that checkers and imports are forked from; the next one starts its own again."""
    for forker in list(_forkers.values()):
        await asyncio.to_thread(forker.close)


class _Server:
    """A fork server process. A thread reaps it, since it ends by itself when it idles."""

    def __init__(self, folder: Path, environment: Mapping[str, str], program: ForkedProgram) -> None:
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
        return self.process.returncode is None and not _readable(self.control.fileno(), 0.0)

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
        self._let_go_at = inf  # monotonic
        with ExitStack() as ours, ExitStack() as theirs:
            self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(self._status)
            theirs.enter_context(status)
            self._report, report = _pipe(ours, theirs)
            self._errors, errors = _pipe(ours, theirs)
            self._sent = _send(server.control, [_memory_file(task, theirs), report, errors, status.fileno()])
            self._close = ours.pop_all().close

    def run(self, watch_of: WatchOf) -> Ended | None:
        """Return the end of the checker; None if the server ended first, or did not start the checker. Blocks."""
        try:
            return self._follow(watch_of) if self._sent and self._started() else None
        finally:
            self._end()

    def let_go(self) -> None:
        """Have the server kill the checker if it runs, and reap it. Any thread may call it."""
        self._let_go_at = min(self._let_go_at, time.monotonic())
        with suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)

    def _started(self) -> bool:
        message = self._receive(self._begin_s_max)
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

    def _follow(self, watch_of: WatchOf) -> Ended | None:
        output = ProcessOutput(self._report, self._errors, watch_of(self._pid), partial(kill_group, self._pid))
        with closing(output.selector) as selector:
            selector.register(self._status, selectors.EVENT_READ, partial(selector.unregister, self._status))
            while selector.get_map():
                output.step(inf)
                self._check_server()
        status = self._receive(inf)
        if not status.startswith(_STATUS):
            return None
        self._ended = True
        return Ended(bytes(output.report), bytes(output.errors), int(status.removeprefix(_STATUS)), output.exceeded)

    def _receive(self, seconds_max: float) -> bytes:
        """Return the server's next message; b"" when it has closed the socket, has ended, or takes longer."""
        deadline = time.monotonic() + seconds_max
        while not _readable(self._status.fileno(), WATCH_S):
            self._check_server()
            if time.monotonic() >= deadline:
                return b""
        with suppress(ConnectionError):
            return self._status.recv(_MESSAGE_BYTES_MAX)
        return b""

    def _check_server(self) -> None:
        """Kill the server if it does not confirm the end of the checker."""
        if time.monotonic() >= self._let_go_at + CONFIRM_S_MAX:
            self._server.kill()

    def _end(self) -> None:
        """Kill the checker if it runs, and wait until it is gone."""
        try:
            if self._sent:
                self.let_go()
                while message := self._receive(inf):
                    self._ended = self._ended or message.startswith(_STATUS)
            if self._pidfd is not None and not self._ended:
                # Its server has ended: the kernel kills the checker, too, but perhaps after this.
                if not _readable(self._pidfd, 0.0):
                    kill_group(self._pid)
                _readable(self._pidfd, None)
        finally:
            if self._pidfd is not None:
                os.close(self._pidfd)
            self._close()


def _readable(descriptor: int, seconds_max: float | None) -> bool:
    """Wait until a descriptor is readable; return whether it is. None: without a limit."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds_max is None else seconds_max * 1000))


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    """Return the two ends of a pipe."""
    readable, writable = os.pipe()
    ours.callback(os.close, readable)
    theirs.callback(os.close, writable)
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
