"""The study of docs/multi-model.md: 200 workers, 5,000 models, three policies, several seeds; writes table and plot.

python -m tests.bench.placement_study [--workers N] [--models N] [--hours H] [--memory-gib G] [--seeds N …]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.gateway.catalog.snapshot import Snapshot, VersionView
from millstream.gateway.placement.decision import ColdVersion, decide
from millstream.gateway.placement.pool_fleets import PoolFleets
from millstream.plugins.plan.simulation.fleet_options import FleetOptions
from millstream.plugins.plan.simulation.models import SimulatedModel, generated_models
from millstream.plugins.plan.simulation.policies import POLICIES
from millstream.plugins.plan.simulation.report import Summary, summary_of
from millstream.plugins.plan.simulation.simulator import Simulator
from millstream.plugins.plan.simulation.traffic import generated_trace
from millstream.services.placement.fleet import Fleet
from millstream.services.placement.usage import NO_USAGE
from millstream.services.placement.views import PlacedInstance, Refusal, WorkerView
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from tests.kit.versions import publish

ROOT = Path(__file__).parents[2]
PAGE, PLOT = ROOT / "docs/multi-model.md", ROOT / "docs/placement-study.svg"
BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"
COLOURS = {"millstream": "#1a7f37", "byte LRU": "#bc4c00", "count LRU": "#6e7781"}
#: No constant was chosen with these: the longer of HORIZONS_S was with 1 and 101 to 120, PRIOR_CALLS with 101 to 108.
SEEDS = (11, 12, 13)
SMALL_SEED, SMALL_SEEDS = 201, 20  # the first, and how many
DECISIONS = 20_000
HELD = 10  # instances in each worker, for the rates of decisions
BASE_BYTES = 2**27


class Case(NamedTuple):
    """A small case of the study."""

    models: int
    workers: int
    memory_gib: float
    hours: float


SMALL = (Case(60, 2, 2, 1), Case(60, 3, 2, 1), Case(60, 4, 2, 1), Case(400, 12, 1, 2), Case(400, 12, 2, 2))


class Task(NamedTuple):
    """One run of a policy."""

    policy: str
    case: Case
    seed: int


def simulated(task: Task) -> tuple[Summary, list[float]]:
    """Return what a policy does, and the times of its cold calls."""
    case = task.case
    models = generated_models(case.models, task.seed)
    trace = generated_trace(case.models, case.hours, task.seed)
    fleet = FleetOptions(case.workers, int(case.memory_gib * 2**30))
    outcome = Simulator(models, fleet, POLICIES[task.policy], task.seed).run(trace)
    return summary_of(outcome), outcome.cold_s


def decisions_per_s(case: Case, seed: int) -> float:
    """Return the placements that a fleet decides in a second of CPU time, each with the worker's new price."""
    models = generated_models(case.models, seed)
    fleet, usage = Fleet(), NO_USAGE
    for gap_s in (30.0, 400.0, 90.0, 700.0, 60.0):
        usage = usage.with_gap(gap_s)
    for at in range(case.workers):
        some = models[at :: case.workers][:HELD]
        instances = {
            one.name: PlacedInstance(one.name, one.footprint, 0.0, 900.0 - number * 40, usage=usage)
            for number, one in enumerate(some)
        }
        used_bytes = sum(one.footprint.resident_bytes for one in some)
        fleet.update(WorkerView(f"worker-{at}-0", "cpu", used_bytes + BASE_BYTES, used_bytes, instances=instances))

    def decision(at: int) -> None:
        model = models[at % len(models)]
        chosen = fleet.choose(model.name, model.footprint, 1000.0 + at / DECISIONS)
        assert not isinstance(chosen, Refusal)
        fleet.update(fleet[chosen[0]])  # as after a load: its price is made anew

    return rate_of(decision)


def gateway_decisions_per_s(case: Case, seed: int) -> float:
    """Return the cold calls that a gateway decides in a second of CPU time, from records; each changes one worker."""
    models = generated_models(case.models, seed)
    records = [record_of(at, models[at :: case.workers][:HELD]) for at in range(case.workers)]
    fleets = PoolFleets(lambda _manifest, _worker: models[0].footprint)
    with tempfile.TemporaryDirectory() as folder:
        standby = publish(FolderRepository(Path(folder)), "m", 1)

    def decision(at: int) -> None:
        changed = at % len(records)  # a new snapshot, in which one worker has changed
        records[changed] = records[changed].model_copy(update={"used_bytes": BASE_BYTES * (1 + at % 2)})
        workers = fleets.of(Snapshot({}, tuple(records)), "cpu")
        version = VersionView(standby, State.STANDBY, None, (), on_demand=True)
        footprint = models[at % len(models)].footprint
        assert not isinstance(decide(ColdVersion(version, "cpu", workers, "", footprint, 1000.0)), Refusal)

    return rate_of(decision)


def record_of(at: int, models: Sequence[SimulatedModel]) -> WorkerRecord:
    """Return the record of a worker that holds `models`."""
    instances = tuple(
        InstanceRecord(
            content_id=one.name,
            model=one.name,
            version=1,
            state=State.READY,
            resident_bytes=one.footprint.resident_bytes,
            load_s=one.footprint.load_s,
            loaded_at=1.0,
            last_used=900.0 - 40 * number,
        )
        for number, one in enumerate(models)
    )
    used_bytes = sum(one.footprint.resident_bytes for one in models)
    return WorkerRecord(
        id=f"worker-{at}-0",
        pool="cpu",
        device="cpu",
        backend="onnxruntime",
        pid=1,
        host="h",
        started=0.0,
        budget_bytes=used_bytes + BASE_BYTES,
        used_bytes=used_bytes,
        instances=instances,
    )


def rate_of(decision: Callable[[int], None]) -> float:
    """Return the decisions in a second of CPU time."""
    began = time.process_time()
    for at in range(DECISIONS):
        decision(at)
    return DECISIONS / (time.process_time() - began)


def command() -> str:
    """Return the command that this study was started with, in Markdown."""
    given = " ".join(sys.argv[1:])
    return f'`make plan-study ARGS="{given}"`' if given else "`make plan-study`"


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Return "median (least to most)"."""
    low, high = form(min(values)), form(max(values))
    middle = form(float(np.median(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def table_of(summaries: Sequence[Sequence[Summary]], seeds: Sequence[int], case: Case) -> list[str]:
    """Return the table of the study, in Markdown: median and range of the seeds, for each policy."""
    calls = spread([one.calls for one in summaries[0]], lambda value: f"{value:,.0f}")
    rows = [
        f"{command()}:",
        f"{case.workers} workers of {case.memory_gib:g} GiB, {case.models:,} models, {case.hours:g} hours, of which",
        f"the first quarter is not counted; {calls} calls are. Median and range of",
        f"the seeds {', '.join(map(str, seeds))}, with which no constant was chosen.",
        "",
        (
            "| policy | hit rate | calls without a loaded model | cold p50 | cold p99 | mean wait of all calls "
            "| within 100 ms + run | refused or late | models without an answer | loads | of them ahead of a call "
            "| evictions | memory used |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    figures: tuple[tuple[Callable[[Summary], float], Callable[[float], str]], ...] = (
        (lambda one: one.hit_rate, lambda value: f"{value:.2%}"),
        (lambda one: one.calls - one.hits, lambda value: f"{value:,.0f}"),
        (lambda one: one.cold_p50_s, lambda value: f"{value:.2f} s"),
        (lambda one: one.cold_p99_s, lambda value: f"{value:.2f} s"),
        (lambda one: 1000 * one.mean_wait_s, lambda value: f"{value:,.1f} ms"),
        (lambda one: one.in_time_share, lambda value: f"{value:.2%}"),
        (lambda one: one.refused_calls + one.expired, lambda value: f"{value:,.0f}"),
        (lambda one: one.starved, lambda value: f"{value:,.0f}"),
        (lambda one: one.loads, lambda value: f"{value:,.0f}"),
        (lambda one: one.prefetches, lambda value: f"{value:,.0f}"),
        (lambda one: one.evictions, lambda value: f"{value:,.0f}"),
        (lambda one: one.memory_share, lambda value: f"{value:.0%}"),
    )
    for of_policy in summaries:
        cells = [spread([figure(one) for one in of_policy], form) for figure, form in figures]
        rows.append(f"| {of_policy[0].policy} | {' | '.join(cells)} |")
    return rows


def small_table_of(results: dict[Case, list[tuple[Summary, Summary]]], seeds: Sequence[int]) -> list[str]:
    """Return the table of small cases: cold calls of Millstream and byte LRU, seed by seed."""
    rows = [
        (f"Small fleets, {len(seeds)} seeds each ({seeds[0]} to {seeds[-1]}), calls without a loaded model:"),
        "",
        (
            "| models | workers | hours | Millstream, median | byte LRU, median "
            "| Millstream / byte LRU, median and range | seeds with fewer "
            "| mean wait of all calls, Millstream and byte LRU | refused or late, Millstream and byte LRU |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, pairs in results.items():
        cold = [(one.calls - one.hits, other.calls - other.hits) for one, other in pairs]
        ratios = [(one + 1) / (other + 1) for one, other in cold]
        refused = [sum(pair[at].refused_calls + pair[at].expired for pair in pairs) for at in (0, 1)]
        waits_ms = [1000 * float(np.mean([pair[at].mean_wait_s for pair in pairs])) for at in (0, 1)]
        rows.append(
            f"| {case.models} | {case.workers} of {case.memory_gib:g} GiB | {case.hours:g} | "
            f"{np.median([one for one, _ in cold]):,.0f} | {np.median([other for _, other in cold]):,.0f} | "
            f"{spread(ratios, lambda value: f'{value:.2f}')} | {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} | "
            f"{waits_ms[0]:,.1f} and {waits_ms[1]:,.1f} ms | {refused[0]:,} and {refused[1]:,} |"
        )
    return rows


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
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--small-seeds", type=int, default=SMALL_SEEDS, help="seeds of the small fleets")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="print the tables, write no file")
    options = parser.parse_args()
    case = Case(options.models, options.workers, options.memory_gib, options.hours)
    rates = decisions_per_s(case, options.seeds[0]), gateway_decisions_per_s(case, options.seeds[0])
    seeds = range(SMALL_SEED, SMALL_SEED + options.small_seeds)
    tasks = [Task(name, case, seed) for name in POLICIES for seed in options.seeds]
    small = [Task(name, one, seed) for one in SMALL for seed in seeds for name in ("millstream", "byte-lru")]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.map(simulated, tasks, chunksize=1)
        found = dict(zip(small, (summary for summary, _ in pool.map(simulated, small)), strict=True))
    number = len(options.seeds)
    by_policy = [results[at : at + number] for at in range(0, len(results), number)]
    summaries = [[summary for summary, _ in of_policy] for of_policy in by_policy]
    pairs = {
        one: [(found[Task("millstream", one, seed)], found[Task("byte-lru", one, seed)]) for seed in seeds]
        for one in SMALL
    }
    text = "\n".join(
        [
            *table_of(summaries, options.seeds, case),
            "",
            "![Cold calls that took longer than a time, by policy](placement-study.svg)",
            "",
            *small_table_of(pairs, seeds),
            "",
            (
                f"Deciding: {rates[0]:,.0f} placements a second of one core, at {case.workers} workers and "
                f"{case.models:,} models; in a gateway,"
            ),
            f"from a new snapshot of the workers' records each, {rates[1]:,.0f}.",
        ]
    )
    print(text)
    if options.print:
        return
    times = {of_policy[0][0].policy: [cold_s for _, one in of_policy for cold_s in one] for of_policy in by_policy}
    PLOT.write_text(plot_of(times, sum(summary.calls for summary in summaries[0])))
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
