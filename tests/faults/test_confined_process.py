"""A confined process that writes without an end is ended all the same, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from millstream.services.sandbox.child import Ended, run_confined
from millstream.services.sandbox.group_watch import THREADS_MAX, FolderWatch, GroupWatch
from tests.kit.wait import wait_until

FLOODS = {
    "output": "while True: os.write(1, bytes(65536))",
    "errors": "while True: os.write(2, bytes(65536))",
    "both": "while True: os.write(1, bytes(65536)); os.write(2, bytes(65536))",
    "neither": "time.sleep(1e6)",
}
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_ended_when_its_time_is_over(tmp_path: Path, flood: str, loop: str) -> None:
    begun = tmp_path / "begun"
    code = (
        f"import os, pathlib, sys, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n{FLOODS[flood]}\n"
    )
    (tmp_path / "flood.py").write_text(code)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    async def run() -> None:
        running = asyncio.create_task(
            run_confined("flood", tmp_path, b"", environment, lambda pid: watch(pid, tmp_path))
        )
        await asyncio.to_thread(wait_until, lambda: begun.exists() and begun.read_text(), what="begun")
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())
    assert not Path("/proc", begun.read_text()).exists()


def watch(leader: int, folder: Path) -> GroupWatch:
    return GroupWatch(leader, FolderWatch(folder, 1 << 40), 1 << 40, alone=True)


@pytest.mark.parametrize("module", ["millstream.plugins.convert.import_process", "millstream.services.ingest.checker"])
def test_a_process_whose_parent_is_gone_already_ends_before_it_reads_its_task(tmp_path: Path, module: str) -> None:
    """Its parent may be killed while it starts, before it has asked the kernel to end with it."""
    command = [sys.executable, "-m", module, str(tmp_path), "--parent", str(gone_process())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.wait(240) == 1


def gone_process() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


def test_a_process_that_starts_too_many_threads_is_ended(tmp_path: Path) -> None:
    code = "import sys, threading, time\nthreading.stack_size(32768)\nassert sys.stdin.read() == 'task'\n"
    code += (
        "for _ in range(6000): threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\ntime.sleep(1e6)\n"
    )
    (tmp_path / "threads.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    async def run() -> Ended:
        return await run_confined("threads", tmp_path, b"task", environment, lambda pid: watch(pid, tmp_path))

    ended = asyncio.run(run())
    assert ended.exceeded == f"it started more than {THREADS_MAX} threads"
    assert ended.status == -signal.SIGKILL
