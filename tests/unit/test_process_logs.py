"""Log files of children: bounded in size and number, and harmless on a full disk."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from millstream.services.supervisor.child import Child
from millstream.services.supervisor.log import ALERTS_MAX, ALERTS_S, Alerts, LogFile
from millstream.services.supervisor.plan import Program
from tests.kit.disk import small_disk

CHATTY = """
import signal
for number in range(100_000):
    print("WARNING", number)
print("ERROR last", flush=True)
signal.pause()
"""


def test_a_log_in_a_removed_folder_reports_lost_lines(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    log = LogFile(folder / "x.log", bytes_max=10)
    log.write(b"lost\n")
    folder.mkdir()
    log.write(b"a line that fills it\n")
    assert (folder / "x.log").read_bytes() == b"(1 lines before this one could not be written)\na line that fills it\n"
    shutil.rmtree(folder)
    for _ in range(3):  # the first of them would begin a new file
        log.write(b"lost\n")
    assert log.lost == 3
    folder.mkdir()
    log.write(b"again\n")
    assert (folder / "x.log").read_bytes().splitlines()[1:] == [b"again"]
    log.close()


@pytest.mark.needs("tmpfs")
def test_a_log_on_a_full_disk_resumes_when_there_is_space() -> None:
    with small_disk(1 << 20) as disk:
        path = disk.seen(disk.folder) / "x.log"
        log = LogFile(path, bytes_max=10_000)
        line = b"x" * 99 + b"\n"
        for _ in range(100):
            log.write(line)
        disk.fill()
        for _ in range(200):
            log.write(line)
        lost = log.lost
        assert lost > 0
        disk.empty()
        log.write(b"again\n")
        assert log.lost == 0
        said = b"".join(file.read_bytes() for file in path.parent.iterdir())
        assert b"(%d lines before this one could not be written)\nagain\n" % lost in said
        log.close()
        for file in path.parent.iterdir():
            file.unlink()


async def _nobody(_child: Child, _pid: int) -> bool:
    return False


@pytest.mark.anyio
async def test_a_child_runs_and_its_alerts_are_shown_while_its_log_cannot_be_written(tmp_path: Path) -> None:
    """Its next line would kill it if its pipe had no reader any more."""
    heard: list[str] = []
    child = Child(Program("x", (sys.executable, "-c", CHATTY)), tmp_path / "no folder", heard.append, _nobody)
    child.start()
    async with asyncio.timeout(60):
        while child.last_line != "ERROR last":
            await asyncio.sleep(0.01)
    await child.stop(10)
    assert heard[0] == "x: WARNING 0"
    assert [line for line in heard if "further ones are only in its log" in line]


def test_alerts_on_the_terminal_are_limited() -> None:
    alerts = Alerts()
    shown = [alerts.line_to_show("WARNING", second / 1000) for second in range(1000)]
    assert len([line for line in shown if line is not None]) == ALERTS_MAX
    assert shown[ALERTS_MAX - 1] == f"more than {ALERTS_MAX - 1} warnings within 60 s: further ones are only in its log"
    assert alerts.line_to_show("ERROR", ALERTS_S) == "ERROR"
