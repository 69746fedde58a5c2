"""Runs Python modules as commands, in forks of a process that has imported the libraries they use.

subprocess.run([python, "-m", MODULE, …]) would import the libraries anew: most of the time of a short command, and
tests run hundreds of them. The command itself is imported in the fork, with its own environment, folder and files.

run(MODULE, arguments) ─> a socket and the files, then one line of JSON ─> fork ─> the module as __main__ ─> status

What an interpreter does at its start is tested by commands in processes of their own: `Millstream.up` and the tests
that call Popen start such.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: nothing of ours: the modules of a command read the environment when they are imported
LIBRARIES = (
    *("asyncio", "email.message", "importlib.metadata", "json", "ssl", "urllib.request", "zipfile"),
    *("anyio", "h11", "httpcore2", "httpx2", "numpy", "orjson", "pydantic", "pydantic_settings", "redis", "truststore"),
    *("rich.live", "rich.markdown", "rich.progress", "rich.table", "rich.traceback", "typer"),
)
_FILES = 4  # the caller's socket; standard input, output and error


def run(
    module: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Return what subprocess.run would for `python -m MODULE …` with captured output.

    Raises subprocess.TimeoutExpired, after the command was killed.
    """
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        with theirs:
            files = [theirs.fileno(), given.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(_server(), [b"f"], files)
        ours.settimeout(timeout_s)
        ours.sendall(json.dumps([module, list(arguments), str(cwd), dict(env)]).encode() + b"\n")
        with ours.makefile("r") as lines:
            pid = int(lines.readline())
            try:
                code = int(lines.readline())
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([module, *arguments], timeout_s) from None
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode().replace("\r\n", "\n"))
    return subprocess.CompletedProcess([module, *arguments], code, *said)


_lock = threading.Lock()


def _server() -> socket.socket:
    with _lock:
        return _started()


@functools.cache
def _started() -> socket.socket:
    """Start the server of this process; return the socket for commands, whose close ends it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(ours.close)
    process.returncode = 0  # it ends with this process, and is not waited for
    return ours


def _serve(requests: socket.socket) -> tuple[str, list[str]]:
    """Accept commands. Returns, in a fork for each command, its module and its arguments."""
    while True:
        _, files, _, _ = socket.recv_fds(requests, 1, _FILES)
        if not files:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # its child is waited for
            requests.close()
            with socket.socket(fileno=files[0]) as caller:
                return _run_forked(caller, files[1:])
        for file in files:
            os.close(file)


def _run_forked(caller: socket.socket, files: list[int]) -> tuple[str, list[str]]:
    """Fork the command and wait for it; return in the fork."""
    with caller.makefile("r") as lines:
        module, arguments, folder, environment = json.loads(lines.readline())
    pid = os.fork()
    if pid:
        caller.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            caller.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return module, arguments


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    module, arguments = _serve(requests)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
