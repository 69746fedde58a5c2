"""Two machines that scale one pool are told of each other."""

from __future__ import annotations

import asyncio

import pytest

from millstream.plugins.fleet.scaling import ScaleDecision
from millstream.plugins.fleet.supervisor import other_workers
from millstream.plugins.fleet.supervisor.other_workers import ELSEWHERE_S, OtherWorkers
from millstream.plugins.fleet.supervisor.pool_scaler import PoolScaler
from millstream.services.supervisor.child import Child


def test_workers_elsewhere_are_told_of_once() -> None:
    shown: list[str] = []
    others = OtherWorkers(shown.append)
    for second in range(200):
        others.look("cpu", 3, 1, float(second))
        assert bool(shown) is (second >= ELSEWHERE_S)
    assert len(shown) == 1
    assert "pool cpu: 2 of its workers run elsewhere" in shown[0]


def test_a_worker_that_ends_or_starts_here_is_none_elsewhere() -> None:
    shown: list[str] = []
    others = OtherWorkers(shown.append)
    for second in range(200):
        others.look("cpu", 2, 1 if second % int(ELSEWHERE_S) else 2, float(second))  # a record that outlives its worker
        others.look("gpu", 1, 4, float(second))  # three start
    assert shown == []


def test_the_scaler_looks_at_each_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_workers, "ELSEWHERE_S", 0.0)
    decision = ScaleDecision(
        pool="cpu",
        wanted=0,
        ready=2,
        workers_min=0,
        workers_max=4,
        queue_rows=0,
        oldest_wait_s=0.0,
        arrival_rows_per_s=0.0,
        capacity_rows_per_s=0.0,
        utilisation=0.0,
        reason="idle",
        decided_at=0.0,
    )

    async def work() -> str:
        shown: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def decisions() -> dict[str, ScaleDecision]:
            return {"cpu": decision, "of-another-installation": decision}

        def start(pool: str, index: int) -> Child:
            raise AssertionError(f"{pool}-{index} is not wanted")

        scaler = PoolScaler({"cpu": (0, 4)}, list, decisions, start, 1.0, lambda _: False, shown.set_result)
        scaler.start()
        try:
            return await shown
        finally:
            await scaler.stop()

    assert "2 of its workers run elsewhere" in asyncio.run(work())
