"""The study of docs/multi-model.md: 200 workers, 5,000 models, three policies, one seed; writes its table and plot.

python -m tests.bench.placement_study [--workers N] [--models N] [--hours H] [--memory-gib G] [--seed N]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millstream.services.placement.fleet import Fleet
from millstream.services.placement.simulation.models import generated_models
from millstream.services.placement.simulation.policies import POLICIES
from millstream.services.placement.simulation.report import Summary, summary_of
from millstream.services.placement.simulation.simulator import FleetOptions, Simulator
from millstream.services.placement.simulation.traffic import generated_trace
from millstream.services.placement.usage import NO_USAGE
from millstream.services.placement.views import PlacedInstance, Refusal, WorkerView

ROOT = Path(__file__).parents[2]
PAGE, PLOT = ROOT / "docs/multi-model.md", ROOT / "docs/placement-study.svg"
BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"
COLOURS = {"millstream": "#1a7f37", "byte LRU": "#bc4c00", "count LRU": "#6e7781"}
DECISIONS = 20_000


def simulated(task: tuple[str, argparse.Namespace]) -> tuple[Summary, list[float]]:
    """Return what a policy does, and the times of its cold calls."""
    name, options = task
    models = generated_models(options.models, options.seed)
    trace = generated_trace(options.models, options.hours, options.seed)
    fleet = FleetOptions(options.workers, int(options.memory_gib * 2**30))
    outcome = Simulator(models, fleet, POLICIES[name], options.seed).run(trace)
    return summary_of(outcome), outcome.cold_s


def decisions_per_s(options: argparse.Namespace) -> float:
    """Return the placements that a fleet decides in a second of CPU time, each with the worker's new price."""
    models = generated_models(options.models, options.seed)
    fleet, held = Fleet(), [models[at :: options.workers][:10] for at in range(options.workers)]
    usage = NO_USAGE
    for gap_s in (30.0, 400.0, 90.0, 700.0, 60.0):
        usage = usage.with_gap(gap_s)
    for at, some in enumerate(held):
        instances = {
            one.name: PlacedInstance(one.name, one.footprint, 0.0, 900.0 - number * 40, usage=usage)
            for number, one in enumerate(some)
        }
        used_bytes = sum(one.footprint.resident_bytes for one in some)
        fleet.update(WorkerView(f"worker-{at}-0", "cpu", used_bytes + 2**27, used_bytes, instances=instances))
    began = time.process_time()
    for at in range(DECISIONS):
        model = models[at % len(models)]
        chosen = fleet.choose(model.name, model.footprint, 1000.0 + at / DECISIONS)
        assert not isinstance(chosen, Refusal)
        fleet.update(fleet[chosen[0]])  # as after a load: its price is made anew
    return DECISIONS / (time.process_time() - began)


def table_of(summaries: Sequence[Summary], rate: float, options: argparse.Namespace) -> str:
    """Return the table of the study, in Markdown."""
    rows = [
        (
            f"`make plan-study` (seed {options.seed}): {options.workers} workers of {options.memory_gib:g} GiB, "
            f"{options.models:,} models, {options.hours:g} hours, of"
        ),
        f"which the first quarter is not counted; {summaries[0].calls:,} calls are.",
        "",
        (
            "| policy | hit rate | calls without a loaded model | cold p50 | cold p99 | within 100 ms + run "
            "| refused or late | loads | prefetched | evictions | memory used |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {one.policy} | {one.hit_rate:.2%} | {one.calls - one.hits:,} | {one.cold_p50_s:.2f} s | "
        f"{one.cold_p99_s:.2f} s | {one.in_time_share:.2%} | {one.refused_calls + one.expired:,} | {one.loads:,} | "
        f"{one.prefetches:,} | {one.evictions:,} | {one.memory_share:.0%} |"
        for one in summaries
    ]
    rows += [
        "",
        "![Cold calls that took longer than a time, by policy](placement-study.svg)",
        "",
        (
            f"Deciding: {rate:,.0f} placements a second of one core, at {options.workers} "
            f"workers and {options.models:,} models."
        ),
    ]
    return "\n".join(rows)


def plot_of(times: dict[str, list[float]], calls: int) -> str:
    """Return an SVG: the share of all calls that took longer than t, for cold calls, on two logarithmic axes."""
    left, top, width, height = 70, 20, 560, 300
    x_range, y_range = (-1.0, 1.5), (-6.0, -1.0)  # decimal logarithms

    def x_of(seconds: float) -> float:
        return left + width * (math.log10(max(seconds, 0.1)) - x_range[0]) / (x_range[1] - x_range[0])

    def y_of(share: float) -> float:
        level = min(max(math.log10(max(share, 1e-9)), y_range[0]), y_range[1])
        return top + height * (y_range[1] - level) / (y_range[1] - y_range[0])

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 380" font-family="sans-serif" font-size="12">',
        '<rect width="660" height="380" fill="white"/>',
    ]
    for tick in (0.1, 0.3, 1, 3, 10, 30):
        x = x_of(tick)
        parts.append(f'<line x1="{x:.0f}" y1="{top}" x2="{x:.0f}" y2="{top + height}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.0f}" y="{top + height + 16}" text-anchor="middle">{tick:g} s</text>')
    for power in range(int(y_range[0]), int(y_range[1]) + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{left}" y1="{y:.0f}" x2="{left + width}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{10.0 ** (power + 2):g} %</text>')
    for number, (name, cold_s) in enumerate(times.items()):
        ordered = np.sort(np.array(cold_s or [0.0]))[::-1]
        at = np.unique(np.geomspace(1, len(ordered), 200).astype(int))
        points = " ".join(f"{x_of(float(ordered[rank - 1])):.1f},{y_of(rank / calls):.1f}" for rank in at)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 12}" y="{top + 190 + 18 * number}" fill="{COLOURS[name]}">{name}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="372" text-anchor="middle">share of all calls that waited for a load '
        "and took longer than this</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--models", type=int, default=5000)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--memory-gib", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print", action="store_true", help="print the table, write no file")
    options = parser.parse_args()
    rate = decisions_per_s(options)
    with multiprocessing.get_context("spawn").Pool(len(POLICIES)) as pool:
        results = pool.map(simulated, [(name, options) for name in POLICIES])
    summaries = [summary for summary, _ in results]
    table = table_of(summaries, rate, options)
    print(table)
    if options.print:
        return
    PLOT.write_text(plot_of({summary.policy: cold_s for summary, cold_s in results}, summaries[0].calls))
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
