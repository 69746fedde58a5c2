"""Triton's metrics under Triton's names, for dashboards and autoscalers; part of the metrics page.

totals of the metric files + loaded versions + state of the machine ─> lines of text 0.0.4 or OpenMetrics

Names of Triton's counters do not end in `_total`, as OpenMetrics, which Prometheus asks for, requires of counters. In
OpenMetrics they therefore have the type `unknown`, so that a query finds them by the same name in both formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.metrics_page import AddedLines
from millstream.plugins.compat.triton.statistics import loaded
from millstream.services.metrics.gpus import Gpu, gpus
from millstream.services.metrics.inference import FAILED, Field, Recorded, recorded
from millstream.services.metrics.record import OTHER, Totals

_Samples = list[tuple[dict[str, str], float]]

_COUNTERS: tuple[tuple[str, str, Field], ...] = (
    ("nv_inference_request_success", "Number of successful inference requests, all batch sizes", Field.SUCCESS),
    ("nv_inference_count", "Number of inferences performed (rows of successful requests)", Field.ROWS),
    ("nv_inference_exec_count", "Number of model executions performed", Field.EXECUTIONS),
)
_DURATIONS: tuple[tuple[str, str, tuple[Field, ...]], ...] = (
    ("request", "inference request duration (includes queueing)", (Field.SUCCESS_S,)),
    ("queue", "time that requests waited for a worker", (Field.QUEUE_S,)),
    ("compute_input", "time of bringing inputs together", (Field.INPUT_S,)),
    ("compute_infer", "time that models ran", (Field.INFER_S,)),
    ("compute_output", "time of sharing out outputs", (Field.OUTPUT_S,)),
)


_STAT, _MEMINFO = Path("/proc/stat"), Path("/proc/meminfo")


class CpuTimes(NamedTuple):
    """Ticks of all processors since the machine started."""

    busy: int
    all: int


class MachineMemory(NamedTuple):
    """Bytes of the machine's memory."""

    total: int
    used: int  # not available to programs without swapping


def cpu_times() -> CpuTimes:
    """Return the ticks of all processors; zeros without /proc."""
    try:
        ticks = [int(field) for field in _STAT.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return CpuTimes(0, 0)
    idle = sum(ticks[3:5])  # idle and iowait
    return CpuTimes(sum(ticks) - idle, sum(ticks))


def memory() -> MachineMemory:
    """Return the memory of the machine; zeros without /proc."""
    try:
        lines = (line.partition(":") for line in _MEMINFO.read_text().splitlines())
        kib = {name: int(value.split()[0]) for name, _, value in lines if value}
        return MachineMemory(kib["MemTotal"] * 1024, (kib["MemTotal"] - kib["MemAvailable"]) * 1024)
    except (OSError, ValueError, KeyError):
        return MachineMemory(0, 0)


def build(snapshot: Callable[[], Snapshot]) -> AddedLines:
    """Return the function that writes Triton's metrics."""
    return TritonMetricsPage(snapshot).lines


class TritonMetricsPage:
    """Writes Triton's metrics. It keeps the CPU times of the last page, because utilisation is measured between pages.

    Args:
        snapshot: Returns the current snapshot.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._cpu = cpu_times()
        self._utilisation = 0.0

    def lines(self, totals: Totals, openmetrics: bool) -> str:
        """Return all lines, each with its line end. Reads files: call it in a thread."""
        counter = "unknown" if openmetrics else "counter"
        families = [*self._inference(totals, counter), *self._machine(), *_of_gpus(gpus(), counter)]
        return "".join(line for family in families for line in family)

    def _inference(self, totals: Totals, counter: str) -> Iterator[list[str]]:
        by_content_id = recorded(totals)
        rows: list[tuple[dict[str, str], Recorded]] = [
            ({"model": view.manifest.model, "version": str(view.manifest.version)}, sums)
            for view in loaded(self._snapshot())
            for sums in (by_content_id.get(view.manifest.content_id, Recorded()),)
            if OTHER not in by_content_id or view.manifest.content_id in by_content_id
        ]
        if OTHER in by_content_id:  # models beyond the limit of the page
            rows.append(({"model": OTHER, "version": OTHER}, by_content_id[OTHER]))
        for name, help_, at in _COUNTERS:
            yield _family(name, help_, counter, [(labels, sums.values[at]) for labels, sums in rows])
        failed = [
            (labels | {"reason": reason}, sums.values[at]) for labels, sums in rows for reason, at in FAILED.items()
        ]
        yield _family("nv_inference_request_failure", "Number of failed inference requests", counter, failed)
        pending = [(labels, sums.pending) for labels, sums in rows]
        help_ = "Instantaneous number of pending requests awaiting execution per-model."
        yield _family("nv_inference_pending_request_count", help_, "gauge", pending)
        for part, help_, fields in _DURATIONS:
            samples = [(labels, 1e6 * sum(sums.values[at] for at in fields)) for labels, sums in rows]
            yield _family(f"nv_inference_{part}_duration_us", f"Cumulative {help_} in microseconds", counter, samples)

    def _machine(self) -> Iterator[list[str]]:
        at = memory()
        for name, help_, value in (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._cpu_utilisation()),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", at.total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", at.used),
        ):
            yield _family(name, help_, "gauge", [({}, value)])

    def _cpu_utilisation(self) -> float:
        """Return the utilisation since the last page; the previous value if no clock tick has passed."""
        before, self._cpu = self._cpu, cpu_times()
        ticks = CpuTimes(self._cpu.busy - before.busy, self._cpu.all - before.all)
        if ticks.all > 0:
            self._utilisation = min(max(ticks.busy / ticks.all, 0.0), 1.0)
        return self._utilisation


def _of_gpus(devices: Sequence[Gpu], counter: str) -> Iterator[list[str]]:
    for name, help_, field in (
        ("utilization", "GPU utilization rate [0.0 - 1.0)", "utilisation"),
        ("power_usage", "GPU power usage in watts", "power_w"),
        ("power_limit", "GPU power management limit in watts", "power_limit_w"),
        ("memory_total_bytes", "GPU total memory, in bytes", "memory_total_bytes"),
        ("memory_used_bytes", "GPU used memory, in bytes", "memory_used_bytes"),
    ):
        values = ((gpu.uuid, getattr(gpu, field)) for gpu in devices)
        samples: _Samples = [({"gpu_uuid": uuid}, value) for uuid, value in values if value is not None]
        yield _family(f"nv_gpu_{name}", help_, "gauge", samples)
    energy = [({"gpu_uuid": gpu.uuid}, gpu.energy_j) for gpu in devices if gpu.energy_j is not None]
    yield _family("nv_energy_consumption", "GPU energy consumption in joules since its driver started", counter, energy)


def _family(name: str, help_: str, kind: str, samples: _Samples) -> list[str]:
    """Return the lines HELP, TYPE and samples; no lines without samples. Label values are names and need no escapes.

    Labels are in the order of their names, as in Triton, whose users read lines with regular expressions.
    """
    if not samples:
        return []
    lines = [f"# HELP {name} {help_}\n", f"# TYPE {name} {kind}\n"]
    for labels, value in samples:
        label_text = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
        number = str(int(value)) if value == int(value) else repr(value)
        lines.append(f"{name}{{{label_text}}} {number}\n" if label_text else f"{name} {number}\n")
    return lines
