"""Hypothesis strategy for what the planner decides on: a fleet, and the versions that it serves."""

from __future__ import annotations

import random
from dataclasses import replace

from millstream.plugins.fleet.planned import ServedVersion
from millstream.services.placement.views import WorkerView
from tests.kit.fleets import IDS, NOW, chance, drawn_fleet, drawn_footprint, drawn_usage, randoms


def _version(draw: random.Random, content_id: str, fleet: list[WorkerView]) -> ServedVersion:
    """Return a version with the footprint and the usage that its instances show."""
    shown = [(worker, worker.instances[content_id]) for worker in fleet if content_id in worker.instances]
    smallest = draw.choice([0, 0, 0, 1, 2, 3])
    idle_s = draw.choice([0.0, 0.0, 300.0])
    return ServedVersion(
        content_id,
        draw.choice([("cpu",), ("gpu", "cpu"), ("cpu", "gpu")]),
        {pool: drawn_footprint(draw) for pool in ("cpu", "gpu")}
        | {worker.pool: one.footprint for worker, one in shown},
        instances_min=smallest,
        instances_max=draw.choice([0, max(1, smallest), smallest + 1]),
        idle_s=idle_s,
        pin=not idle_s and chance(draw, 0.1),
        calls_per_s=draw.choice([0.0, 0.01, 1.0, 5.0, 20.0]),
        run_s=draw.choice([0.0, 0.02, 0.1]),
        usage=shown[0][1].usage if shown else drawn_usage(draw),
        last_used=max([one.last_used for _, one in shown], default=draw.choice([0.0, NOW - draw.uniform(0, 5000)])),
    )


def _situation(draw: random.Random) -> tuple[list[WorkerView], list[ServedVersion]]:
    fleet = drawn_fleet(draw)
    versions = [_version(draw, content_id, fleet) for content_id in IDS]
    pinned = {version.content_id for version in versions if version.pin}
    return [_with_pins(worker, pinned) for worker in fleet], versions


def _with_pins(worker: WorkerView, pinned: set[str]) -> WorkerView:
    held = {one: replace(instance, pinned=one in pinned) for one, instance in worker.instances.items()}
    return replace(worker, instances=held)


situations = randoms.map(_situation)
