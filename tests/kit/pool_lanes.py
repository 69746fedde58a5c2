"""The lanes of one version in several pools; the test says what each pool has, answers its batches, and moves time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from millstream.gateway.scheduling.batching.queue_policy import QueueRules
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.request import Request, Responder
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.profile import Profile
from tests.kit.lane_harness import PERMITS, ROWS_WAITING_MAX, HeldLink, LaneBench
from tests.kit.responders import DISCARD

UNUSED = cast("Any", None)  # parts of a route that read requests and write replies


class PoolLanes:
    """`lanes` and `links` by pool, in order of preference. All pools have workers; none has the version."""

    def __init__(
        self,
        home: Path,
        profiles: dict[str, dict[int, float]],
        *,
        permits: int = PERMITS,
        rows_waiting_max: int = ROWS_WAITING_MAX,
        config: ModelConfig | None = None,
    ) -> None:
        self.bench = LaneBench(
            home, next(iter(profiles.values())), 0, permits=permits, rows_waiting_max=rows_waiting_max, config=config
        )
        self.profiles = profiles
        self.owner = self.bench.owner
        self.staffed = self.owner.staffed
        self.staffed |= dict.fromkeys(profiles, True)
        manifest = self.bench.lane.manifest
        rules = QueueRules(manifest.config) if QueueRules.needed(manifest.config) else None
        self.route = ModelRoute(UNUSED, UNUSED, UNUSED, UNUSED, 60.0, rules)
        self.links = {pool: HeldLink(self.bench.producer, pool) for pool in profiles}
        self.lanes: dict[str, Lane] = {}
        for pool, link in self.links.items():
            context = replace(self.bench.shared, pool=pool, link=link)
            packer = Packer(manifest.signature, None, 1 << 10)
            metrics = LaneMetrics(self.bench.tally, manifest, pool)
            self.lanes[pool] = Lane(manifest, context, packer, metrics, rules, self.route)
            self.bench.lanes.add(self.lanes[pool])
        self.route.set_lanes(list(self.lanes.values()))

    def has(self, pool: str, instances: int, *, failed: str | None = None, held: bool | None = None) -> None:
        """Report what the workers of a pool have. `held`: whether any still answers batches; None: if one is ready."""
        profile, lane = self.profiles[pool], self.lanes[pool]
        lane.state.held = instances > 0 if held is None else held
        lane.update_instances(instances, Profile(profile), max(profile), same_host=False, failed=failed)
        self.route.choose()

    def add(self, rows: int = 1, timeout_s: float = 60.0, priority: int = 0, responder: Responder = DISCARD) -> Request:
        """Add a request that arrives now, and return it. Raises Failure if no lane takes it."""
        request = self.bench.request(rows, timeout_s, priority, responder)
        self.route.lane.add(request, 16 * rows)
        return request

    def turn(self) -> None:
        self.bench.turn()

    def answer(self, pool: str, at: int = 0) -> None:
        """Answer a batch that was put to a pool, also one that was withdrawn since."""
        self.bench.link = self.links[pool]
        self.bench.answer(at)

    def waiting(self, pool: str) -> int:
        """Return how many requests wait in a pool's lane."""
        return self.lanes[pool].waiting

    def in_flight(self, pool: str) -> list[int]:
        """Return the requests of each batch in flight to a pool."""
        return [len(batch.requests) for batch in self.bench.pending.values() if batch.lane is self.lanes[pool].state]
