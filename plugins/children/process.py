"""The processes that hold instances, seen from the process that started them.

InstanceProcesses: one thread that starts them all, reads what they print, watches what they take and notices their end
InstanceProcess: load ─> run, run, … ─> close; `ended` says why it can run no longer
The kernel ends a process with the *thread* that started it, so that thread lives as long as this process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import millstream
from millstream.plugins.children.confined import BOOT, MEMORY, MODEL
from millstream.plugins.children.message_channel import (
    STREAM_BYTES_MAX,
    BrokenMessageError,
    Channel,
    ClosedError,
    Message,
    SharedFile,
    TensorData,
)
from millstream.services.process.exit_status import describe_exit
from millstream.services.process.printable import printable
from millstream.services.sandbox.child import confined_environment
from millstream.services.sandbox.group_watch import WATCH_S, FolderWatch, GroupWatch

log = logging.getLogger("millstream.instance")

#: of all files that an instance writes, and of its shared memory
FILES_BYTES_MAX = 8 << 30
#: Bounds what is read of what an instance prints; beyond it waits, as a program does whose reader is slow.
PRINTED_BYTES_S = 256 << 10
LINES_LOGGED_S = 20
LINES_KEPT = 50
_LINE_CHARACTERS_MAX = 500
_CHUNK_BYTES = 16 << 10
#: for a run to end after it was asked to; then its process is killed
TERMINATE_S = 1.0
#: for a process that answers in parts to read a message; then it is ended
SEND_S_MAX = 5.0
_END_S = 5.0  # for a killed process to be gone
_FOLDER_PREFIX = "millstream-instance-"
_F_SEAL_SHRINK, _F_ADD_SEALS = 0x0002, 1033  # fcntl(2); not in `fcntl` on every system


class RunError(Exception):
    """A load or run failed, and the process goes on. `kind`: as in `confined`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class EndedError(Exception):
    """The process has ended, or was ended: it can run no longer. Its text says why."""


class ChildProgram(NamedTuple):
    """What a process runs.

    Args:
        name: of what it holds, for log lines.
        module: that is run, of this package.
        task: for its `Load`: JSON.
        reads: files and folders that it may read, besides its libraries.
        memory_bytes_max: that the process may take.
        python: the interpreter of its environment.
        variables: of its environment, besides what libraries need.
        unconfined: run it also where nothing confines it.
        network: it may connect to other machines.
    """

    name: str
    module: str
    task: Mapping[str, Any]
    reads: Sequence[Path]
    memory_bytes_max: int
    python: str
    variables: Mapping[str, str] = {}
    unconfined: bool = False
    network: bool = False


class InstanceProcess:
    """A process with one instance. One thread uses it at a time; any may `interrupt` and `kill` it.

    Attributes:
        ended: why it can run no longer; empty: it can.
        streams: whether it answers in parts.
        closed: whether nothing is held for it any longer.
        lines: the last lines that it printed.
    """

    def __init__(self, program: ChildProgram) -> None:
        self.ended = ""
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-"))
        ours, theirs = socket.socketpair()
        segments = [_segment("inputs"), _segment("outputs")]
        handed = [theirs.fileno(), segments[0], segments[1]]
        self._ours = ours
        self._sent, self._received = (SharedFile(descriptor) for descriptor in segments)
        self._channel = Channel(ours.fileno(), self._sent, self._received)
        self._numbers = 0  # of runs
        self._running = False
        self._terminated_at = 0.0  # monotonic; of the last run; 0: it was not to end
        self._killing = threading.Lock()
        self.streams = False  # whether it answers in parts
        self.closed = False
        self.gone = threading.Event()
        try:
            self._process = subprocess.Popen(
                [
                    program.python, "-P", "-c", BOOT, str(Path(millstream.__file__).parent), program.module,
                    ",".join(map(str, handed)), "--parent", str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._environment(),
                start_new_session=True,
                pass_fds=handed,
                bufsize=0,
            )  # fmt: skip
        except BaseException:
            self._release()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.watch = GroupWatch(
            self.pid, FolderWatch(self._folder, FILES_BYTES_MAX, ""), program.memory_bytes_max, alone=True
        )

    def load(self) -> dict[str, Any]:
        """Load, and return what the process says of what it holds.

        Raises RunError, which ends it; EndedError.
        """
        program = self._program
        task = {
            **program.task,
            "memory_bytes": program.memory_bytes_max,
            "reads": [str(path) for path in program.reads],
            "writes": [str(self._folder)],
            "unconfined": program.unconfined,
            "network": program.network,
        }
        header = self._exchange({"load": task}, ()).header
        if "ready" not in header:
            error = _error(header)
            self.kill(str(error))
            raise error
        return dict(header["ready"])

    def run(self, tensors: Sequence[TensorData], begin: int = 0, **header: Any) -> Message:
        """Run, and return the answer, whose tensors are valid until a later run writes there.

        Args:
            tensors: the inputs.
            begin: where in the shared memory its larger tensors may begin.
            header: what else the process is told.

        Raises RunError, EndedError.
        """
        if self.ended:
            raise EndedError(self.ended)
        self._numbers += 1
        self._terminated_at, self._running = 0.0, True
        try:
            message = self._exchange({**header, "run": self._numbers, "begin": begin}, tensors)
        finally:
            self._running = False
        if message.header.get("run") != self._numbers:
            self.kill("it answered something that it was not asked")
            raise EndedError(self.ended)
        if "error" in message.header:
            raise _error(message.header)
        return message

    def _exchange(self, header: dict[str, Any], tensors: Sequence[TensorData]) -> Message:
        try:
            self._channel.send(header, tensors)
            return self._channel.receive()
        except BrokenMessageError as error:
            self.kill(f"it broke its connection: {error}")
        except ClosedError:
            # The thread that watches notices its end; a process that only closed its descriptors is ended.
            raise EndedError(self.await_end()) from None
        except OSError as error:
            raise RunError(MEMORY, f"there is no shared memory for its inputs: {error.strerror}") from error
        self.gone.wait(_END_S)
        raise EndedError(self.ended or "it was ended")

    def begin_streams(self) -> None:
        """Have messages bear their tensors: several requests run at once, by `send` and `receive`."""
        self.streams = True
        self._channel.inline_bytes_max = STREAM_BYTES_MAX
        limit = struct.pack("ll", int(SEND_S_MAX), 0)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, header: dict[str, Any], tensors: Sequence[TensorData]) -> None:
        """Send a message. Raises ClosedError: the process has ended, or does not read."""
        self._channel.send(header, tensors)

    def receive(self) -> Message:
        """Return the next message. Raises ClosedError, BrokenMessageError."""
        return self._channel.receive()

    def first_part(self, tensors: Sequence[TensorData]) -> Sequence[TensorData]:
        """Return the first part of an answer; nobody else uses the process. Raises RunError, EndedError."""
        found: Sequence[TensorData] | None = None
        try:
            self.send({"stream": 1, "window": 1}, tensors)
            while "end" not in (message := self.receive()).header:
                found = found or message.tensors
                self.send({"cancel": 1}, ())
        except BrokenMessageError as error:
            self.kill(f"it broke its connection: {error}")
            raise EndedError(self.ended) from error
        except (ClosedError, OSError) as error:
            raise EndedError(self.await_end()) from error
        if found is None:
            raise RunError(*message.header.get("error", (MODEL, "its answer has no part")))
        return found

    def await_end(self) -> str:
        """Wait until the process has ended, which closed its connection; return why it did."""
        if not self.gone.wait(TERMINATE_S):
            self.kill("it closed its connection")
        self.gone.wait(_END_S)
        return self.ended or "it was ended"

    def interrupt(self) -> None:
        """Ask the run in progress to end; the process is killed if it goes on for TERMINATE_S."""
        if self._running:
            self._terminated_at = self._terminated_at or time.monotonic()
            self._signal(signal.SIGINT)

    @property
    def terminated(self) -> bool:
        """Whether the last run was asked to end."""
        return self._terminated_at > 0

    def look(self, now: float) -> None:
        """Kill the process if it takes more than it may, or did not end a run. Called by the thread that watches."""
        if self._running and self._terminated_at and now > self._terminated_at + TERMINATE_S:
            self.kill("its run did not end when it was asked to")
        elif self.watch.due and (exceeded := self.watch.measure()):
            self.kill(f"it was ended: {exceeded}")

    def kill(self, why: str) -> None:
        """End the process and what it started."""
        self.ended = self.ended or why
        self._signal(signal.SIGKILL)

    def settle(self) -> None:
        """Note how the process ended. Called by the thread that watches, when it has."""
        self._signal(signal.SIGKILL)  # what it started
        status = self._process.wait()
        last = f"; it printed last: {self.lines[-1]}" if self.lines else ""
        self.ended = self.ended or f"its process {describe_exit(status)}{last}"
        if self._process.stdout is not None:
            self._process.stdout.close()
        with self._killing:  # else its number might be another's when it is signalled
            self.gone.set()

    def close(self, wait_s: float = 0.0) -> None:
        """End the process and free all that is held for it. `wait_s`: for it to end by itself first."""
        if wait_s and not self.ended:
            with suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)
            self.gone.wait(wait_s)
        self.kill("it was unloaded")
        self.gone.wait(_END_S)
        with self._killing:
            if self.closed:
                return
            self.closed = True
        self._release()

    def _release(self) -> None:
        self._ours.close()
        self._sent.close()
        self._received.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        with self._killing, suppress(ProcessLookupError, PermissionError):
            if not self.gone.is_set():
                os.killpg(self.pid, number)

    def _environment(self) -> dict[str, str]:
        folder = str(self._folder)
        own = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"), folder)
        return confined_environment(**own, PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1", **self._program.variables)

    def printed(self, chunk: bytes) -> list[str]:
        """Note what it printed, and return the whole lines."""
        lines = [printable(line)[:_LINE_CHARACTERS_MAX] for line in chunk.decode(errors="replace").splitlines() if line]
        self.lines.extend(lines)
        return lines

    @property
    def name(self) -> str:
        return self._program.name


def _error(header: Mapping[str, Any]) -> RunError:
    try:
        kind, text = header["error"]
        return RunError(str(kind), printable(str(text)))
    except (KeyError, TypeError, ValueError):
        return RunError("model", "its answer cannot be read")


def _segment(name: str) -> int:
    descriptor = os.memfd_create(f"millstream-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK)
    return descriptor


class _Reading:
    """What was read of the output of one process in the present second, and logged of it."""

    def __init__(self, child: InstanceProcess) -> None:
        self.child = child
        self.bytes_left, self.lines_left, self.unlogged = PRINTED_BYTES_S, LINES_LOGGED_S, 0
        self.is_open = True

    def renew(self) -> None:
        if self.unlogged:
            log.info("%s: %d more lines were not logged", self.child.name, self.unlogged)
        self.bytes_left, self.lines_left, self.unlogged = PRINTED_BYTES_S, LINES_LOGGED_S, 0

    def read(self) -> None:
        try:
            chunk = os.read(self.child.output, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self.is_open = bool(chunk)
        self.bytes_left -= len(chunk)
        for line in self.child.printed(chunk):
            if self.lines_left > 0:
                log.info("%s: %s", self.child.name, line)
            self.lines_left -= 1
        self.unlogged, self.lines_left = self.unlogged + max(0, -self.lines_left), max(0, self.lines_left)


class InstanceProcesses:
    """Starts processes and watches them, in one thread that ends with this process, or at `close`."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._woken, self._waking = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._watched: dict[int, _Reading] = {}  # by descriptor of the process
        self._started: list[InstanceProcess] = []  # without those that were closed before the last one was started
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="instances", daemon=True)
        self._thread.start()

    def start(self, program: ChildProgram) -> InstanceProcess:
        """Start a process. Raises OSError if that is not possible."""
        started: Future[InstanceProcess] = Future()
        self._do(partial(self._start, program, started))
        return started.result()

    def close(self) -> None:
        """End all processes and the thread."""
        for child in self._started:
            child.close()
        self._closing = True
        self._do(lambda: None)
        self._thread.join()
        self._selector.close()
        os.close(self._woken)
        os.close(self._waking)

    def _do(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        os.write(self._waking, b".")

    def _start(self, program: ChildProgram, started: Future[InstanceProcess]) -> None:
        try:
            child = InstanceProcess(program)
            descriptor = os.pidfd_open(child.pid)
        except BaseException as error:
            started.set_exception(error)
            return
        self._started = [*(one for one in self._started if not one.closed), child]
        self._watched[descriptor] = reading = _Reading(child)
        self._selector.register(descriptor, selectors.EVENT_READ, descriptor)
        self._selector.register(child.output, selectors.EVENT_READ, reading)
        started.set_result(child)

    def _watch(self) -> None:
        renewed = time.monotonic()
        while not self._closing:
            events = self._selector.select(WATCH_S if self._watched else None)
            for key, _ in events:
                if key.data is None:
                    os.read(self._woken, 1)
                    self._work.get()()
                elif isinstance(key.data, _Reading):
                    self._read(key.data)
                else:
                    self._forget(key.data)
            now = time.monotonic()
            for reading in self._watched.values():
                reading.child.look(now)
            if now > renewed + 1.0:
                renewed = now
                for reading in self._watched.values():
                    reading.renew()
                    self._listen(reading)

    def _read(self, reading: _Reading) -> None:
        if reading.child.gone.is_set():  # noticed by an event before this one, which closed its output
            return
        reading.read()
        if not reading.is_open or reading.bytes_left <= 0:
            self._selector.unregister(reading.child.output)

    def _listen(self, reading: _Reading) -> None:
        if reading.is_open and reading.child.output not in self._selector.get_map():
            self._selector.register(reading.child.output, selectors.EVENT_READ, reading)

    def _forget(self, descriptor: int) -> None:
        """Note the end of a process, and read what it printed last."""
        reading = self._watched.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if reading.child.output in self._selector.get_map():
            reading.read()
            self._selector.unregister(reading.child.output)
        reading.child.settle()
