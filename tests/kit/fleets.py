"""Hypothesis strategies for what placement decides on: workers with instances, versions with traffic.

A whole fleet comes from one seed that Hypothesis draws: a draw for each number would take longer than the test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import Footprint, PlacedInstance, WorkerView

NOW = 100_000.0
IDS = [f"m{number}:1:x" for number in range(12)]

seconds = st.floats(0, 1e6, allow_nan=False)
randoms = st.integers(0, 2**32).map(random.Random)


def usages(gaps_max: int = 12) -> st.SearchStrategy[Usage]:
    return st.lists(st.floats(0, 1e5, allow_nan=False), max_size=gaps_max).map(usage_of)


def usage_of(gaps_s) -> Usage:
    usage = NO_USAGE
    for gap_s in gaps_s:
        usage = usage.with_gap(gap_s)
    return usage


def chance(draw: random.Random, share: float) -> bool:
    return draw.random() < share


def drawn_footprint(draw: random.Random) -> Footprint:
    return Footprint(
        resident_bytes=draw.choice([1, draw.randint(1, 30), draw.randint(1, 120)]),
        peak_bytes=draw.choice([0, 0, draw.randint(0, 30), draw.randint(0, 200)]),
        load_s=draw.choice([0.0, draw.uniform(0, 5), draw.uniform(0, 60)]),
        device_resident_bytes=draw.choice([0, draw.randint(0, 100)]),
        device_peak_bytes=draw.choice([0, draw.randint(0, 100)]),
    )


def drawn_usage(draw: random.Random) -> Usage:
    mean_s = 10 ** draw.uniform(0, 4.5)
    if chance(draw, 0.3):
        return usage_of([mean_s] * draw.randint(0, 12))
    return usage_of([draw.expovariate(1 / mean_s) for _ in range(draw.randint(0, 8))])


def _instance(draw: random.Random, content_id: str) -> PlacedInstance:
    return PlacedInstance(
        content_id,
        drawn_footprint(draw),
        loaded_at=math.inf if chance(draw, 0.1) else NOW - draw.choice([draw.uniform(0, 20), draw.uniform(0, 5000)]),
        last_used=NOW - draw.choice([draw.uniform(0, 20), draw.uniform(0, 9000)]),
        in_use=chance(draw, 0.2),
        pinned=chance(draw, 0.1),
        usage=drawn_usage(draw),
    )


def _worker(draw: random.Random, name: str, pool: str) -> WorkerView:
    """Return a worker whose instances fit its budgets; now and then one without a budget, or with a device."""
    held = {one: _instance(draw, one) for one in draw.sample(IDS, draw.randint(0, 8))}
    used = [draw.randint(0, 20) + bytes_ for bytes_ in accounted(held.values())]
    budget, device_budget = (one + draw.choice([0, draw.randint(0, 200)]) for one in used)
    if chance(draw, 0.1):
        budget = 0
    if chance(draw, 0.6):
        device_budget = 0
    return WorkerView(name, pool, budget, used[0], chance(draw, 0.15), held, device_budget, used[1])


def accounted(held: Collection[PlacedInstance]) -> tuple[int, int]:
    """Return the bytes of host and device that a worker counts for its instances."""
    loaded = [one.footprint for one in held if one.loaded_at < math.inf]
    loading = [one.footprint for one in held if one.loaded_at == math.inf]
    host = sum(one.resident_bytes for one in loaded) + max((one.peak_bytes for one in loaded), default=0)
    device = sum(one.device_resident_bytes for one in loaded) + max(
        (one.device_peak_bytes for one in loaded), default=0
    )
    return (
        host + sum(one.load_bytes for one in loading),
        device + sum(one.device_load_bytes for one in loading),
    )


def counted(worker: WorkerView, held: Mapping[str, PlacedInstance]) -> WorkerView:
    """Return a worker with other instances, as its account counts them."""
    before, after = accounted(worker.instances.values()), accounted(held.values())
    return replace(
        worker,
        used_bytes=worker.used_bytes - before[0] + after[0],
        device_used_bytes=worker.device_used_bytes - before[1] + after[1],
        instances=held,
    )


def drawn_fleet(draw: random.Random) -> list[WorkerView]:
    pools = [draw.choice(["cpu", "cpu", "gpu"]) for _ in range(draw.randint(1, 5))]
    return [_worker(draw, f"{pool}-{number}-1", pool) for number, pool in enumerate(pools)]


footprints = randoms.map(drawn_footprint)
workers = randoms.map(lambda draw: _worker(draw, "cpu-1-1", "cpu"))
fleets = randoms.map(drawn_fleet)
