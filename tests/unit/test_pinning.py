"""Pinning to cores does not reach the programs that a pinned process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from millstream.services.environment import child_environment
from millstream.services.process.cpu_share import cores
from millstream.services.process.parent_death import child_setup
from millstream.services.process.pinning import pinning_environment

pytestmark = pytest.mark.skipif(not cores(), reason="this system pins no process")

#: starts a program, which unpins itself and prints its cores; then prints its own
PROGRAM = """
import json, os, subprocess, sys, threading
from millstream.services.process.pinning import unpin

if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "started"], check=True)
else:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    unpin()
    print(json.dumps([sorted(os.sched_getaffinity(task)) for task in (0, thread.native_id)]))
    stop.set()
print(json.dumps(sorted(os.sched_getaffinity(0))), flush=True)
"""


def run(tmp_path, pinned: set[int]) -> list[object]:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        preexec_fn=child_setup(pinned),
        env=child_environment(pinning_environment(pinned)),
        stdout=subprocess.PIPE,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_program_that_a_pinned_process_starts_uses_the_cores_of_its_supervisor(tmp_path) -> None:
    ours, core = sorted(os.sched_getaffinity(0)), min(os.sched_getaffinity(0))
    assert run(tmp_path, {core}) == [[ours, ours], ours, [core]]


def test_nothing_changes_where_nothing_is_pinned(tmp_path) -> None:
    ours = sorted(os.sched_getaffinity(0))
    assert pinning_environment(set()) == {}
    assert run(tmp_path, set()) == [[ours, ours], ours, ours]
