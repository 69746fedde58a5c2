"""The process that model checks are forked from: it has what a check needs, so that none has to load it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.plugins.convert.pickles import PickleImporter
from millstream.services.ingest import check_process
from millstream.services.sandbox.child import confined_environment
from tests.kit import models

_CHECK = """
import sys
from pathlib import Path
from millstream.services.ingest import checker, fork_server
from millstream.services.ingest.report import CheckTask

fork_server._preload("millstream.services.ingest.inspection:rehearse")
before = set(sys.modules)
task = CheckTask(
    folder=Path(sys.argv[1]),
    batching=None,
    unpacked_bytes_max=1 << 30,
    memory_bytes_max=64 << 30,
    cpu_s_max=600,
    served="model.onnx",
)
assert checker._check(task).batching.decided == "proven"
print(*sorted(sys.modules.keys() - before))
"""


@pytest.mark.parametrize("model", [models.mlp, models.scale], ids=["mlp", "scale"])
def test_a_check_imports_nothing_that_its_fork_server_has_not(model, tmp_path: Path) -> None:
    """NumPy imports its random numbers when they are first used, which took a third of the time of a small check."""
    model(tmp_path / "model.onnx")
    done = subprocess.run([sys.executable, "-c", _CHECK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


_REHEARSAL = """
import os, sys
from pathlib import Path
from millstream.services.ingest import fork_server

fork_server._preload(sys.argv[1])
assert fork_server._forkable(), os.listdir("/proc/self/task")
print(*(os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()))
"""


#: PyTorch's is tried by tests/frameworks, which has it
@pytest.mark.parametrize("rehearsal", [check_process._PROGRAM.rehearsal, PickleImporter.rehearsal])
def test_a_rehearsal_leaves_no_thread_and_no_open_file(rehearsal: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REHEARSAL, rehearsal],
        capture_output=True,
        text=True,
        check=False,
        env=confined_environment() | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stdout
    assert list(tmp_path.iterdir()) == []
