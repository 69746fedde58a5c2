"""Demands of one gateway on a virtual clock: whom they order, when they order again, and what callers are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.catalog.snapshot import ModelView, Replica, ScaleView, Snapshot, VersionView
from millstream.gateway.placement.decision import FAILED_RETRY_S, NO_WORKER_S, RETRY_S_MIN
from millstream.gateway.placement.demands import RETRIED_WITHIN_S, Demands
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.placement.views import Footprint
from millstream.services.queue.pipeline import RedisClock
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import InstanceRecord, LoadRecord, RefusalRecord, State, WorkerRecord
from tests.kit.versions import publish

LOAD_S = 4.0
MB = 1 << 20


@dataclass
class FakeLink:
    """Answers demands as the script does: one worker at a time for a lane."""

    alive: set[str]
    clock: RedisClock = field(default_factory=RedisClock)
    orders: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    calls: int = 0
    known: str = ""
    down: bool = False

    async def demand(self, lane: str, life_ms: int, order: bytes, workers: list[str]) -> tuple[str, bool]:
        self.calls += 1
        if self.down:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable")
        if self.known in self.alive:
            return self.known, False
        self.known = next((worker for worker in workers if worker in self.alive), "")
        if self.known:
            self.orders.append((self.known, json.loads(order)))
        return self.known, bool(self.known)


@dataclass(eq=False)
class FakeLane:
    manifest: Manifest
    link: Any  # a FakeLink
    ready: bool = False
    has_requests: bool = False
    pool: str = "cpu"
    refused: list[Failure] = field(default_factory=list)

    @property
    def content_id(self) -> str:
        return self.manifest.content_id

    def refuse_cold(self, failure: Failure) -> None:
        self.refused.append(failure)
        self.has_requests = False


@dataclass
class Waiting:
    arrival: float
    deadline: float


class Bench:
    """A gateway's demands for version 1 of model m; the test sets workers and clock."""

    def __init__(self, home: Path, load_s: float = LOAD_S, *, measured: bool = True) -> None:
        self.now = 1000.0
        repository = FolderRepository(home)
        self.manifest = publish(repository, "m", 1)
        self.other = publish(repository, "other", 1)
        self.link = FakeLink(set())
        self.link.clock.offset_ms = 0.0
        self.link.clock.now_ms = lambda: self.now * 1000  # type: ignore[method-assign]
        self.lane = FakeLane(self.manifest, self.link)
        self.load_s = load_s
        self.snapshot = Snapshot({}, ())
        self.models: dict[str, ModelView] = {}  # besides m
        self.elsewhere: list[FakeLane] = []  # lanes whose requests another pool answers
        self.demands = Demands(
            lambda: self.snapshot,
            self,
            lambda _manifest, _worker: Footprint(10 * MB, load_s=self.load_s, measured=measured),
            ScaleView(),
            lambda: self.now,
        )
        self.set_workers(self.worker("w1"), self.worker("w2"))

    def loadable(self, content_id: str) -> FakeLane | None:
        return self.lane if content_id == self.manifest.content_id else None

    def answered_elsewhere(self) -> list[FakeLane]:
        return self.elsewhere

    def worker(self, name: str, *instances: InstanceRecord, **fields: Any) -> WorkerRecord:
        of_worker: dict[str, Any] = {"pool": "cpu", "budget_bytes": 100 * MB, "used_bytes": 20 * MB} | fields
        return WorkerRecord(
            id=name, device="cpu", backend="onnxruntime", pid=1, host="h", started=0, instances=instances, **of_worker
        )

    def instance(self, state: State, manifest: Manifest | None = None, **fields: Any) -> InstanceRecord:
        manifest = manifest or self.manifest
        return InstanceRecord(content_id=manifest.content_id, model=manifest.model, version=1, state=state, **fields)

    def set_workers(self, *workers: WorkerRecord, state: State | None = None, verdict: Verdict | None = None) -> None:
        self.link.alive = {worker.id for worker in workers}
        replicas = tuple(
            Replica(worker, one)
            for worker in workers
            for one in worker.instances
            if one.content_id == self.manifest.content_id
        )
        best = state or (replicas[0].instance.state if replicas else State.STANDBY)
        version = VersionView(self.manifest, best, None, replicas, verdict or Verdict(), on_demand=True)
        model = ModelView("m", 1, 1, {1: version}, placement=EndpointPlacement())
        self.snapshot = Snapshot(self.models | {"m": model}, workers)
        self.lane.ready = best is State.READY
        self.demands.apply(self.snapshot, ())

    def call(self, timeout_s: float = 60.0) -> None:
        """A request for the version. Raises Failure if it is refused."""
        self.demands.check(self.lane, Waiting(self.now, self.now + timeout_s))
        self.lane.has_requests = True

    async def turn(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    @property
    def ordered(self) -> list[str]:
        return [worker for worker, _ in self.link.orders]


def run(test: Callable[[Bench], Coroutine[Any, Any, None]], home: Path, **options: Any) -> None:
    async def main() -> None:
        await test(Bench(home, **options))

    asyncio.run(main())


def test_a_thousand_requests_order_one_worker_once(tmp_path):
    async def test(bench: Bench) -> None:
        for _ in range(1000):
            bench.call()
        await bench.turn()
        assert (bench.link.calls, len(bench.ordered)) == (1, 1)
        [(_, order)] = bench.link.orders
        assert (order["do"], order["evict"], order["deadline"]) == ("load", True, bench.now + 60)
        for _ in range(1000):
            bench.call()
        await bench.turn()
        assert bench.link.calls == 1

    run(test, tmp_path)


def test_the_demand_ends_when_the_version_is_ready(tmp_path):
    async def test(bench: Bench) -> None:
        bench.call()
        await bench.turn()
        for state in (State.LOADING, State.WARMING):
            bench.set_workers(bench.worker("w1", bench.instance(state, why="a call")), bench.worker("w2"))
            bench.demands.repeat()
            await bench.turn()
        assert bench.link.calls == 1
        bench.set_workers(bench.worker("w1", bench.instance(State.READY)), bench.worker("w2"))
        assert bench.demands.count == 0
        assert bench.lane.refused == []

    run(test, tmp_path)


def test_another_worker_is_ordered_when_the_first_refuses_fails_or_is_gone(tmp_path):
    async def test(bench: Bench) -> None:
        bench.call()
        await bench.turn()
        [first] = bench.ordered
        second = "w2" if first == "w1" else "w1"
        refusal = RefusalRecord(
            content_id=bench.manifest.content_id, kind="nothing_evictable", reason="all in use", until=bench.now + 5
        )
        bench.link.known = ""  # the worker ended the demand
        bench.set_workers(bench.worker(first, refusals=(refusal,)), bench.worker(second))
        await bench.turn()
        assert bench.ordered == [first, second]
        bench.set_workers(
            bench.worker(first),
            bench.worker(second, bench.instance(State.FAILED, reason="no such operator")),
            state=State.FAILED,
        )
        bench.link.known = ""
        bench.demands.repeat()
        await bench.turn()
        assert bench.ordered == [first, second, first]
        bench.set_workers(bench.worker("w3"))
        await bench.turn()
        assert bench.ordered[-1] == "w3"
        assert bench.lane.refused == []

    run(test, tmp_path)


def test_requests_are_refused_with_the_reason_when_no_worker_loads_the_version(tmp_path):
    async def test(bench: Bench) -> None:
        bench.call()
        await bench.turn()
        refusals = tuple(
            RefusalRecord(content_id=bench.manifest.content_id, kind=kind, reason=kind, until=bench.now + 3)
            for kind in ("thrashing", "a kind of a later release")
        )
        bench.set_workers(bench.worker("w1", refusals=refusals[:1]), bench.worker("w2", refusals=refusals[1:]))
        [failure] = bench.lane.refused
        assert failure.http_status == 503
        assert failure.retry_after_s == pytest.approx(3)
        assert failure.message == "model 'm' cannot be loaded: thrashing"
        with pytest.raises(Failure, match="thrashing") as refused:
            bench.call()
        assert refused.value.retry_after == 3
        orders = len(bench.ordered)
        bench.now += 3.1
        bench.link.known = ""
        bench.call()  # it is worth another try
        await bench.turn()
        assert len(bench.ordered) == orders + 1

    run(test, tmp_path)


def test_a_worker_that_seems_to_have_no_room_decides_itself(tmp_path):
    async def test(bench: Bench) -> None:
        other = bench.instance(
            State.READY, bench.other, resident_bytes=20 * MB, load_s=1.0, loaded_at=bench.now - 4, last_used=bench.now
        )
        full = {"budget_bytes": 45 * MB, "used_bytes": 40 * MB}
        bench.set_workers(bench.worker("w1", other, **full))
        bench.call()
        await bench.turn()
        assert bench.ordered == ["w1"]
        reason = "it takes 48 MiB of memory, and a worker of pool cpu has 28 MiB for models"
        refusal = RefusalRecord(
            content_id=bench.manifest.content_id, kind="too_large", reason=reason, until=bench.now + 30
        )
        bench.link.known = ""
        bench.set_workers(bench.worker("w1", other, refusals=(refusal,), **full))
        with pytest.raises(Failure, match=reason) as refused:
            bench.call()
        assert refused.value.http_status == 503
        bench.demands.repeat()
        await bench.turn()
        assert bench.ordered == ["w1"]

    run(test, tmp_path)


def test_a_worker_with_free_memory_comes_before_one_that_would_unload(tmp_path):
    async def test(bench: Bench) -> None:
        used = bench.instance(
            State.READY, bench.other, resident_bytes=20 * MB, load_s=0.1, loaded_at=bench.now - 60, last_used=bench.now
        )
        full = bench.worker("w1", used, budget_bytes=45 * MB, used_bytes=40 * MB)
        for free in ("w0", "w2"):
            bench.set_workers(full, bench.worker(free))
            bench.call()
            await bench.turn()
        assert bench.ordered == ["w0", "w2"]

    run(test, tmp_path)


def test_a_load_longer_than_the_deadline_is_refused_and_ordered(tmp_path):
    async def test(bench: Bench) -> None:
        with pytest.raises(Failure, match="is loading, about 4 s") as refused:
            bench.call(timeout_s=1.0)
        assert (refused.value.code, refused.value.retry_after) == (Code.OVERLOADED, 4)
        await bench.turn()
        [(worker, order)] = bench.link.orders
        assert order["deadline"] == bench.now + LOAD_S + RETRIED_WITHIN_S  # the retry is to find it
        bench.set_workers(bench.worker(worker, bench.instance(State.LOADING, why="a call")))
        bench.now += 3.0
        with pytest.raises(Failure) as refused:
            bench.call(timeout_s=0.5)
        assert refused.value.retry_after_s == pytest.approx(1.0)
        bench.now += 0.6
        bench.call(timeout_s=0.5)  # 0.4 s are left
        await bench.turn()
        assert bench.link.calls == 1

    run(test, tmp_path)


def test_what_was_never_measured_is_tried_however_long_it_is_predicted_to_take(tmp_path):
    async def test(bench: Bench) -> None:
        bench.call(timeout_s=1.0)
        await bench.turn()
        [(_, order)] = bench.link.orders
        assert order["deadline"] == bench.now + 1.0

    run(test, tmp_path, load_s=4762.0, measured=False)


def test_loads_that_the_worker_makes_before_it_count_in_the_prediction(tmp_path):
    """Three loads of 4 s: the first has run for 1 s, and yields after 3 s."""

    async def test(bench: Bench) -> None:
        loading = [
            InstanceRecord(content_id=f"{name}:1:x", model="other", version=1, state=State.LOADING, why="a call")
            for name in ("first", "second")
        ]
        loads = (
            LoadRecord(content_id="first:1:x", began=bench.now - 1, yields_s=3.0),
            LoadRecord(content_id="second:1:x", yields_s=3.0),
        )
        bench.models = {"other": ModelView("other", 1, 1, {1: VersionView(bench.other, State.LOADING, None, ())})}
        bench.set_workers(bench.worker("w1", *loading, loads=loads))
        with pytest.raises(Failure) as refused:
            bench.call(timeout_s=8.0)
        assert refused.value.code is Code.OVERLOADED
        assert refused.value.retry_after_s == pytest.approx(2 + 3 + 4)
        bench.call(timeout_s=9.5)
        await bench.turn()
        assert bench.ordered == ["w1"]

        mine = bench.instance(State.LOADING, why="a call")
        queue = (*loads, LoadRecord(content_id=bench.manifest.content_id, yields_s=3.0))
        bench.set_workers(bench.worker("w1", *loading, mine, loads=queue))
        bench.now += 1
        with pytest.raises(Failure) as refused:
            bench.call(timeout_s=1.0)
        assert refused.value.retry_after_s == pytest.approx(8)
        assert bench.demands.load_s(bench.snapshot.models["m"].versions[1]) == pytest.approx(8)

    run(test, tmp_path)


def test_without_a_prediction_requests_wait(tmp_path):
    async def test(bench: Bench) -> None:
        bench.call(timeout_s=0.001)
        await bench.turn()
        assert len(bench.ordered) == 1

    run(test, tmp_path, load_s=0.0)


def test_what_waits_for_a_worker_to_start_is_demanded_when_it_has_started(tmp_path):
    async def test(bench: Bench) -> None:
        bench.set_workers(state=State.PENDING)
        bench.call()
        bench.demands.repeat()
        await bench.turn()
        assert (bench.link.calls, bench.lane.refused) == (0, [])
        bench.set_workers(bench.worker("w9"))
        await bench.turn()
        assert bench.ordered == ["w9"]

    run(test, tmp_path)


def test_an_order_that_redis_lost_is_repeated(tmp_path):
    async def test(bench: Bench) -> None:
        bench.link.down = True
        bench.call()
        await bench.turn()
        assert bench.ordered == []
        bench.link.down = False
        bench.demands.repeat()
        await bench.turn()
        assert len(bench.ordered) == 1
        bench.link.known = ""  # Redis was restarted empty
        bench.demands.repeat()
        await bench.turn()
        assert len(bench.ordered) == 2

    run(test, tmp_path)


def test_a_demand_that_no_request_waits_for_ends(tmp_path):
    async def test(bench: Bench) -> None:
        bench.call()
        await bench.turn()
        bench.lane.has_requests = False  # they all expired
        bench.demands.repeat()
        assert bench.demands.count == 0
        bench.set_workers(bench.worker("w5"))
        await bench.turn()
        assert len(bench.ordered) == 1

    run(test, tmp_path)


def test_a_version_on_its_way_back_is_demanded_for_batches_in_flight(tmp_path):
    async def test(bench: Bench) -> None:
        bench.lane.has_requests = True
        bench.demands.wanted(bench.lane)
        await bench.turn()
        assert len(bench.ordered) == 1

    run(test, tmp_path)


def test_an_activated_version_is_demanded_while_another_serves(tmp_path):
    async def test(bench: Bench) -> None:
        workers = (bench.worker("w1"),)
        standby = VersionView(bench.manifest, State.STANDBY, None, (), on_demand=True)
        model = ModelView("m", 1, 2, {1: standby, 2: VersionView(bench.other, State.READY, None, ())})
        bench.link.alive = {"w1"}
        bench.snapshot = Snapshot({"m": model}, workers)
        bench.demands.apply(bench.snapshot, {"m"})
        await bench.turn()
        [(worker, order)] = bench.link.orders
        assert (worker, order["deadline"], order["why"]) == ("w1", 0, "it was activated")
        bench.link.known = ""
        bench.demands.repeat()
        await bench.turn()
        assert len(bench.ordered) == 2  # until it is ready
        bench.set_workers(bench.worker("w1", bench.instance(State.READY)))
        assert bench.demands.count == 0

    run(test, tmp_path)


def test_the_usage_of_an_unloaded_version_goes_with_its_next_order(tmp_path):
    async def test(bench: Bench) -> None:
        used = bench.instance(State.READY, last_used=990.0, usage={"12": 3.0})
        bench.set_workers(bench.worker("w1", used))
        bench.set_workers(bench.worker("w1"))
        bench.call()
        await bench.turn()
        [(_, order)] = bench.link.orders
        assert order["usage"] == {"12": 3.0}
        assert bench.demands.usage.last_used(bench.manifest.content_id) == 990.0

    run(test, tmp_path)


def test_a_pool_without_workers_refuses_after_a_while_with_the_reason(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.set_workers(state=State.PENDING)
        bench.call()  # its last worker may be restarted
        bench.now += NO_WORKER_S
        bench.demands.repeat()
        [failure] = bench.lane.refused
        assert failure.code is Code.UNAVAILABLE
        assert f"pool cpu has had no worker for {NO_WORKER_S:.0f} s" in failure.message
        with pytest.raises(Failure, match="has had no worker"):
            bench.call()
        bench.set_workers(bench.worker("w3"))
        bench.call()
        await bench.turn()
        assert bench.ordered[-1] == "w3"

    run(test, tmp_path)


def test_a_version_in_use_is_loaded_in_its_preferred_pool_in_the_background(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.elsewhere = [bench.lane]
        bench.demands.repeat()
        await bench.turn()
        [(_, order)] = bench.link.orders
        assert (order["do"], order["why"], order["deadline"]) == ("load", "another pool answers its calls", 0)
        bench.elsewhere = []
        bench.now += RETRIED_WITHIN_S + 1
        bench.demands.repeat()
        assert bench.demands.count == 0  # it is not used any more

    run(test, tmp_path)


@pytest.mark.parametrize(("retry_in_s", "told_s"), [(45.0, 45.0), (-3.0, RETRY_S_MIN), (0.0, FAILED_RETRY_S)])
def test_a_failed_load_is_refused_until_its_worker_tries_again(tmp_path, retry_in_s, told_s):
    async def test(bench: Bench) -> None:
        retry_at = bench.now + retry_in_s if retry_in_s else 0.0
        failed = bench.instance(State.FAILED, reason="no such operator", retry_at=retry_at)
        bench.set_workers(bench.worker("w1", failed), state=State.FAILED)
        with pytest.raises(Failure, match="no such operator") as refused:
            bench.call()
        assert refused.value.retry_after_s == told_s

    run(test, tmp_path)
