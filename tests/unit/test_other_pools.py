"""Which of several pools loads a version that none has: the first with memory free, else the preferred one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.catalog.snapshot import ModelView, Replica, Snapshot, VersionView
from millstream.gateway.placement.decision import OtherPools, PassedOn
from millstream.gateway.placement.pool_fleets import PoolFleets
from millstream.services.model.manifest import EndpointPlacement
from millstream.services.placement.usage import NO_USAGE
from millstream.services.placement.views import Footprint
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord
from tests.kit.versions import publish

MB = 1 << 20
LOAD_S = 4.0
NOW = 10_000.0
FREE, FULL = 100, 10  # MB that a worker has free; a version takes 50


class Pools:
    """The pools of a version, of which each worker has so many MB free."""

    def __init__(self, home: Path, **free_mb: Sequence[int]) -> None:
        repository = FolderRepository(home)
        self.manifest, self.held = publish(repository, "m", 1), publish(repository, "held", 1)
        self.ordered: set[str] = set()
        self.pools = tuple(free_mb)
        self.snapshot = Snapshot({}, ())
        footprint = Footprint(50 * MB, load_s=LOAD_S)
        fleets = PoolFleets(lambda _manifest, _worker: footprint)
        self.choice = OtherPools(
            lambda: self.snapshot, fleets, lambda _manifest, _worker: footprint, lambda pool, _: pool in self.ordered
        )
        self.set(*(self.worker(pool, number, free) for pool, of in free_mb.items() for number, free in enumerate(of)))

    def worker(self, pool: str, number: int, free_mb: int, **fields: Any) -> WorkerRecord:
        """A worker that holds one other version, which was called a moment ago and long after its load."""
        held = InstanceRecord(
            content_id=self.held.content_id,
            model="held",
            version=1,
            state=State.READY,
            resident_bytes=50 * MB,
            load_s=LOAD_S,
            loaded_at=1.0,
            last_used=fields.pop("last_used", NOW),
            usage=NO_USAGE.pack(),
        )
        return WorkerRecord(
            id=f"{pool}-{number}",
            pool=pool,
            device="cpu",
            backend="onnxruntime",
            pid=1,
            host="h",
            started=0,
            instances=fields.pop("instances", (held,)),
            budget_bytes=200 * MB,
            used_bytes=(200 - free_mb) * MB,
            **fields,
        )

    def set(self, *workers: WorkerRecord) -> None:
        replicas = tuple(
            Replica(worker, one) for worker in workers for one in worker.instances if one.model == self.manifest.model
        )
        self.version = VersionView(self.manifest, State.STANDBY, None, replicas, Verdict(), self.pools, on_demand=True)
        model = ModelView("m", 1, 1, {1: self.version}, placement=EndpointPlacement())
        self.snapshot = Snapshot({"m": model}, workers)

    def loads(self, request: object, pool: str = "") -> str:
        """Return the pool that loads the version for a request: `pool`, by default the preferred one, or another."""
        pool = pool or self.pools[0]
        try:
            self.choice.check(pool, self.version, request)
        except PassedOn as passed:
            return passed.other
        return pool


@pytest.mark.parametrize(
    ("gpu", "cpu", "loads"),
    [
        ([FREE], [FREE], "gpu"),
        ([FULL], [FREE], "cpu"),
        ([FULL], [FULL, FREE], "cpu"),
        ([FULL, FREE], [FREE], "gpu"),
        ([FULL], [FULL], "gpu"),
        ([FULL], [], "gpu"),
        ([], [FREE], "cpu"),
    ],
)
def test_the_first_pool_with_memory_free_loads_it_else_the_preferred_one(
    tmp_path: Path, gpu: list[int], cpu: list[int], loads: str
) -> None:
    assert Pools(tmp_path, gpu=gpu, cpu=cpu).loads(object()) == loads


def test_requests_go_where_it_is_being_loaded_already(tmp_path: Path) -> None:
    pools = Pools(tmp_path, gpu=[FREE], cpu=[FULL])
    pools.ordered = {"cpu"}
    assert pools.loads(object()) == "cpu"
    pools.ordered = {"cpu", "gpu"}
    assert pools.loads(object()) == "gpu"


def test_a_request_that_comes_again_is_not_passed_on_by_the_same_pool(tmp_path: Path) -> None:
    pools = Pools(tmp_path, gpu=[FULL], cpu=[FULL], more=[FREE])
    first, second = object(), object()
    assert [pools.loads(first, pool) for pool in ("gpu", "cpu", "gpu", "cpu")] == ["more", "more", "gpu", "cpu"]
    assert pools.loads(second) == "more"


def test_a_pool_that_refused_it_or_failed_to_load_it_is_not_asked(tmp_path: Path) -> None:
    pools = Pools(tmp_path, gpu=[FULL], cpu=[FREE])
    content_id = pools.manifest.content_id
    refusal = RefusalRecord(content_id=content_id, kind="nothing_evictable", reason="r", until=NOW)
    gpu = pools.worker("gpu", 0, FULL)
    pools.set(gpu, pools.worker("cpu", 0, FREE, refusals=(refusal,)))
    assert pools.loads(object()) == "gpu"
    failed = InstanceRecord(content_id=content_id, model="m", version=1, state=State.FAILED)
    pools.set(gpu, pools.worker("cpu", 0, FREE, instances=(failed,)))
    assert pools.loads(object()) == "gpu"
    pools.set(gpu, pools.worker("cpu", 0, FREE))
    assert pools.loads(object()) == "cpu"


@pytest.mark.parametrize(
    ("free_mb", "last_used", "worth"),
    [(FREE, NOW, True), (FULL, NOW, False), (FULL, NOW - 7 * 86_400, True)],
    ids=["memory is free", "what is there is called", "what is there is not called"],
)
def test_what_another_pool_answers_moves_to_the_preferred_one_if_that_costs_little(
    tmp_path: Path, free_mb: int, last_used: float, worth: bool
) -> None:
    pools = Pools(tmp_path, gpu=[free_mb], cpu=[FREE])
    pools.set(pools.worker("gpu", 0, free_mb, last_used=last_used), pools.worker("cpu", 0, FREE))
    assert pools.choice.is_worth_moving("gpu", pools.manifest, NOW) == worth
