"""When a version is on standby, which version serves then, and that a refresh costs nothing for models on standby."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from millstream.gateway.catalog.catalog import Catalog, UploadKey
from millstream.gateway.catalog.placements import Standby
from millstream.gateway.catalog.snapshot import ScaleView, Snapshot, SnapshotCell, VersionView
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.placement.views import RefusalKind
from millstream.services.queue.cluster_state import ClusterState, Exchanged
from millstream.services.repository import endpoint_changes
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.stored_models import StoredModels
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish


class Cluster:
    """The cluster state of a test: workers that it sets, and uploads of the catalog.

    `before_upload`: awaited once, right before the next upload is listed.
    """

    def __init__(self) -> None:
        self.live: tuple[WorkerRecord, ...] = ()
        self.listed: dict[UploadKey, State] = {}
        self.before_upload: Callable[[], Awaitable[None]] | None = None

    async def exchange(self, _name: str, _token: str | None) -> Exchanged:
        return Exchanged(self.live, {})

    async def uploads(self) -> dict[UploadKey, State]:
        return dict(self.listed)

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        if state is None:
            self.listed.pop((model, version), None)
            return
        act, self.before_upload = self.before_upload, None
        if act is not None:
            await act()
        self.listed[model, version] = state

    async def set_gateway(self, _name: str, _token: str | None) -> None: ...


class Bench:
    """A catalog over a real repository, whose worker follows it or not."""

    def __init__(self, home: Path) -> None:
        self.repository = FolderRepository(home)
        self.cluster = Cluster()
        self.changed: list[frozenset[str]] = []
        self.catalog = Catalog(
            "g", self.repository, cast("ClusterState", self.cluster), SnapshotCell(), ScaleView(), self._apply, {}
        )

    async def _apply(self, _snapshot: Snapshot, changed: Collection[str]) -> None:
        self.changed.append(frozenset(changed))

    def publish(self, name: str, version: int = 1, pools: tuple[str, ...] = ("cpu",)) -> Manifest:
        manifest = publish(self.repository, name, version, ModelConfig(pools=pools))
        endpoint_changes.activate_version(self.repository, name, version)
        return manifest

    def set_loaded(self, name: str, loaded: tuple[int, ...] | None) -> None:
        endpoint = self.repository.endpoint(name)
        self.repository.replace_endpoint(endpoint.model_copy(update={"loaded": loaded}))

    async def workers(self, **instances: tuple[InstanceRecord, ...]) -> None:
        """Let a worker of each pool hold these instances and follow the repository; "gpu" has GPUs."""
        token = self.repository.token()
        self.cluster.live = tuple(
            worker(*held, name=f"{pool}-0", pool=pool).model_copy(
                update={"token": token, "device": "cuda:0" if pool == "gpu" else "cpu"}
            )
            for pool, held in instances.items()
        )
        await self.catalog.refresh()

    async def worker(self, *instances: InstanceRecord, pool: str = "cpu", follows: bool = True) -> None:
        """Let a worker of the pool hold these instances and follow the present state of the repository, or none."""
        token = self.repository.token() if follows else ""
        self.cluster.live = (worker(*instances, pool=pool).model_copy(update={"token": token}),)
        await self.catalog.refresh()

    def version(self, name: str, version: int = 1) -> VersionView:
        return self.catalog.snapshot.models[name].versions[version]

    def serving(self, name: str) -> int | None:
        return self.catalog.snapshot.models[name].serving


def run(test: Callable[[Bench], Coroutine[Any, Any, None]], home: Path) -> None:
    async def main() -> None:
        await test(Bench(home))

    asyncio.run(main())


def test_a_version_is_on_standby_when_a_worker_knows_it_and_does_not_load_it(tmp_path):
    async def test(bench: Bench) -> None:
        bench.publish("m")
        await bench.worker(follows=False)
        assert bench.version("m").state is State.PENDING
        await bench.worker()
        assert bench.version("m").state is State.STANDBY
        assert bench.version("m").available
        bench.publish("n")
        await bench.catalog.refresh()  # the worker does not know n
        assert (bench.version("m").state, bench.version("n").state) == (State.STANDBY, State.PENDING)
        await bench.worker()
        assert bench.version("n").state is State.STANDBY

    run(test, tmp_path)


def test_a_version_that_a_worker_loads_by_itself_is_not_on_standby(tmp_path):
    async def test(bench: Bench) -> None:
        manifest = bench.publish("m")
        await bench.worker(instance(manifest, State.LOADING))
        assert not bench.version("m").available
        await bench.worker(instance(manifest))
        assert bench.version("m").ready
        await bench.worker()  # unloaded for another model
        assert bench.version("m").state is State.STANDBY
        for state in (State.LOADING, State.WARMING, State.READY, State.DRAINING):
            await bench.worker(instance(manifest, state))
            assert bench.version("m").available
        await bench.worker(instance(manifest, State.FAILED, "no such operator"))
        assert not bench.version("m").available

    run(test, tmp_path)


def test_a_pool_without_workers_has_nothing_on_standby(tmp_path):
    async def test(bench: Bench) -> None:
        bench.publish("m")
        await bench.worker()
        assert bench.version("m").state is State.STANDBY
        bench.cluster.live = ()
        await bench.catalog.refresh()
        assert bench.version("m").state is State.PENDING
        await bench.worker(pool="gpu")
        assert bench.version("m").state is State.PENDING
        await bench.worker(follows=False)
        assert bench.version("m").state is State.PENDING
        await bench.worker()
        assert bench.version("m").state is State.STANDBY

    run(test, tmp_path)


def test_an_unloaded_model_that_is_loaded_waits_for_the_worker_again(tmp_path):
    async def test(bench: Bench) -> None:
        bench.publish("m")
        await bench.worker()
        bench.set_loaded("m", ())
        await bench.worker()
        assert bench.version("m").state is State.UNLOADED
        bench.set_loaded("m", None)
        await bench.catalog.refresh()
        assert bench.version("m").state is State.PENDING
        await bench.worker()
        assert bench.version("m").state is State.STANDBY

    run(test, tmp_path)


def test_the_version_before_serves_until_an_activated_one_on_standby_is_ready(tmp_path):
    async def test(bench: Bench) -> None:
        first = bench.publish("m")
        await bench.worker(instance(first))
        second = bench.publish("m", 2)
        await bench.worker(instance(first))
        assert bench.version("m", 2).state is State.STANDBY
        assert bench.serving("m") == 1
        await bench.worker(instance(first), instance(second, State.LOADING))
        assert bench.serving("m") == 1
        await bench.worker(instance(first), instance(second))
        assert bench.serving("m") == 2
        await bench.worker(instance(first))  # it was unloaded: it still serves
        assert bench.serving("m") == 2

    run(test, tmp_path)


def test_an_active_version_on_standby_serves_if_the_one_before_is_not_ready(tmp_path):
    async def test(bench: Bench) -> None:
        oldest = bench.publish("m")
        bench.publish("m", 2)
        bench.publish("m", 3)
        await bench.worker(instance(oldest))  # ready, but neither active nor the version before
        assert bench.version("m", 3).state is State.STANDBY
        assert bench.serving("m") == 3

    run(test, tmp_path)


def test_a_version_on_standby_serves_on_for_an_active_one_that_failed(tmp_path):
    async def test(bench: Bench) -> None:
        first = bench.publish("m")
        await bench.worker(instance(first))
        second = bench.publish("m", 2)
        failed = instance(second, State.FAILED, "no such operator")
        await bench.worker(instance(first), failed)
        await bench.worker(failed)  # of a worker that was started meanwhile: it loads no version before the active one
        assert bench.version("m").state is State.STANDBY
        assert bench.serving("m") == 1

    run(test, tmp_path)


def test_a_refresh_reports_no_model_on_standby(tmp_path):
    async def test(bench: Bench) -> None:
        for number in range(20):
            bench.publish(f"m{number}")
        await bench.worker()
        bench.changed.clear()
        await bench.worker()
        bench.publish("another")
        await bench.worker()
        assert bench.changed == [frozenset(), {"another"}]

    run(test, tmp_path)


def test_a_removed_version_is_forgotten(tmp_path):
    async def test(bench: Bench) -> None:
        manifest = bench.publish("m")
        await bench.worker()
        bench.repository.delete_model("m")
        await bench.worker()
        assert not bench.catalog._standby.was_on_standby(manifest.content_id)

    run(test, tmp_path)


def test_a_version_of_several_pools_is_on_standby_in_any_of_them():
    standby = Standby()
    follows = worker(pool="b").model_copy(update={"token": "1"})
    assert standby.update((follows,), "1") == set()
    assert standby.state("m:1:d", "m", ("a", "b")) is State.STANDBY
    assert standby.state("n:1:d", "n", ("a",)) is State.PENDING
    assert standby.update((follows, follows.model_copy(update={"pool": "a"})), "1") == {"n"}
    assert standby.update((), "1") == {"m"}


def test_whoever_waits_learns_of_a_staged_version_that_no_model_has_yet(tmp_path):
    async def test(bench: Bench) -> None:
        bench.publish("served")
        await bench.worker()
        staged = publish(FolderRepository(tmp_path / "elsewhere"), "staged", 1)
        waiting = asyncio.create_task(bench.catalog.next_change(600))
        await asyncio.sleep(0)
        await bench.worker(instance(staged, State.LOADING))
        assert await asyncio.wait_for(waiting, 120)
        refused = RefusalRecord(
            content_id=staged.content_id, kind=RefusalKind.NOTHING_EVICTABLE, reason="no memory", until=9e9
        )
        waiting = asyncio.create_task(bench.catalog.next_change(600))
        await asyncio.sleep(0)
        bench.cluster.live = (bench.cluster.live[0].model_copy(update={"refusals": (refused,)}),)
        await bench.catalog.refresh()
        assert await asyncio.wait_for(waiting, 120)

    run(test, tmp_path)


def test_a_version_that_failed_in_one_pool_is_on_standby_in_the_other(tmp_path):
    async def test(bench: Bench) -> None:
        manifest = bench.publish("m", pools=("gpu", "cpu"))
        failed = instance(manifest, State.FAILED, "no such operator")
        await bench.workers(gpu=(failed,), cpu=())
        assert bench.version("m").state is State.STANDBY
        await bench.workers(gpu=(failed,), cpu=(failed,))
        assert bench.version("m").state is State.FAILED
        await bench.workers(gpu=(failed,))  # the CPU pool has no worker
        assert bench.version("m").state is State.FAILED

    run(test, tmp_path)


def test_a_verdict_of_one_kind_of_worker_leaves_the_others_their_versions(tmp_path):
    async def test(bench: Bench) -> None:
        manifest = bench.publish("m", pools=("gpu", "cpu"))
        bench.repository.verdicts.change(manifest, lambda one: one.with_failure("onnxruntime.cuda", "it crashes", 1.0))
        await bench.workers(gpu=(instance(manifest, State.FAILED, "it crashes"),), cpu=())
        assert bench.version("m").state is State.STANDBY
        await bench.workers(gpu=(instance(manifest, State.FAILED, "it crashes"),), cpu=(instance(manifest),))
        assert bench.version("m").ready
        bench.repository.verdicts.change(manifest, lambda one: one.with_failure("onnxruntime.cpu", "it hangs", 1.0))
        await bench.workers(gpu=(), cpu=())
        assert bench.version("m").state is State.FAILED
        assert bench.version("m").reason == "onnxruntime.cpu: it hangs; onnxruntime.cuda: it crashes"

    run(test, tmp_path)


def test_a_refresh_that_is_cancelled_loses_no_change(tmp_path, monkeypatch):
    """The thread that reads the repository goes on, and what it has read is new for no later refresh."""

    async def test(bench: Bench) -> None:
        await bench.catalog.refresh()
        bench.publish("m")
        read, reading, go_on = StoredModels.read, threading.Event(), threading.Event()

        def slow(stored: StoredModels) -> set[str]:
            reading.set()
            go_on.wait()
            return read(stored)

        monkeypatch.setattr(StoredModels, "read", slow)
        refresh = asyncio.ensure_future(bench.catalog.refresh())
        await asyncio.to_thread(reading.wait)
        refresh.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await refresh
        await bench.catalog.refresh()
        assert "m" in bench.catalog.snapshot.models

    run(test, tmp_path)


def test_an_upload_that_ends_while_it_is_renewed_is_listed_no_more(tmp_path):
    async def test(bench: Bench) -> None:
        await bench.catalog.set_upload("m", 1, State.CHECKING)
        bench.cluster.before_upload = lambda: bench.catalog.set_upload("m", 1, None)
        await bench.catalog.refresh()
        assert bench.cluster.listed == {}

    run(test, tmp_path)
