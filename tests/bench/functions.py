"""Measure what a Python step costs beside ONNX Runtime: both return their input, each in its own backend.

python -m tests.bench --functions     (make bench ARGS=--functions)
one row: processor time of both processes, per run     large tensors: bytes in and out, per second
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from millstream.plugins.functions.worker import Python
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Instance
from tests.contract.backend_cases import same
from tests.kit import functions, models

RUNS, ROUNDS = 5000, 5
TENSOR_BYTES = 16 << 20
CPU_US_MAX, GB_S_MIN = 150, 4.0


def lines() -> Iterator[str]:
    """Measure, and yield what was found beside what is wanted."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        step = Python(folder).load(functions.identity(folder, "FP32"), same(), "cpu", 1)
        onnx = get_backend("onnxruntime").load(models.identity(folder / "identity.onnx", "FP32"), same(), "cpu", 1)
        row = np.ones((1, 2), np.float32)
        children = [pid for pid in _children() if "functions.program" in Path(f"/proc/{pid}/cmdline").read_text()]
        costs = [_cpu_us(step, row, children) - _cpu_us(onnx, row, []) for _ in range(ROUNDS)]
        yield f"processor time of a step beyond ONNX Runtime: {statistics.median(costs):.0f} us (at most {CPU_US_MAX})"
        large = np.ones((TENSOR_BYTES // 8, 2), np.float32)
        rates = [2 * large.nbytes / _seconds(step, large, 10) / 1e9 for _ in range(ROUNDS)]
        copies = [large.nbytes / _copy_s(large) / 1e9 for _ in range(ROUNDS)]
        yield (
            f"tensors of {TENSOR_BYTES >> 20} MiB, in and out: {statistics.median(rates):.1f} GB/s (at least "
            f"{GB_S_MIN:g}; a copy in memory: {statistics.median(copies):.1f} GB/s)"
        )
        step.close()
        onnx.close()


def _cpu_us(instance: Instance, row: Array, others: list[int]) -> float:
    """Return the processor time of a run in this process and others."""
    before = time.process_time() + sum(map(_cpu_s, others))
    _seconds(instance, row, RUNS)
    return (time.process_time() + sum(map(_cpu_s, others)) - before) / RUNS * 1e6


def _seconds(instance: Instance, x: Array, runs: int) -> float:
    instance.run({"x": x})
    began = time.perf_counter()
    for _ in range(runs):
        instance.run({"x": x})
    return (time.perf_counter() - began) / runs


def _copy_s(array: Array) -> float:
    began = time.perf_counter()
    np.copy(array)
    return time.perf_counter() - began


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
