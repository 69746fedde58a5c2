"""Runs a module in a process of its own that reads untrusted files, and always ends that process.

task (standard input) ─> python -m MODULE FOLDER PARENT (own session) ─> Ended: report (standard output), errors, status
The module asks the kernel to kill it with its parent, and ends at once if that is gone already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from millstream.services.environment import library_environment
from millstream.services.ingest.forked_check import Ended, WatchOf, watched
from millstream.services.ingest.report import ERRORS_BYTES_KEPT, MESSAGE_CHARACTERS_MAX, REPORT_BYTES_MAX, one_line
from millstream.services.process.uninterruptible import uninterrupted

IMPORT_ROOT = Path(__file__).parents[3]


async def run_process(
    module: str, folder: Path, task: bytes, environment: Mapping[str, str], watch_of: WatchOf
) -> Ended:
    """Run `module` on `task`; its process group has ended on return, error and cancellation.

    Its command line has the `folder` of the files that it reads, so that `ps` shows it. It is killed if it exceeds the
    limits of its watch. Raises OSError if the process cannot be started.
    """
    starting = asyncio.ensure_future(_start(module, folder, environment))
    try:
        process = await asyncio.shield(starting)
        async with watched(watch_of(process.pid), partial(_kill, process)) as watching:
            report, errors = await _communicate(process, task)
            status = await process.wait()
        return Ended(report, errors, status, watching.exceeded)
    finally:
        # The start is awaited and never cancelled: event loops differ in whether they then kill the child.
        await uninterrupted(_end(starting))


def confined_environment(**overrides: str) -> dict[str, str]:
    """Return the environment of a check or import; libraries get one thread, since threads reserve memory."""
    few = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return library_environment({**few, **overrides})


def printed(errors: bytes) -> str:
    """Return the end of what a process wrote to its standard error, for the log: on one line, printable, bounded."""
    return one_line(errors.decode(errors="replace")[-MESSAGE_CHARACTERS_MAX:])


async def _start(module: str, folder: Path, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(folder),
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=IMPORT_ROOT,
        env=environment,
        start_new_session=True,
    )


async def _end(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    try:
        process = await starting
    except OSError:  # nothing was started
        return
    if process.returncode is None:
        _kill(process)
        # The rest of its output is read: asyncio says that a process ended once its pipes have.
        assert process.stdout
        assert process.stderr
        await asyncio.gather(_drop(process.stdout), _drop(process.stderr), process.wait())


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _communicate(process: asyncio.subprocess.Process, task: bytes) -> tuple[bytes, bytes]:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdin.write(task)
    process.stdin.close()
    report, errors = await asyncio.gather(_read_beginning(process.stdout), _read_end(process.stderr))
    return report, errors


async def _drop(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


async def _read_beginning(stream: asyncio.StreamReader) -> bytes:
    """Return the beginning of the stream; the rest is read and dropped, so that the writer never blocks."""
    kept = bytearray()
    while chunk := await stream.read(1 << 16):
        kept += chunk[: REPORT_BYTES_MAX - len(kept)]
    return bytes(kept)


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    """Return the end of the stream, at most ERRORS_BYTES_KEPT bytes."""
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-ERRORS_BYTES_KEPT:]
    return kept
