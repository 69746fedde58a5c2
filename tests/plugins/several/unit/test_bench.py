"""The parts of the benchmarks that do not measure: reading /proc, and saying what came out."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench import device_loop, figures, hot_path, processes, report
from tests.bench.errors import LoadError
from tests.bench.load import Load
from tests.bench.result import BatchCost, Figure, Measured, Result
from tests.kit import models

BUSY = """
import subprocess, sys, time
while time.process_time() < 0.2: pass
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.read(1)
print(child.pid, flush=True)
sys.stdin.read()
child.communicate()
"""
BUSY_CHILD = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint('.', flush=True)\nsys.stdin.read()"

RESULT = Result(
    (
        Figure("rate", 0.9, 0.85, "of C", "9/s of 10/s"),
        Figure("latency", 4.0, 3.5, "x C's", "4 us, C 1 us", at_most=True),
    ),
    (Measured("C, JSON", 64, Load(rate=40_000, p50_us=1500, p99_us=3000, cpu_us=20.5)),),
    (BatchCost(16, 7.5, {"gateway": 160.4, "redis": 60.0, "worker": 79.6}, 12.25),),
)
MACHINE = report.Machine("Mill", 2, 16.0, "Debian", "3.11.7", "4.1.0", {"uvicorn": "1.0"}, date(2026, 11, 20))


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child, each with 0.2 s of CPU spent; both have nothing more to do."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, BUSY_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        parent.communicate()


def test_a_tree_spends_what_its_processes_spend(family: tuple[int, int]) -> None:
    parent, child = family
    assert processes.tree(parent) == {parent, child}
    assert processes.cpu_s(child) >= 0.19
    assert processes.cpu_s(parent) >= processes.cpu_s(child) + 0.19


def test_memory_of_a_process(family: tuple[int, int]) -> None:
    found = processes.memory(family[0])
    assert 2**20 < found.pss_bytes <= found.rss_bytes < 2**30


def test_a_pinned_tree_keeps_to_its_cores(family: tuple[int, int]) -> None:
    core = min(os.sched_getaffinity(0))
    processes.pin(family[0], {core})
    assert [os.sched_getaffinity(pid) for pid in family] == [{core}, {core}]


def test_modules_are_found_by_how_they_were_started() -> None:
    command = [sys.executable, "-P", "-m", "code", "-q"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.pid in processes.running_module(os.getpid(), "code")
        with pytest.raises(LoadError, match="no process runs `python -m cod`"):
            processes.running_module(os.getpid(), "cod")
        process.communicate()


def test_the_table_says_what_was_missed() -> None:
    output = io.StringIO()
    Console(width=200, file=output).print(report.figures_table(RESULT))
    lines = output.getvalue().splitlines()
    assert [word for line in lines for word in ("ok", "missed") if f" {word} " in line] == ["ok", "missed"]


def test_the_page_holds_figures_loads_machine_and_date() -> None:
    page = report.page(RESULT, MACHINE, 3, 5)
    for line in (
        "Measured on 2026-11-20",
        "3 rounds of 5 seconds",
        "| rate | **0.90** | at least 0.85 of C | yes | 9/s of 10/s |",
        "| latency | **4.00** | at most 3.5 x C's | **no** | 4 us, C 1 us |",
        "| C, JSON | 64 | 40,000/s | 1.50 ms | 3.00 ms | 20.5 us |",
        "| 16 | 7.5 | 160 us | 60 us | 80 us | 300 us | 12.2 |",
        "| processor | Mill, 2 cores |",
    ):
        assert line in page


def test_the_result_is_json() -> None:
    document = json.loads(json.dumps(report.as_json(RESULT, MACHINE)))
    assert [figure["met"] for figure in document["figures"]] == [True, False]
    assert document["machine"]["day"] == "2026-11-20"


def test_the_hot_path_is_compared_with_c_in_the_same_round() -> None:
    """In the second of three rounds the machine is half as fast: ratios stay, and the bounds are those of the issue."""

    def rounds(rate: float, latency_us: float, cpu_us: float) -> list[Load]:
        return [Load(rate / slow, latency_us * slow, 0, cpu_us * slow) for slow in (1, 2, 1)]

    bare, ours = rounds(1000, 100, 20), rounds(1100, 150, 24)
    c, m = [bare] * 3, [ours] * 3
    found = hot_path.hot_path_figures([*c, *m, rounds(1300, 140, 20), *m, bare, rounds(1400, 0, 0), ours])
    assert [one.measured for one in found] == pytest.approx(
        [1.1, 1.2, 1.1, 1.5, 1.3 / 1.1, 1.5, 1.1, 1.1, 1.2, 1.4, 1.1]
    )
    assert [one.met for one in found] == [True] * 10 + [False]


def test_an_instance_is_compared_with_a_bare_loop_on_its_device(tmp_path: Path) -> None:
    """On a CPU here; the row of a GPU is measured by the same function."""
    found = device_loop.measure(models.squeezenet(tmp_path / "squeezenet.onnx"), "cpu", 0.01, rows=1)
    assert len(found.ours) == len(found.bare) == device_loop.TURNS
    assert all(rate > 0 for rate in (*found.ours, *found.bare))


def test_without_a_gpu_its_row_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(figures, "gpu_available", lambda: False)
    assert figures.gpu(tmp_path, 1, said.append).figures == ()
    assert said == ["no GPU: its row is left out"]


def test_with_a_gpu_its_row_has_the_share_of_a_bare_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "gpu_available", lambda: True)
    rates = device_loop.Rates([95.0, 90.0, 99.0], [100.0, 100.0, 100.0])
    monkeypatch.setattr(figures, "measure_device", lambda path, device, seconds: rates)
    [figure] = figures.gpu(tmp_path, 1, lambda _: None).figures
    assert (figure.measured, figure.met) == (0.95, True)
