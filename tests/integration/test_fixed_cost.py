"""What an installation takes that serves one small model, and is not called: processes and memory, on one machine."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit import models
from tests.kit.stack import Stack, descendants, running_stack
from tests.kit.wait import wait_until

PSS_BYTES_MAX = 250 << 20


def pss_bytes(pid: int) -> int:
    found = re.search(r"^Pss: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def processes(stack: Stack) -> list[int]:
    return [stack.process.pid, *descendants(stack.process.pid)]


def test_an_idle_installation_is_four_processes_that_take_little_memory(tmp_path: Path) -> None:
    with running_stack(tmp_path, controller=True, models={"m": models.scale(tmp_path / "m.onnx")}) as stack:
        wait_until(lambda: stack.metrics().value("millstream_controller_leads") == 1, what="leads")
        # The model check leaves a process from which the next one is forked, for a moment.
        wait_until(lambda: len(processes(stack)) == 4, what="supervisor, Redis, gateway and worker are left")
        assert set(stack.pids()) == {"redis", "gateway-0", "cpu-0"}
        taken = {pid: pss_bytes(pid) for pid in processes(stack)}
        assert sum(taken.values()) <= PSS_BYTES_MAX, taken
