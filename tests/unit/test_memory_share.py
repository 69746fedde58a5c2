"""How much memory a worker may take, and what it does when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.errors import Failure
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.process.machine_share import (
    WORKER_BYTES_MIN,
    check_memory,
    parse_memory,
    total_bytes,
    worker_budget,
    worker_share,
)
from millstream.services.wire.records import State
from millstream.workers.batches.runner import REBUILD_S_MIN, OutOfMemoryPolicy
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
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


def test_a_budget_is_of_every_worker_or_of_those_of_a_pool() -> None:
    assert parse_memory("8GiB") == {"": 8 * GIB}
    assert parse_memory(" cpu = 1.5 GiB , gpu=600MB,2000000000") == {
        "cpu": 3 * GIB // 2,
        "gpu": 600_000_000,
        "": 2_000_000_000,
    }
    assert worker_budget("8GiB", "cpu", 4) == 8 * GIB
    assert worker_budget("cpu=8GiB", "gpu", 4) == worker_budget(None, "gpu", 4) == worker_share(total_bytes(), 4)
    assert worker_budget("0", "cpu", 4) == 0
    assert worker_budget("1GiB,gpu=2GiB", "gpu", 4) == 2 * GIB


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("much", "--memory much: write a size like 8GiB"),
        ("-1GiB", "--memory -1GiB: write a size"),
        ("8Gi", "--memory 8Gi: write a size"),
        ("cpu=", "--memory cpu=: write a size"),
        ("=8GiB", "--memory =8GiB: write a size"),
        (",", "--memory: write a size"),
        ("1" * 400, "write a size"),
        ("8MiB", "--memory 8MiB: 8MiB is too small for one worker, which needs 256MiB"),
        ("8GiB,9GiB", "--memory 9GiB: the memory of every worker is given twice"),
        ("cpu=8GiB,cpu=9GiB", "--memory cpu=9GiB: the memory of the pool cpu is given twice"),
        ("gpu=8GiB", "--memory gpu=…: there is no pool gpu; the pools are cpu"),
    ],
)
def test_nonsense_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(Failure) as caught:
        check_memory(text, {"cpu": 2}, 64 * GIB)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_more_than_there_is_is_a_warning() -> None:
    assert check_memory(None, {"cpu": 2}, GIB) == ""
    assert check_memory("4GiB", {"cpu": 2}, 8 * GIB) == ""
    assert "may use 10.0 GiB, and this machine or container has 8.0 GiB" in check_memory("5GiB", {"cpu": 2}, 8 * GIB)


LIMITED = """
import mmap, sys, threading
from millstream.services.process.process_memory import memory_use
from millstream.workers.models.memory_limit import MemoryLimit, prefer_for_oom_kill
prefer_for_oom_kill()
budget = int(sys.argv[1])
limit = MemoryLimit(budget)
MemoryLimit(0)
print(open("/proc/self/oom_score_adj").read().strip())
kept = bytearray(64 << 20)
try:
    bytearray(1 << 30)
except MemoryError:
    print("refused")
print(len(mmap.mmap(-1, 1 << 30)))  # shared, as segments are
end = threading.Event()
threads = []
for _ in range(200):  # their stacks reserve more than the budget, and use nothing of it
    limit.follow()
    threads.append(threading.Thread(target=end.wait))
    threads[-1].start()
limit.follow()
taken = []
try:
    while True:
        taken.append(bytearray(4 << 20))
except MemoryError:
    use = memory_use().own_bytes
    taken = None
end.set()
print(0.6 * budget < use <= budget + (4 << 20))
"""


def test_an_allocation_beyond_the_limit_fails_and_the_process_goes_on() -> None:
    root = Path(__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", LIMITED, str(512 << 20)], capture_output=True, text=True, cwd=root, check=True
    ).stdout.split()
    score = int(Path("/proc/self/oom_score_adj").read_text())
    assert said == [str(min(1000, score + 500)), "refused", str(1 << 30), "True"]


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

    monkeypatch.setenv("MILLSTREAM_WORKER_MEMORY", value)
    with pytest.raises(ValueError, match="write a size like 8GiB"):
        Settings()
