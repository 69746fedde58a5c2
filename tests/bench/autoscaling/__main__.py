"""python -m tests.bench.autoscaling [--hours H] [--seeds N …] [--write]: runs the study, prints the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import mean, pstdev
from typing import NamedTuple

import numpy as np

from tests.bench.autoscaling.plot import Point, plot
from tests.bench.autoscaling.rules import HpaOnCpu, Knative, Millstream, RayServe, Rule, Worker
from tests.bench.autoscaling.simulator import simulate
from tests.bench.autoscaling.traces import DAY_S, TRACES

ROOT = Path(__file__).parents[3]
PAGE, PLOT = ROOT / "docs/autoscaling.md", ROOT / "docs/autoscaling-study.svg"
BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"
WORKER = Worker(rows_per_s=100, run_s=0.04, start_s=30)
MOST, LATENCY_S = 20, 0.2
SEEDS = (1, 2, 3)


class Variant(NamedTuple):
    """A rule with a value of its setting. `usual`: its default, which the table shows."""

    rule: Callable[[], Rule]
    setting: str
    usual: bool = False


def _millstream(down_s: float) -> Callable[[], Rule]:
    return lambda: Millstream(WORKER, MOST, LATENCY_S, down_s)


def _knative(utilisation: float) -> Callable[[], Rule]:
    return lambda: Knative(WORKER, MOST, utilisation)


def _ray(utilisation: float) -> Callable[[], Rule]:
    return lambda: RayServe(WORKER, MOST, utilisation)


def _hpa(utilisation: float) -> Callable[[], Rule]:
    return lambda: HpaOnCpu(MOST, utilisation)


VARIANTS = (
    *(Variant(_millstream(down_s), f"down after {down_s} s", down_s == 120) for down_s in (60, 120, 300, 600)),
    *(Variant(_knative(one), f"{one:.0%} of a worker's concurrency", one == 0.7) for one in (0.5, 0.7, 0.9)),
    Variant(_knative(70 / (WORKER.rows_per_s * WORKER.run_s)), "not told about the worker: 70 rows", True),
    *(Variant(_ray(one), f"{one:.0%} of a worker's concurrency", one == 0.7) for one in (0.3, 0.5, 0.7, 0.9)),
    *(Variant(_hpa(one), f"{one:.0%} of the CPU", one == 0.7) for one in (0.3, 0.5, 0.7)),
)


class Result(NamedTuple):
    """The means of a variant over the seeds, and the standard deviations of what it missed and cost."""

    trace: str
    rule: str
    setting: str
    usual: bool
    missed: float
    worker_hours: float
    changes: float
    missed_deviation: float = 0.0
    worker_hours_deviation: float = 0.0


def study(hours: float, seeds: tuple[int, ...]) -> list[Result]:
    """Run every variant on every trace."""
    found: list[Result] = []
    for trace, draw in TRACES.items():
        drawn = [draw(round(hours * 3600), np.random.default_rng(seed)) for seed in seeds]
        for variant in VARIANTS:
            rule = variant.rule()
            outcomes = [simulate(variant.rule(), one, WORKER, LATENCY_S) for one in drawn]
            found.append(
                Result(
                    trace,
                    rule.name,
                    variant.setting,
                    variant.usual,
                    mean(one.missed for one in outcomes),
                    mean(one.worker_hours for one in outcomes),
                    mean(one.changes for one in outcomes),
                    pstdev(one.missed for one in outcomes),
                    pstdev(one.worker_hours for one in outcomes),
                )
            )
    return found


def table(results: list[Result]) -> str:
    """Return the results with usual settings as a table of Markdown."""
    lines = ["| trace | rule | misses of the target | worker-hours | changes |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.trace} | {one.rule}, {one.setting} | {one.missed:.2%} ± {100 * one.missed_deviation:.2f} "
        f"| {one.worker_hours:.0f} ± {one.worker_hours_deviation:.0f} | {one.changes:.0f} |"
        for one in results
        if one.usual
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.autoscaling", description=__doc__)
    parser.add_argument("--hours", type=float, default=DAY_S / 3600)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--write", action="store_true", help="write table and plot into docs/")
    arguments = parser.parse_args()
    results = study(arguments.hours, tuple(arguments.seeds))
    text = table(results)
    print(text)
    if arguments.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
        points = [Point(one.trace, one.rule, one.setting, one.worker_hours, one.missed) for one in results]
        PLOT.write_text(plot(points))


if __name__ == "__main__":
    main()
