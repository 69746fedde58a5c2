"""What a process starts ends with it, also if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.process_groups import members
from tests.kit.wait import wait_for_none

#: Starts a program that starts another one, says its number, and does what the argument says.
SCRIPT = """
import os, subprocess, sys
from millstream.services.process.inheritance import group_guard
with group_guard():
    program = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    print(program.stdout.readline().decode(), flush=True)
    sys.stdin.read(1)
    if sys.argv[1] == "dies":
        os._exit(3)
print("left the block", flush=True)
sys.stdin.read(1)
"""


def start(how: str) -> tuple[subprocess.Popen[bytes], int]:
    """Return a guarded process, and the number of the program that its program started."""
    command = [sys.executable, "-c", SCRIPT, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def end(process: subprocess.Popen[bytes]) -> None:
    if members(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("how", ["dies", "is killed"])
def test_the_programs_of_a_process_that_dies_are_ended(how: str) -> None:
    process, program = start(how)
    try:
        assert os.getpgid(program) == process.pid
        if how == "dies":
            assert process.stdin
            process.stdin.write(b".")
            process.stdin.flush()
        else:
            process.kill()
        process.wait(120)
        wait_for_none(lambda: members(process.pid))
    finally:
        end(process)


def test_a_process_that_leaves_the_block_keeps_what_it_started() -> None:
    process, program = start("leaves")
    try:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b".")
        process.stdin.flush()
        assert process.stdout.readline().strip() + process.stdout.readline().strip() == b"left the block"
        assert os.getpgid(program) == process.pid
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1, "the guard is still there"
    finally:
        end(process)
