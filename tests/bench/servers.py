"""Starts the servers that are measured, each in its own processes, and stops them.

command ─> a line `ready http://HOST:PORT` on its output ─> Server ─> SIGTERM
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
START_S_MAX = 600.0  # with 1,000 models on a busy machine
STOP_S_MAX = 40.0
_KEY = "bench"
#: headers of calls that administer a server
ADMIN = {"Authorization": f"Bearer {_KEY}"}


class StartError(Exception):
    """A server did not start; the message is one line."""


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the pid of the process that all others descend from.

    `grpc` is HOST:PORT, or "".
    """

    url: str
    pid: int
    grpc: str = ""


def _watch(output: IO[str], ready: queue.SimpleQueue[str]) -> None:
    """Put the addresses of the ready line (HTTP, gRPC) into `ready`, or the last line if there is none.

    Then read on, so that no write of the server blocks.
    """
    last, grpc = "it said nothing", ""
    for line in output:
        last = line.strip() or last
        if line.startswith("grpc "):
            grpc = line.split()[1]
        if line.startswith("ready http"):
            ready.put(f"{line.split()[1]} {grpc}")
    ready.put(last)


@contextmanager
def _running(
    arguments: Sequence[str],
    log: Path,
    python: str = sys.executable,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run `python ARGUMENTS` until the block ends, with its log in `log`; yields the server. Raises StartError.

    `environment` is added to that of this process.
    """
    ready: queue.SimpleQueue[str] = queue.SimpleQueue()
    command = [python, *arguments]
    variables = {**os.environ, "MILLSTREAM_ADMIN_KEY": _KEY, **(environment or {})}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables) as process,
    ):
        try:
            assert process.stdout is not None
            threading.Thread(target=_watch, args=(process.stdout, ready), daemon=True).start()
            said = ready.get(timeout=START_S_MAX)
            if not said.startswith("http"):
                tail = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise StartError(f"{' '.join(arguments[:3])} did not start: {(tail or [said])[0]}")
            url, _, grpc = said.partition(" ")
            yield Server(url, process.pid, grpc)
        except queue.Empty:
            raise StartError(f"{' '.join(arguments[:3])} was not ready after {START_S_MAX:.0f} s") from None
        finally:
            process.terminate()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def ceiling(folder: Path) -> Iterator[Server]:
    """Run the ceiling C: a bare uvicorn that reads each body and answers `{}`."""
    with _running(["-m", "tests.bench.ceiling"], folder / "ceiling.log") as server:
        yield server


@contextmanager
def grpc_ceiling(folder: Path) -> Iterator[Server]:
    """Run the ceiling G: a bare grpc.aio server that echoes the bytes of a request's tensor."""
    with _running(["-m", "tests.bench.grpc_echo"], folder / "grpc_ceiling.log") as server:
        yield Server(server.url, server.pid, server.url.removeprefix("http://"))


@contextmanager
def millstream(
    folder: Path,
    name: str,
    models: Mapping[str, Path],
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run Millstream with one gateway and one worker of one thread, serving `models`."""
    preload = [word for model, path in models.items() for word in ("--preload", f"{model}={path}")]
    with millstream_up(folder, name, [*preload, *arguments], environment=environment) as server:
        yield server


@contextmanager
def millstream_up(
    folder: Path,
    name: str,
    arguments: Sequence[str],
    *,
    workers: int = 1,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run `millstream up` with one gateway, workers of one thread and further `arguments`.

    `root` is the checkout that runs; another one than this has its Python in `.venv`.
    """
    python = sys.executable if root == ROOT else str(root / ".venv" / "bin" / "python")
    home = str(folder / name)
    command = ["-m", "millstream.services.cli", "up", "--home", home, "--http-port", "0", "--grpc-port", "0"]
    command += ["--gateways", "1", "--pool", f"cpu={workers},threads=1", "--no-example", *arguments]
    with _running(command, folder / f"{name}.log", python, root, environment) as server:
        yield server
