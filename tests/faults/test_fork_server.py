"""Faults around the fork server of the model check: it is killed, stopped or left alone, and models misbehave in it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.ingest import check_process
from millstream.services.ingest.check_process import check, check_in_place
from millstream.services.ingest.forked_check import Forker
from millstream.services.ingest.report import UPLOAD, CheckedModel, CheckTask
from millstream.services.sandbox.child import IMPORT_ROOT, Ended
from millstream.services.settings import Settings
from tests.kit import models
from tests.kit.wait import wait_until

pytestmark = pytest.mark.skipif(not check_process.FORKS, reason="checkers are forked on Linux only")

CHECKS = 40  # enough for a leak of one descriptor or 64 KiB each to show


@pytest.fixture
def forker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forker]:
    """A fork server of this test alone, which `check` uses."""
    forker = Forker(IMPORT_ROOT, check_process._environment(), check_process._PROGRAM)
    monkeypatch.setattr(check_process, "_forker", lambda: forker)
    yield forker
    forker.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model to check in place, `good.onnx`, and one whose check takes hours, `endless.onnx`."""
    models.mlp(tmp_path / "good.onnx")
    models.slow(tmp_path / "endless.onnx", 2_000_000_000)
    return tmp_path


async def check_good(folder: Path) -> CheckedModel:
    return await check_in_place(folder, "good.onnx", None, Settings())


def upload_task(folder: Path, model: str) -> CheckTask:
    staging = folder / "staging"
    staging.mkdir()
    (staging / UPLOAD).write_bytes((folder / model).read_bytes())
    return CheckTask(folder=staging, batching=None, unpacked_bytes_max=1 << 30, memory_bytes_max=8 << 30, cpu_s_max=100)


def checkers_of(server: int | None) -> list[int]:
    """Return the children of the fork server that have read their task: they show it as their command line."""
    if server is None:
        return []
    try:
        found = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
        return [pid for pid in found if b"ingest.checker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:
        return []


async def checker_of(forker: Forker, number: int = 1) -> list[int]:
    while len(found := checkers_of(forker.pid)) < number:
        await asyncio.sleep(0.01)
    return found


def is_gone(pid: int) -> bool:
    try:
        return "(zombie)" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_killed_fork_server_is_started_again(forker: Forker, folder: Path) -> None:
    async def kill_between_checks() -> list[int | None]:
        pids: list[int | None] = []
        for _ in range(3):
            await check_good(folder)
            assert forker.pid
            pids.append(forker.pid)
            os.kill(forker.pid, signal.SIGKILL)
        return pids

    pids = asyncio.run(kill_between_checks())
    assert len(set(pids)) == 3


def test_a_check_whose_fork_server_is_killed_is_repeated(forker: Forker, folder: Path) -> None:
    """The model is endless until the server was killed, and then a good one."""
    served = folder / "served.onnx"
    served.symlink_to("endless.onnx")

    async def kill_during_the_check() -> tuple[CheckedModel, int]:
        running = asyncio.ensure_future(check_in_place(folder, "served.onnx", None, Settings()))
        [checker] = await checker_of(forker)
        served.unlink()
        served.symlink_to("good.onnx")
        assert forker.pid
        os.kill(forker.pid, signal.SIGKILL)
        return await running, checker

    checked, checker = asyncio.run(kill_during_the_check())
    assert checked.signature.batching
    assert is_gone(checker)


def test_an_unpacked_upload_whose_fork_server_is_killed_fails_clearly(forker: Forker, folder: Path) -> None:
    task = upload_task(folder, "endless.onnx")

    async def kill_during_the_check() -> str:
        running = asyncio.ensure_future(check(task, 600))
        await checker_of(forker)
        while (task.folder / UPLOAD).exists():
            await asyncio.sleep(0.01)
        assert forker.pid
        os.kill(forker.pid, signal.SIGKILL)
        with pytest.raises(Failure) as caught:
            await running
        assert caught.value.code is Code.UNAVAILABLE
        return caught.value.message

    assert "send the model again" in asyncio.run(kill_during_the_check())


def test_a_stopped_fork_server_is_replaced(forker: Forker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.services.ingest.forked_check.CONFIRM_S_MAX", 0.1)

    async def stop_the_server() -> tuple[int | None, int | None]:
        await check_good(folder)
        stopped = forker.pid
        assert stopped
        os.kill(stopped, signal.SIGSTOP)
        monkeypatch.setattr(forker, "_program", check_process._PROGRAM._replace(begin_s_max=0.1))
        await check_good(folder)  # repeated: by the next server, or by a process of its own
        wait_until(lambda: is_gone(stopped), what="the stopped server is gone")
        monkeypatch.undo()  # the next one may be slow on a busy machine
        monkeypatch.setattr(check_process, "_forker", lambda: forker)
        await check_good(folder)
        return stopped, forker.pid

    stopped, now = asyncio.run(stop_the_server())
    assert stopped != now


def test_checks_leave_nothing_in_the_fork_server(forker: Forker, folder: Path) -> None:
    """Models that pass, crash and fail; then the server has the same descriptors, no children and no more memory."""
    models.crashes_on_zeros(folder / "crashes.onnx")
    (folder / "broken.onnx").write_bytes(b"\x08\x08 no model")

    async def check_all() -> None:
        for name in ("good.onnx", "crashes.onnx", "broken.onnx"):
            try:
                await check_in_place(folder, name, None, Settings())
            except Failure as failure:
                assert failure.code is Code.INVALID

    def state() -> tuple[int, int, str]:
        server = forker.pid
        [descriptors] = [len(list(Path(f"/proc/{server}/fd").iterdir()))]
        children = Path(f"/proc/{server}/task/{server}/children").read_text()
        pages = int(Path(f"/proc/{server}/statm").read_text().split()[5])
        return descriptors, pages, children

    async def many() -> None:
        await check_all()
        wait_until(lambda: state()[2] == "", what="the checkers are gone")
        descriptors, pages, _ = state()
        own = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(CHECKS // 3):
            await check_all()
        # The server closes what was of the last check after its end is known.
        wait_until(lambda: (state()[0] <= descriptors, state()[2]) == (True, ""), what="nothing is left of a check")
        assert state()[1] - pages < 256  # pages: 1 MiB
        assert len(list(Path("/proc/self/fd").iterdir())) <= own

    asyncio.run(many())


def test_a_forked_checker_is_isolated(forker: Forker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the state of two checkers that run at once: neither has anything of the other, nor of this process."""
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "secret")
    inheritable = os.pipe()
    for descriptor in inheritable:
        os.set_inheritable(descriptor, True)

    async def look() -> list[dict[str, str]]:
        running = [asyncio.ensure_future(check_in_place(folder, "endless.onnx", None, Settings())) for _ in "ab"]
        states: list[dict[str, str]] = []
        for pid in await checker_of(forker, 2):
            while (state := _state(pid)).get("Seccomp") not in {"2", None}:
                await asyncio.sleep(0.01)
            states.append(state)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for state in states:
            wait_until(partial(is_gone, int(state["Pid"])), what="the checker is gone")
        return states

    states = asyncio.run(look())
    # Without the model, which both read for a moment.
    open_files = [{file for file in state["open"].split() if not file.startswith(f"{folder}/")} for state in states]
    assert not open_files[0] & open_files[1]
    for state, files in zip(states, open_files, strict=True):
        assert len(files) == 3, files  # task, report and errors
        assert state["session"] == state["Pid"]
        assert state["NoNewPrivs"] == "1"
        assert int(state["CapEff"], 16) & ~0b110 == 0
        assert state["oom"] == "1000"
        assert int(state["nice"]) == min(19, os.nice(0) + 10)
        assert f"{folder}" in state["command"]
        assert "secret" not in state["environment"]
    for descriptor in inheritable:
        os.close(descriptor)


def _target(descriptor: Path) -> str:
    """Return what a descriptor refers to; files in memory have the same name."""
    link = descriptor.readlink()
    return f"{link}:{descriptor.stat().st_ino}".replace(" ", "")


def _open(process: Path) -> set[str]:
    found = set()
    for one in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(_target(one))
    return found


def _state(pid: int) -> dict[str, str]:
    process = Path(f"/proc/{pid}")
    lines = (process / "status").read_text().splitlines()
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)} | {
        "open": " ".join(_open(process)),
        "session": fields[3],
        "nice": fields[16],
        "oom": (process / "oom_score_adj").read_text().strip(),
        "command": (process / "cmdline").read_bytes().decode(),
        "environment": (process / "environ").read_bytes().decode(),
    }


def test_a_fork_server_that_idles_ends_and_is_started_again(folder: Path) -> None:
    forker = Forker(IMPORT_ROOT, check_process._environment(), check_process._PROGRAM._replace(idle_s_max=1.0))
    task = CheckTask(
        folder=folder,
        batching=None,
        unpacked_bytes_max=1 << 30,
        memory_bytes_max=8 << 30,
        cpu_s_max=100,
        served="good.onnx",
    )
    document, watch_of = task.model_dump_json().encode(), partial(check_process._watch, task)

    async def run_until_done() -> Ended:
        while (ended := await forker.run(document, watch_of)) is None:  # it ended just before the request
            pass
        return ended

    for _ in range(3):
        assert asyncio.run(run_until_done()).status == 0
        wait_until(lambda: forker.pid is None, what="the idle fork server has ended")
    forker.close()


def test_libraries_that_start_threads_are_not_forked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check then runs in a process of its own."""
    (tmp_path / "site").mkdir()
    program = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(program)
    environment = {**check_process._environment(), "PYTHONPATH": str(tmp_path / "site")}
    forker = Forker(IMPORT_ROOT, environment, check_process._PROGRAM)
    monkeypatch.setattr(check_process, "_forker", lambda: forker)
    assert asyncio.run(check_good(folder)).signature.batching
    assert forker.pid is None
    forker.close()


PROGRAM = """
import asyncio, sys
from pathlib import Path
from millstream.services.ingest import check_process
from millstream.services.settings import Settings

async def main():
    running = asyncio.ensure_future(
        check_process.check_in_place(Path(sys.argv[1]), "endless.onnx", None, Settings()))
    while check_process._forker().pid is None:
        await asyncio.sleep(0.01)
    print(check_process._forker().pid, flush=True)
    await running

asyncio.run(main())
"""


def test_a_killed_gateway_takes_the_fork_server_and_its_checkers_with_it(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)], cwd=IMPORT_ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        server = int(process.stdout.readline())
        wait_until(lambda: checkers_of(server), what="the checker runs")
        [checker] = checkers_of(server)
        process.kill()
    for pid in (server, checker):
        wait_until(lambda pid=pid: is_gone(pid), what=f"{pid} is gone")  # type: ignore[misc]
