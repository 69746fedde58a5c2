"""How much memory a worker may take, and what it does when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.process.memory_share import WORKER_BYTES_MIN, total_bytes, worker_share
from millstream.services.wire.records import State
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.out_of_memory import REBUILD_S_MIN, OutOfMemoryPolicy
from tests.kit.versions import SIGNATURE

GIB = 1 << 30
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def groups(folder: Path, own: str, **limits: str) -> int:
    """`limits`: what stands in files, by their paths."""
    for path, text in limits.items():
        file = folder / "fs" / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "own").write_text(own)
    return total_bytes(folder / "fs", folder / "own")


def test_the_least_limit_of_all_control_groups_counts(tmp_path: Path) -> None:
    name = "memory.max"
    assert groups(tmp_path, "0::/a/b\n") == MACHINE
    assert (
        groups(tmp_path, "0::/a/b\n", **{f"a__b__{name}": "max\n", f"a__{name}": f"{MACHINE // 2}\n"}) == MACHINE // 2
    )
    assert groups(tmp_path, "0::/a/b\n", **{f"a__b__{name}": "4096\n"}) == 4096
    assert groups(tmp_path, "0::/\n", **{name: "8192\n"}) == 8192


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    own = "12:cpu,cpuacct:/x\n4:memory:/docker/1\n"
    file = "memory__docker__1__memory.limit_in_bytes"
    assert groups(tmp_path, own, **{file: str((1 << 63) - 4096)}) == MACHINE
    assert groups(tmp_path, own, **{file: "12288"}) == 12288


def test_no_control_groups(tmp_path: Path) -> None:
    assert total_bytes(tmp_path, tmp_path / "none") == MACHINE


def test_workers_share_what_there_is_and_leave_some_to_the_others() -> None:
    assert worker_share(100 * GIB, 4) == 20 * GIB
    assert worker_share(GIB, 8) == WORKER_BYTES_MIN


LIMITED = """
import sys
from millstream.workers.memory_limit import prefer_for_oom_kill, limit_memory
prefer_for_oom_kill()
limit_memory(int(sys.argv[1]))
limit_memory(0)
print(open("/proc/self/oom_score_adj").read().strip())
kept = bytearray(64 << 20)
try:
    bytearray(1 << 30)
except MemoryError:
    print("refused")
import mmap
print(len(mmap.mmap(-1, 1 << 30)))  # shared, as segments are
"""


def test_an_allocation_beyond_the_limit_fails_and_the_process_goes_on() -> None:
    root = Path(__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", LIMITED, str(512 << 20)], capture_output=True, text=True, cwd=root, check=True
    ).stdout.split()
    score = int(Path("/proc/self/oom_score_adj").read_text())
    assert said == [str(min(1000, score + 500)), "refused", str(1 << 30)]


MANIFEST = Manifest(
    model="m", version=1, created=0.0, digest="0" * 64, served="m", files=(), signature=SIGNATURE,
    config=ModelConfig(), opset=17, ir_version=8,
)  # fmt: skip


class Rebuilt:
    """An instance that counts how often it began anew."""

    def __init__(self) -> None:
        self.rebuilt = 0
        self.size_bytes = 0

    def run(self, inputs: object) -> list[object]:
        return []

    def rebuild(self) -> None:
        self.rebuilt += 1

    def close(self) -> None: ...


def test_a_size_is_learnt_from_halves_that_ran_and_rebuilding_is_bounded() -> None:
    now = 0.0
    held, instance = LoadedModels(), Rebuilt()
    content_id = MANIFEST.content_id
    held.set(LoadedModel(MANIFEST, State.READY, instance=instance, rows_efficient=64))  # type: ignore[arg-type]
    policy = OutOfMemoryPolicy(held, WorkerMetrics(MetricsRegistry(None, "worker"), "cpu", "cpu-0", "cpu"), lambda: now)

    def rows() -> int:
        holding = held.get(content_id)
        assert holding is not None
        return holding.rows_efficient

    for size in (64, 32, 16, 8, 4, 2, 1):
        policy.failed(content_id, size)
    assert (instance.rebuilt, rows()) == (1, 64)  # one request asked for too much
    policy.halves_ran(content_id, 64)
    policy.halves_ran(content_id, 128)
    assert rows() == 32
    now = REBUILD_S_MIN
    policy.failed(content_id, 1)
    assert instance.rebuilt == 1  # there is nothing that it could be halved for
    policy.failed(content_id, 2)
    assert instance.rebuilt == 2
    policy.failed("gone", 2)
    policy.halves_ran("gone", 2)


@pytest.mark.parametrize("value", ["-1", "much"])
def test_a_limit_that_is_none_stops_the_process_at_start(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from millstream.services.settings import Settings

    monkeypatch.setenv("MILLSTREAM_WORKER_MEMORY_BYTES_MAX", value)
    with pytest.raises(ValueError, match="worker_memory_bytes_max"):
        Settings()
