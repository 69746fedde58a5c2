"""Runs load, faults of all kinds and hostile models together: every accepted request must get the right answer, and
memory, descriptors, shared memory and Redis keys must not grow.

python -m tests.soak [--minutes 10] [--seed N]        exit status 1 when a request failed or something grew
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.kit import models
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.soak.callers import Callers
from tests.soak.faults import WIDE_COLUMNS, Faults
from tests.soak.hostile import SETTINGS, HostileCallers

CALLERS = 8
BETWEEN_S = 2.0  # pause between two faults
QUIET_S_MAX = 120.0  # shared memory that a frozen worker might still write to is not reused for a minute
MIB = 1 << 20
FAILURES_SHOWN = 20
#: allowed growth between two measurements: after the faults, and after a further load without faults
GROWTH_MAX = {"memory (MiB)": 150.0, "file descriptors": 30.0, "shared memory files": 2.0, "Redis keys": 6.0}


@dataclass(frozen=True)
class Usage:
    """The resources that a stack uses."""

    by_kind: dict[str, float]

    @classmethod
    def of(cls, stack: Stack) -> Usage:
        assert_quiet(stack, QUIET_S_MAX)
        pids = stack.pids().values()
        files = list(stack.shm_dir.glob(f"{stack.installation}-*"))
        return cls(
            {
                "memory (MiB)": sum(_resident(pid) for pid in pids) / MIB,
                "file descriptors": float(sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)),
                "shared memory files": float(len(files)),
                "Redis keys": float(len(stack.redis.keys("ms:*"))),
            }
        )


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(folder: Path, minutes: float, seed: int, console: Console) -> bool:
    """Run the soak and print its results; return whether every check passed."""
    versions = [models.scale(folder / "two.onnx", 2.0), models.scale(folder / "three.onnx", 3.0)]
    served = {
        "steady": versions[0],
        "rolled": versions[0],
        "large": models.identity(folder / "large.onnx", shape=("N", 16384)),
        "fragile": models.fragile(folder / "fragile.onnx"),
        "wide": models.wide(folder / "wide.onnx", WIDE_COLUMNS),
    }
    with running_stack(folder, gateways=2, pools="cpu=2", models=served, settings=SETTINGS) as stack:
        callers = Callers(stack.port, stack.grpc, CALLERS, seed)
        hostile = HostileCallers(stack, folder, seed)
        faults = Faults(stack, callers, hostile, versions, seed)
        hostile.upload()
        callers.start()
        hostile.start()
        try:
            happened = _run_faults(faults, callers, minutes, console)
        finally:
            hostile.stop()
            callers.stop()
        batching = hostile.batching()
        end = Usage.of(stack)
        # Measure the same processes after a load without faults: any growth is a leak.
        rest = Callers(stack.port, stack.grpc, CALLERS, seed)
        rest.start()
        time.sleep(BETWEEN_S * 2)
        rest.stop()
        later = Usage.of(stack)
    _report_hostile(console, hostile)
    console.print(f"batching of coupled: {batching}", markup=False, soft_wrap=True)
    passed = _report(console, callers, rest, happened, end, later)
    _print_failures(console, [*faults.failures, *hostile.failures])
    return passed and not faults.failures and not hostile.failures


def _run_faults(faults: Faults, callers: Callers, minutes: float, console: Console) -> Counter[str]:
    """Run one fault after the other for `minutes`; return how often each kind ran."""
    happened: Counter[str] = Counter()
    time.sleep(BETWEEN_S)
    until = time.monotonic() + 60 * minutes
    with console.status("") as status:
        while time.monotonic() < until:
            happened[faults.next()] += 1
            left = max(0.0, until - time.monotonic())
            counts = ", ".join(f"{number:,} {kind}" for kind, number in sorted(callers.counts.items()))
            status.update(f"{left:.0f} s left; {counts}; faults: {happened.total()}")
            time.sleep(BETWEEN_S)
    return happened


def _report_hostile(console: Console, hostile: HostileCallers) -> None:
    table = Table("hostile model", "answer", "")
    for (model, answer), number in sorted(hostile.answers.items()):
        table.add_row(model, answer, f"{number:,}")
    console.print(table)


def _print_failures(console: Console, failures: list[str]) -> None:
    for failure in failures[:FAILURES_SHOWN]:
        console.print(failure, style="red", markup=False, soft_wrap=True)


def _report(
    console: Console, callers: Callers, rest: Callers, happened: Counter[str], start: Usage, end: Usage
) -> bool:
    counts = callers.counts + rest.counts
    table = Table("requests", "")
    for kind in ("right", "refused", "cut", "failed"):
        table.add_row(kind, f"{counts[kind]:,}")
    table.add_row("slowest answer", f"{max(callers.slowest_s, rest.slowest_s):.1f} s")
    console.print(table)
    table = Table("faults", "")
    for name, number in sorted(happened.items()):
        table.add_row(name, str(number))
    console.print(table)
    grown = {kind: end.by_kind[kind] - start.by_kind[kind] for kind in start.by_kind}
    table = Table("used", "before", "at the end", "allowed to grow by")
    for kind, before in start.by_kind.items():
        table.add_row(kind, f"{before:,.0f}", f"{end.by_kind[kind]:,.0f}", f"{GROWTH_MAX[kind]:,.0f}")
    console.print(table)
    _print_failures(console, [*callers.failures, *rest.failures])
    # Requests may be refused only while nothing else is possible, as after all workers were killed.
    starved = counts["refused"] >= counts["right"]
    if starved:
        console.print("most requests were refused", style="red")
    return not starved and not counts["failed"] and all(grown[kind] <= GROWTH_MAX[kind] for kind in grown)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Load with faults of all kinds.")
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="what happens when (default: the time)")
    arguments = parser.parse_args()
    console = Console()
    console.print(f"seed {arguments.seed}, {arguments.minutes:g} minutes")
    with tempfile.TemporaryDirectory(prefix="millstream-soak-") as name:
        passed = soak(Path(name), arguments.minutes, arguments.seed, console)
    console.print("[green]all checks passed" if passed else "[red]a check failed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
