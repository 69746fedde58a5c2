"""A fork server: a process with libraries loaded, which forks checkers, or imports of one framework.

python -m millstream.services.ingest.fork_server FD IDLE_S_MAX MODULE REHEARSAL PADDING
request with 4 descriptors (control socket FD) ─> fork ─> MODULE.main() in the child, with these descriptors alone
status socket of the check: "pid N", then "status N" <─ server;  its end of file: kill the check

Starting a process and importing ONNX, ONNX Runtime and NumPy takes ten times as long as checking a small model, and
importing PyTorch and its exporter three times as long as exporting a small one.

Why forking is safe here. Only the forking thread exists in a child, so that a lock which another thread held would
stay locked for good: the server therefore has one thread, and exits at its start if a library has started another
(`_forkable`). Importing ONNX Runtime starts none: its thread pools belong to sessions, and its telemetry is turned off.
The server itself opens no model but a small one of its own (`inspection.rehearse`), on one thread; it never allocates
on a device, or reads what a model's author wrote.
A child is a new session, has no descriptors but those of its own check, inherits an environment without secrets,
sandboxes itself as a checker that was started by itself does, and is killed when the server ends. What it shares with
the other checks is the address layout of the libraries.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from millstream.services.process.inheritance import close_all_but, die_with_parent
from millstream.services.sandbox.confine import prepare

#: descriptors that come with a request: task, report, errors, status
DESCRIPTORS = 4
REQUEST = b"check"
UNFORKABLE_EXIT = 3
_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat after the command's name, proc_pid_stat(5)


class _Check:
    """A forked checker. `pidfd` becomes readable when it ends; `ended`: its status was sent."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.status = status
        self.ended = False
        self.abandoned = False


class ForkServer:
    """Forks checkers until `control` is closed at its other end, or no check came for `idle_s_max`.

    `module`: whose `main` a checker runs.
    """

    def __init__(self, control: socket.socket, idle_s_max: float, module: ModuleType) -> None:
        self._pid = os.getpid()
        self._control = control
        self._module = module
        self._idle_s_max = idle_s_max
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._by_status: dict[int, _Check] = {}
        self._by_pidfd: dict[int, _Check] = {}

    def serve(self) -> None:
        """Return when the server is to end. Running checks are killed then by the kernel (PR_SET_PDEATHSIG)."""
        while True:
            events = self._poll.poll(None if self._by_status else self._idle_s_max * 1000)
            if not events:
                return
            for descriptor, _ in events:
                if descriptor == self._control.fileno():
                    if not self._accept():
                        return
                elif descriptor in self._by_pidfd:
                    self._report_end(self._by_pidfd[descriptor])
                elif descriptor in self._by_status:
                    self._abandon(self._by_status[descriptor])

    def _accept(self) -> bool:
        """Fork a checker for the next request; return False at the end of the control socket."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, len(REQUEST), DESCRIPTORS)
        except ConnectionResetError:
            return False
        if not message:
            return False
        if len(descriptors) != DESCRIPTORS:  # this process had too many open files: the asker sees an end of file
            for descriptor in descriptors:
                os.close(descriptor)
            return True
        task, report, errors, status_fd = descriptors
        with socket.socket(fileno=status_fd) as status:
            try:
                pid = os.fork()
            except OSError as error:
                with suppress(OSError):
                    status.send(b"error %d" % (error.errno or 0))
            else:
                if not pid:
                    _run_checker(self._module, task, report, errors, self._pid)
                self._add(_Check(pid, status.dup()))
            finally:
                for descriptor in (task, report, errors):
                    os.close(descriptor)
        return True

    def _add(self, check: _Check) -> None:
        self._by_status[check.status.fileno()] = check
        self._by_pidfd[check.pidfd] = check
        self._poll.register(check.status, select.POLLIN)
        self._poll.register(check.pidfd, select.POLLIN)
        with suppress(OSError):
            check.status.send(b"pid %d" % check.pid)

    def _report_end(self, check: _Check) -> None:
        """Send the exit status. The process is reaped when the asker has read it: its pid is valid until then."""
        ended = os.waitid(os.P_PID, check.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with suppress(OSError):
            check.status.send(b"status %d" % status)
        self._poll.unregister(check.pidfd)
        check.ended = True
        if check.abandoned:
            self._forget(check)

    def _abandon(self, check: _Check) -> None:
        """End the check: its asker has closed the socket, or needs it no longer."""
        self._poll.unregister(check.status)
        check.abandoned = True
        if check.ended:
            self._forget(check)
        else:
            kill_group(check.pid)

    def _forget(self, check: _Check) -> None:
        os.waitpid(check.pid, 0)
        del self._by_status[check.status.fileno()], self._by_pidfd[check.pidfd]
        os.close(check.pidfd)
        check.status.close()


def kill_group(pid: int) -> None:
    """Kill a checker that was not reaped, and the processes of its session."""
    for kill in (os.killpg, os.kill):  # it may not have made its session yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _run_checker(module: ModuleType, task: int, report: int, errors: int, server: int) -> NoReturn:
    """Run the checker in this forked child, with the three descriptors as its standard ones and no others."""
    try:
        for standard, descriptor in enumerate((task, report, errors)):
            os.dup2(descriptor, standard)
        close_all_but(0, 1, 2)
        os.setsid()
        die_with_parent(server)
        module.main(set_title)
    except BaseException:  # also SystemExit: the child must not return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(1)


def set_title(*words: str) -> None:
    """Replace this process's command line, as `ps` and /proc show it. Does nothing where its place is unknown."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    size = end - start
    if start and size > 0:
        title = b"\0".join(os.fsencode(word) for word in words)[: size - 1]
        ctypes.memmove(start, title.ljust(size, b"\0"), size)


def _preload(rehearsal: str) -> None:
    """Do once what each check would do: import libraries, find what the sandbox lets it read, and `rehearsal`.

    What is missing or broken is reported by the check that needs it.
    """
    prepare()
    module, _, function = rehearsal.partition(":")
    with suppress(Exception):
        getattr(importlib.import_module(module), function)()


def _forkable() -> bool:
    """Return whether this process has one thread."""
    return len(list(Path("/proc/self/task").iterdir())) == 1


def main() -> None:
    """Serve the control socket. Exits with UNFORKABLE_EXIT if a library has started a thread."""
    control = socket.socket(fileno=int(sys.argv[1]))
    module = importlib.import_module(sys.argv[3])
    set_title(sys.executable, "-m", "millstream.services.ingest.fork_server", sys.argv[4])
    _preload(sys.argv[4])
    if not _forkable():
        sys.exit(UNFORKABLE_EXIT)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all objects
    ForkServer(control, float(sys.argv[2]), module).serve()
    os._exit(0)  # skips destructors of libraries, which take time


if __name__ == "__main__":
    main()
