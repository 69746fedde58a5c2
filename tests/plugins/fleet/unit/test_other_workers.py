"""Two machines that scale one pool are told of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.plugins.fleet import supervisor
from millstream.plugins.fleet.scaling import ScaleDecision
from millstream.plugins.fleet.supervisor import ELSEWHERE_S, PoolScaler
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.settings import Settings
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.parts import SupervisorParts
from millstream.services.supervisor.plan import Program

FIELDS: dict[str, object] = {
    "workers_min": 0,
    "workers_max": 4,
    "queue_rows": 0,
    "oldest_wait_s": 0,
    "arrival_rows_per_s": 0,
}
FIELDS |= {"capacity_rows_per_s": 0, "utilisation": 0, "reason": "idle", "decided_at": 0}


def decision(pool: str, ready: int) -> ScaleDecision:
    return ScaleDecision.model_validate({"pool": pool, "wanted": 0, "ready": ready, **FIELDS})


class Machine:
    """The supervisor of a machine on which workers run, by pool."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.shown: list[str] = []

    def parts(self, show: Callable[[str], None]) -> SupervisorParts:
        def never(*what: object) -> None:
            raise AssertionError(f"{what} is not wanted")

        return SupervisorParts(
            Settings(),
            RedisAddress.unix("/nowhere"),
            InstallationKeys("test"),
            workers=lambda: [_child(pool) for pool in self.workers],
            draining=list,
            start_worker=never,
            drain_worker=never,
            may_resize=lambda _: True,
            show=show,
        )

    def scaler(self) -> PoolScaler:
        return PoolScaler({"cpu": (0, 4), "gpu": (0, 4)}, self.parts(self.shown.append), _none)


def _child(pool: str) -> Child:
    async def on_death(child: Child, pid: int) -> bool:
        raise AssertionError(child, pid)

    return Child(Program(pool, (), pool=pool), Path(), print, on_death)


async def _none() -> dict[str, ScaleDecision]:
    return {}


def test_workers_elsewhere_are_told_of_once() -> None:
    machine = Machine()
    machine.workers = ["cpu"]
    scaler = machine.scaler()
    for second in range(200):
        scaler.look_elsewhere({"cpu": decision("cpu", 3)}, float(second))
        assert bool(machine.shown) is (second >= ELSEWHERE_S)
    assert len(machine.shown) == 1
    assert "pool cpu: 2 of its workers run elsewhere" in machine.shown[0]


def test_a_worker_that_ends_or_starts_here_is_none_elsewhere() -> None:
    machine = Machine()
    scaler = machine.scaler()
    decisions = {"cpu": decision("cpu", 2), "gpu": decision("gpu", 1)}
    for second in range(200):
        # A record outlives its worker for a while; three workers of gpu start.
        machine.workers = ["cpu"] * (1 if second % int(ELSEWHERE_S) else 2) + ["gpu"] * 4
        scaler.look_elsewhere(decisions, float(second))
    assert machine.shown == []


def test_the_scaler_looks_at_each_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ELSEWHERE_S", 0.0)

    async def work() -> str:
        shown: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def decisions() -> dict[str, ScaleDecision]:
            return {name: decision(name, 2) for name in ("cpu", "of-another-installation")}

        scaler = PoolScaler({"cpu": (0, 4)}, Machine().parts(shown.set_result), decisions)
        scaler.start()
        try:
            return await shown
        finally:
            await scaler.stop()

    assert "2 of its workers run elsewhere" in asyncio.run(work())
