"""The gateway's prices of workers: made anew for those that changed, and the choice is that of a new gateway."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from millstream.gateway.catalog.snapshot import ModelView, Replica, Snapshot, VersionView
from millstream.gateway.placement.decision import ASKED_MAX, WAIT, ColdVersion, decide
from millstream.gateway.placement.pool_fleets import NOISE_SHARE, PoolFleets
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint, Refusal, RefusalKind
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord
from tests.kit.versions import publish

WORKERS, HELD, COLD = 200, 25, 1000
NOW = 10_000.0
MB = 1 << 20
NEED = Footprint(40 * MB, 4 * MB, 2.0)


@cache
def _instance(name: str, last_used: float = NOW - 300, state: State = State.READY) -> InstanceRecord:
    return InstanceRecord(
        content_id=f"{name}:1:x",
        model=name,
        version=1,
        state=state,
        why="a call",
        resident_bytes=40 * MB if state is State.READY else 0,
        load_s=2.0,
        loaded_at=NOW - 900,
        last_used=last_used,
        usage={"30": 3.0, "mean": 200.0, "deviation": 90.0, "count": 3},
    )


def _worker(at: int, **fields: object) -> WorkerRecord:
    names = [f"m{WORKERS * number + at}" for number in range(HELD)]
    instances = tuple(_instance(name, NOW - 100 - number) for number, name in enumerate(names))
    record = WorkerRecord(
        id=f"cpu-{at}-1", pool="cpu", device="cpu", backend="onnxruntime", pid=1, host="h", started=0.0
    )
    full = {"budget_bytes": 1100 * MB, "used_bytes": 1090 * MB, "instances": instances}
    return record.model_copy(update=full | fields)


def _snapshot(workers: tuple[WorkerRecord, ...]) -> Snapshot:
    return Snapshot({}, workers)


def _cold(
    fleets: PoolFleets,
    snapshot: Snapshot,
    manifest: Manifest,
    model: str = "cold",
    now: float = NOW,
    replicas: tuple[Replica, ...] = (),
) -> ColdVersion:
    version = VersionView(manifest.model_copy(update={"model": model}), State.STANDBY, None, replicas, on_demand=True)
    return ColdVersion(version, "cpu", fleets.of(snapshot, "cpu"), "", NEED, now)


def _chosen(cold: ColdVersion) -> list[str]:
    decision = decide(cold)
    assert isinstance(decision, list)
    return decision


def _fleets() -> PoolFleets:
    return PoolFleets(lambda _manifest, _worker: NEED)


def test_a_thousand_cold_calls_among_200_workers_price_each_worker_once_and_then_only_what_changed(tmp_path):
    manifest = publish(FolderRepository(tmp_path), "cold", 1)
    workers = tuple(_worker(at) for at in range(WORKERS))
    fleets, snapshot = _fleets(), _snapshot(workers)
    fleet = fleets.of(snapshot, "cpu").fleet
    for at in range(COLD):
        assert len(_chosen(_cold(fleets, snapshot, manifest, f"c{at}"))) == ASKED_MAX
    assert fleet.quoted == WORKERS

    # Heartbeats: other record objects, used memory changes a little, one of them by more, and one has a new instance.
    noise = int(NOISE_SHARE * 1100 * MB) - 1
    later = [one.model_copy(update={"heartbeat": 1.0, "used_bytes": one.used_bytes + noise}) for one in workers]
    later[3] = later[3].model_copy(update={"used_bytes": 1000 * MB})
    later[4] = later[4].model_copy(update={"instances": (*later[4].instances[1:], _instance("new"))})
    snapshot = _snapshot(tuple(later))
    for at in range(COLD):
        decide(_cold(fleets, snapshot, manifest, f"c{at}"))
    assert fleet.quoted == WORKERS + 2
    chosen = _chosen(_cold(fleets, snapshot, manifest, "c7"))
    assert chosen[0] == "cpu-3-1", "it has memory now"
    assert chosen == decide(_cold(_fleets(), snapshot, manifest, "c7")), "as a gateway that has just started"


def test_orders_count_until_the_workers_next_record(tmp_path):
    manifest = publish(FolderRepository(tmp_path), "cold", 1)
    workers = (_worker(0, used_bytes=0, instances=()), _worker(1, used_bytes=0, instances=()))
    fleets, snapshot = _fleets(), _snapshot(workers)
    first = _chosen(_cold(fleets, snapshot, manifest))[0]
    fleets.of(snapshot, "cpu").ordered(first, manifest.content_id, NEED, NOW)
    second = _chosen(_cold(fleets, snapshot, manifest, "next"))[0]
    fleets.of(snapshot, "cpu").ordered(second, "next:1:x", NEED, NOW)
    assert {first, second} == {"cpu-0-1", "cpu-1-1"}
    again = _snapshot(tuple(one.model_copy(update={"heartbeat": 1.0}) for one in workers))  # they refused
    assert fleets.of(again, "cpu").fleet[first].used_bytes == 0


def test_loads_that_a_worker_has_begun_count_in_its_price(tmp_path):
    """What an instance takes that is being loaded is not in its record: it is predicted from the manifest."""
    manifest = publish(FolderRepository(tmp_path), "loading", 1)
    models = {"loading": ModelView("loading", 1, 1, {1: VersionView(manifest, State.LOADING, None, ())})}
    free = {"used_bytes": 0, "instances": ()}
    loading = InstanceRecord(
        content_id=manifest.content_id, model="loading", version=1, state=State.LOADING, why="a call"
    )
    workers = (_worker(0, **free), _worker(1, **free | {"instances": (loading,)}))
    snapshot = Snapshot(models, workers)
    fleets = _fleets()
    for at in range(20):
        assert _chosen(_cold(fleets, snapshot, manifest, f"c{at}"))[0] == "cpu-0-1"
    view = fleets.of(snapshot, "cpu").fleet["cpu-1-1"]
    assert view.loading_s == NEED.load_s


def test_a_pin_that_is_set_protects_instances_in_the_next_snapshot(tmp_path):
    manifest = publish(FolderRepository(tmp_path), "m0", 1)
    model = ModelView("m0", 1, 1, {1: VersionView(manifest, State.READY, None, ())})
    fleets, workers = _fleets(), (_worker(0),)
    assert not fleets.of(Snapshot({"m0": model}, workers), "cpu").fleet["cpu-0-1"].instances["m0:1:x"].pinned
    pinned = replace(model, placement=model.placement.model_copy(update={"pin": True}))
    view = fleets.of(Snapshot({"m0": pinned}, workers), "cpu").fleet["cpu-0-1"]
    assert view.instances["m0:1:x"].pinned
    assert not view.instances["m200:1:x"].pinned


def test_workers_that_refuse_drain_or_are_gone_are_not_ordered(tmp_path):
    manifest = publish(FolderRepository(tmp_path), "cold", 1)
    refusal = RefusalRecord(
        content_id=manifest.content_id, kind="nothing_evictable", reason="all are pinned", until=NOW + 3
    )
    workers = (_worker(0), _worker(1, refusals=(refusal,)), _worker(2, draining=True), _worker(3))
    fleets, snapshot = _fleets(), _snapshot(workers)
    assert sorted(_chosen(_cold(fleets, snapshot, manifest))) == ["cpu-0-1", "cpu-3-1"]
    fewer = _snapshot(workers[1:3])
    refused = decide(_cold(fleets, fewer, manifest))
    assert isinstance(refused, Refusal)
    assert (refused.kind, refused.retry_after_s) == (RefusalKind.NOTHING_EVICTABLE, 3.0)
    assert decide(_cold(fleets, fewer, manifest, now=NOW + 4)) == ["cpu-1-1"], "the refusal is over"
    only = _snapshot(workers[2:3])
    assert decide(_cold(fleets, only, manifest)) is WAIT, "a worker may start"
    failed = Replica(workers[0], _instance("cold", state=State.FAILED))
    assert decide(_cold(fleets, snapshot, manifest, replicas=(failed,))) == ["cpu-3-1"]
