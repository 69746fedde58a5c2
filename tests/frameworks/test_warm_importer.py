"""Imports of PyTorch's family are forked from a process that has it loaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.stack import Stack, children, descendants, running_stack
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path / "stack") as stack:
        yield stack


def warm(stack: Stack) -> list[int]:
    """Return the processes that have PyTorch loaded."""
    found = descendants(stack.process.pid)
    return [pid for pid in found if b"onnx_export:load_torch" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def program(path: Path) -> Path:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    shapes = ({0: torch.export.Dim("rows")},)
    torch.export.save(torch.export.export(module, (torch.zeros(2, 4),), dynamic_shapes=shapes), path)
    return path


def test_imports_are_forked_from_one_process_which_is_started_again(stack: Stack, tmp_path: Path) -> None:
    path = program(tmp_path / "net.pt2")
    stack.push("first", path)
    [server] = warm(stack)
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1, "a lock of another thread would stay locked"
    stack.push("second", path)
    assert (warm(stack), children(server)) == ([server], [])
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not warm(stack), what="it is gone")
    for name in ("third", "fourth"):  # where the end is not seen yet, an import runs in a process of its own
        stack.push(name, path)
    [again] = warm(stack)
    assert again != server
