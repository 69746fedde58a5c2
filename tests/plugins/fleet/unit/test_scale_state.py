"""What autoscaling keeps in Redis, on every server that is to be had, whose clock is set and whose data may be odd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from millstream.plugins.fleet import scale_state
from millstream.plugins.fleet.controller.autoscale.decision import ScaleLimits
from millstream.plugins.fleet.controller.autoscaler import Autoscaler
from millstream.plugins.fleet.controller.metrics import ScaleMetrics
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.plugins.fleet.scaling import GatewayLoads, PoolLoad, ScaleDecision, is_fresh
from millstream.services.metrics.page import MetricsPage
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from tests.kit.catalog import worker
from tests.kit.pool import Pool

KEYS = InstallationKeys("test")
LIMITS = ScaleLimits(1, 8, latency_s=0.2, down_s=60)
UNBOUNDED = ScaleLimits(0, 1024, down_s=1, bounded=False)
HOUR_S, DAY_S = 3600.0, 86_400.0


@pytest.fixture(autouse=True)
def lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports do not expire in Redis because this machine lets the test wait."""
    monkeypatch.setattr(scale_state, "LOADS_LIFE_S", 600.0)


class SetClock(ScaleState):
    """The state in a Redis whose clock stands still, and is set by `step_s`."""

    step_s = 0.0
    _began: float | None = None

    async def _now(self) -> float:
        if self._began is None:
            self._began = await super()._now()
        return self._began + self.step_s


class Scene:
    """An autoscaler that leads, and one gateway, under a monotonic clock that a test moves."""

    def __init__(self, address: RedisAddress, limits: Mapping[str, ScaleLimits] | None = None) -> None:
        self.metrics = MetricsRegistry(None, "test")
        self._limits = {"cpu": LIMITS} if limits is None else limits
        self.now = 1000.0
        self.state = SetClock(address, KEYS)
        self._cluster = ClusterState(address, KEYS)
        self._work_s = 0.0
        self._counted_s = 0.0
        self.autoscaler = self.new_autoscaler()

    def new_autoscaler(self) -> Autoscaler:
        metrics = ScaleMetrics(self.metrics)
        return Autoscaler(
            lambda: True, self._cluster, self.state, self._limits, UNBOUNDED, metrics, clock=lambda: self.now
        )

    async def rounds(self, seconds: int, work_s: float) -> list[int]:
        """Let work arrive each second; return the workers that were wanted, as others read it."""
        wanted = []
        for _ in range(seconds):
            self.now += 1
            self._counted_s += 1
            self._work_s += work_s
            await self.report()
            await self.autoscaler.round()
            decision, now = await self.decision()
            assert is_fresh(decision, now)
            wanted.append(decision.wanted)
        return wanted

    async def report(self) -> None:
        load = PoolLoad(rows=round(self._work_s * 100), work_s=self._work_s, run_s=0.01)
        await self.state.exchange("g", GatewayLoads(pools={"cpu": load}, counted_s=self._counted_s))

    async def decision(self) -> tuple[ScaleDecision, float]:
        decisions, now = await self.state.decisions()
        return decisions["cpu"], now

    async def close(self) -> None:
        await self.state.close()
        await self._cluster.close()


def play(
    address: RedisAddress,
    steps: Callable[[Scene], Awaitable[None]],
    limits: Mapping[str, ScaleLimits] | None = None,
) -> None:
    async def run() -> None:
        scene = Scene(address, limits)
        try:
            await steps(scene)
        finally:
            await scene.close()

    asyncio.run(run())


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S])
def test_a_clock_that_is_set_changes_no_pool(redis_address, stored, step_s):
    async def steps(scene: Scene) -> None:
        before = (await scene.rounds(30, 2.0))[-1]
        assert 1 < before < LIMITS.workers_max
        scene.state.step_s = step_s
        assert set(await scene.rounds(30, 2.0)) == {before}
        # Neither an hour longer nor at once: when `down_s` has passed.
        fallen = await scene.rounds(130, 0.0)
        assert (fallen[0], fallen[-1]) == (before, 1)

    play(redis_address, steps)


def test_changes_of_a_pools_size_are_kept_newest_first_and_bounded(redis_address, stored, monkeypatch):
    monkeypatch.setattr(scale_state, "CHANGES_MAX", 3)

    async def steps(scene: Scene) -> None:
        wanted = await scene.rounds(30, 2.0)
        wanted += await scene.rounds(130, 0.0)
        changed = [now for before, now in zip([0, *wanted], wanted, strict=False) if now != before]
        assert len(changed) > 2
        found = await scene.state.changes("cpu")
        assert [one.wanted for one in found] == changed[:-4:-1]
        assert all(one.explanation for one in found)
        scene.autoscaler = scene.new_autoscaler()  # another one leads, and goes on
        await scene.rounds(5, 0.0)
        assert await scene.state.changes("cpu") == found
        assert await scene.state.changes("gone") == []

    play(redis_address, steps)


def test_redis_that_lost_its_data_does_not_count_what_arrived_long_ago(redis_address, stored):
    """For a moment no gateway has reported: its counters since its start are nothing that arrived now."""

    async def steps(scene: Scene) -> None:
        await scene.rounds(30, 0.5)
        scene._work_s += 1e6  # in a month of which this controller knows nothing
        scene._counted_s += 1e6
        scene.autoscaler = scene.new_autoscaler()
        stored.flushall()
        await scene.autoscaler.round()
        assert max(await scene.rounds(20, 0.5)) == 1
        stored.flushall()
        scene.now += 1
        await scene.autoscaler.round()
        assert max(await scene.rounds(20, 0.5)) == 1

    play(redis_address, steps)


@pytest.mark.parametrize(("age_s", "wanted"), [(10.0, 6), (-10.0, 6), (DAY_S, 1), (-DAY_S, 1)])
def test_a_new_leader_keeps_what_was_wanted_lately_only(redis_address, stored, age_s, wanted):
    async def steps(scene: Scene) -> None:
        await scene.rounds(1, 0.0)
        old, now = await scene.decision()
        await scene.state.decide([old.model_copy(update={"wanted": 6, "decided_at": now - age_s})])
        scene.autoscaler = scene.new_autoscaler()
        assert await scene.rounds(1, 0.0) == [wanted]

    play(redis_address, steps)


def test_a_pool_that_no_setting_names_gets_no_order(redis_address, stored):
    """The default of a controller that runs alone: two workers without load stay two, and no scaler gets a number."""
    pool = Pool(redis_address, "cpu")
    for name in ("a", "b"):
        pool.worker(name).beat(worker(name=name).model_dump_json().encode(), 60_000)

    async def steps(scene: Scene) -> None:
        assert set(await scene.rounds(10, 0.0)) == {2}
        decision, _ = await scene.decision()
        assert decision.reason == "unbounded"
        shown = MetricsPage(scene.metrics).render(None)[0].decode()
        assert "millstream_pool_queue_rows" in shown
        assert "millstream_workers_wanted" not in shown
        pool.worker("b").leave(1)
        assert set(await scene.rounds(3, 50.0)) == {1}

    try:
        play(redis_address, steps, {})
    finally:
        pool.close()


@pytest.mark.parametrize(
    "numbers",
    [
        '"work_s": NaN',
        '"work_s": Infinity',
        '"work_s": -1',
        '"queue_work_s": NaN',
        '"run_s": Infinity',
        '"oldest_wait_s": 1e300',
        '"rows": -5',
        f'"rows": 1{"0" * 400}',
        '"rows": null',
    ],
)
def test_numbers_that_cannot_be_take_no_decision_from_other_gateways(redis_address, stored, numbers):
    async def steps(scene: Scene) -> None:
        await scene.rounds(2, 0.0)
        stored.hset(KEYS.loads, "odd", f'9999999999 {{"pools": {{"cpu": {{{numbers}}}}}}}')
        odd = f'{await scene.state._now() + 3:.3f} {{"pools": {{"cpu": {{{numbers}}}}}}}'
        stored.hset(KEYS.loads, "odd-too", odd)
        assert (await scene.rounds(20, 2.0))[-1] > 1
        assert set(await scene.state.loads()) == {"g"}

    play(redis_address, steps)


def test_a_report_from_before_the_clock_was_set_back_is_that_of_a_dead_gateway(redis_address, stored):
    """Its rows would wait for as long as the clock was set back, and keep the pool's workers."""

    async def steps(scene: Scene) -> None:
        scene.state.step_s = HOUR_S
        dead = GatewayLoads(pools={"cpu": PoolLoad(queue_rows=1000, queue_work_s=1000.0)})
        await scene.state.exchange("dead", dead)
        scene.state.step_s = 0.0
        await scene.report()
        assert set(await scene.state.loads()) == {"g"}
        assert not stored.hexists(KEYS.loads, "dead")

    play(redis_address, steps)


def test_decisions_that_cannot_be_read_are_left_out(redis_address, stored):
    async def steps(scene: Scene) -> None:
        await scene.rounds(1, 0.0)
        stored.hset(KEYS.scale, b"\xff\xfe", "{}")
        stored.hset(KEYS.scale, "odd", b"\xff")
        decisions, _ = await scene.state.decisions()
        assert set(decisions) == {"cpu"}

    play(redis_address, steps)
