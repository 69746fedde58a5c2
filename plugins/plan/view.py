"""What `millstream plan` prints: the fleet, and the figures of each policy."""

from __future__ import annotations

from collections.abc import Callable

from millstream.client.cli.terminal import duration, results, show_rows, size
from millstream.plugins.plan.models import KnownModels
from millstream.plugins.plan.simulation.fleet_options import FleetOptions
from millstream.plugins.plan.simulation.report import Summary

#: what the controller orders, for people
REASONS = {
    "minimum": "loads for instances_min",
    "drain": "loads and unloads for restarts",
    "load": "further instances",
    "regular": "second instances",
    "prefetch": "loads ahead of a call",
    "spread": "moves",
    "idle": "unloads of what idles",
    "surplus": "unloads of surplus",
}


def show_plan(summaries: list[Summary], known: KnownModels, needed_bytes: int, options: FleetOptions) -> None:
    """Print the figures of a simulation, a column for each policy.

    Args:
        summaries: one for each policy.
        known: the models, and where their numbers come from.
        needed_bytes: what all of them take.
        options: the fleet.
    """
    console = results()
    pools = options.each_pool()
    figures: dict[str, Callable[[Summary], str]] = {
        "calls": lambda one: f"{one.calls:,}",
        "model was loaded (hit rate)": lambda one: f"{one.hit_rate:.2%}",
        "answered within 100 ms + run": lambda one: f"{one.in_time_share:.2%}",
        "waited for a load": lambda one: f"{one.cold_calls:,}",
        "  their median": lambda one: duration(one.cold_p50_s),
        "  their 99th percentile": lambda one: duration(one.cold_p99_s),
        "mean wait of all calls": lambda one: duration(one.mean_wait_s),
        "refused": _refusals,
        "timed out": lambda one: f"{one.expired:,}",
        "models without an answer": lambda one: f"{one.starved:,}",
        "loads": lambda one: f"{one.loads:,}",
        "evictions": lambda one: f"{one.evictions:,}",
        "memory used": lambda one: f"{one.memory_share:.0%}",
    }
    for pool in pools if len(pools) > 1 else ():
        title = f"  answered by pool {pool.name}"
        figures[title] = lambda one, name=pool.name: f"{one.answered.get(name, 0):,}"  # type: ignore[misc]
    for reason in dict.fromkeys(reason for one in summaries for reason in one.planned):
        title = f"  ordered by the controller: {REASONS.get(reason, reason)}"
        figures[title] = lambda one, reason=reason: f"{one.planned.get(reason, 0):,}"  # type: ignore[misc]
    rows = [[title, *(figure(one) for one in summaries)] for title, figure in figures.items()]
    names = [one.policy for one in summaries]
    fleet = ", ".join(
        f"{one.workers} of {size(one.memory_bytes)}{f' ({one.name})' if options.pools else ''}" for one in pools
    )
    console.print(f"models: {len(known.models)}, together {size(needed_bytes)}; workers: {fleet}")
    if known.measured < len(known.models):
        console.print(
            f"{len(known.models) - known.measured} of the models were never loaded: their memory is predicted"
        )
    show_rows(console, ["", *names], rows, right=names)


def _refusals(summary: Summary) -> str:
    kinds = ", ".join(f"{number:,} {kind.replace('_', ' ')}" for kind, number in summary.refused.items())
    return kinds or "0"
