"""What the processes of a group take together is found: memory that no limit of one process sees, and their number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.services.sandbox import group_watch
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch

MIB = 1 << 20
SHARED = """
memory = mmap.mmap(-1, 96 << 20)  # shared, which RLIMIT_DATA does not count
memory.write(bytes(96 << 20))
"""
CHILDREN = """
for _ in range(4):
    if not os.fork():
        held = bytearray(os.urandom(24 << 20))
        os.write(1, b"x")
        time.sleep(1e6)
"""


@contextmanager
def group(code: str, marks: int) -> Iterator[int]:
    """Run a leader of a group until it, and what it started, have written `marks` bytes; yield its number."""
    program = f"import mmap, os, sys, time\n{code}\nos.write(1, b'x')\ntime.sleep(1e6)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        try:
            assert process.stdout.read(marks) == b"x" * marks
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def measured(leader: int, folder: Path, memory_bytes: int, *, alone: bool = False) -> str:
    """Measure twice, as memory needs it."""
    watch = GroupWatch(leader, FolderWatch(folder, MIB, included=""), memory_bytes, alone=alone)
    assert "memory" not in watch.measure(), "between fork and exec memory counts twice"
    return watch.measure()


def test_shared_memory_counts(tmp_path: Path) -> None:
    with group(SHARED, 1) as leader:
        assert measured(leader, tmp_path, 200 * MIB, alone=True) == ""
        said = measured(leader, tmp_path, 90 * MIB, alone=True)
    assert said == "its processes use more than 90 MiB of memory together"


def test_processes_count_together_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with group(CHILDREN, 5) as leader:
        assert measured(leader, tmp_path, 400 * MIB) == ""
        assert "of memory together" in measured(leader, tmp_path, 90 * MIB)
        assert "of memory together" in measured(leader, tmp_path, 90 * MIB, alone=True), "it has children nevertheless"
        monkeypatch.setattr(group_watch, "PROCESSES_MAX", 4)
        assert measured(leader, tmp_path, 400 * MIB) == "it started more than 4 processes"


def test_files_of_the_folder_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * MIB))
    assert measured(os.getpid(), tmp_path, 1 << 50, alone=True) == "its files take more than 1 MiB"


def test_a_group_that_is_gone_exceeds_nothing(tmp_path: Path) -> None:
    with group("", 1) as leader:
        pass
    assert measured(leader, tmp_path, MIB) == ""
