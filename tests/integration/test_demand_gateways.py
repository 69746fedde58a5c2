"""First calls of versions that no worker has: real gateways and Redis, and workers that do what the test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import numpy as np
import pytest

from millstream.services.installation import installation_name
from millstream.services.model.manifest import Manifest
from millstream.services.queue.server import choose_binary
from millstream.services.repository import endpoint_changes
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings
from tests.kit import v2
from tests.kit.fleet import CALL_S_MAX, WAIT_S, Fleet, fleet
from tests.kit.metrics import Page
from tests.kit.redis_server import redis_server
from tests.kit.scripted_worker import LEASE_MS, ScriptedWorker
from tests.kit.versions import publish
from tests.kit.wait import wait_until

CALLS = 1000
REFUSED_S = 600  # longer than any test


class Gateways:
    """Two gateways on one Redis and repository, without workers of their own."""

    def __init__(self, machines: Fleet, address: Any) -> None:
        settings = Settings(home=machines.folder / "home")
        self.http = [machines.gateway(), machines.gateway()]
        self.repository = FolderRepository(settings.repository_dir)
        self._address, self._installation = address, installation_name(settings)
        self._workers: list[ScriptedWorker] = []
        self._names = 0

    def worker(self, **fields: Any) -> ScriptedWorker:
        self._workers.append(ScriptedWorker(self._address, self._installation, self.repository, **fields))
        return self._workers[-1]

    def end_workers(self) -> None:
        while self._workers:
            self._workers.pop().close()
        for http in self.http:
            wait_until(partial(_without_workers, http), what="no worker")

    def publish(self, name: str = "", version: int = 1) -> Manifest:
        self._names += 1
        manifest = publish(self.repository, name or f"m{self._names}", version)
        endpoint_changes.activate_version(self.repository, manifest.model, version)
        return manifest

    def state(self, manifest: Manifest, state: str) -> None:
        """Wait until both gateways show the version in this state."""
        path = f"/admin/v1/models/{manifest.model}/versions/{manifest.version}"
        for http in self.http:
            wait_until(partial(_says, http, path, "state", state), what=f"{manifest.model} {state}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    folder = tmp_path_factory.mktemp("redis")
    with (
        redis_server(choose_binary(""), folder) as address,
        fleet(tmp_path_factory.mktemp("fleet") / "machines", address, QUEUE_LEASE_S=LEASE_MS / 1000) as machines,
    ):
        yield Gateways(machines, address)


@pytest.fixture
def gateways(running: Gateways) -> Iterator[Gateways]:
    yield running
    running.end_workers()


def _without_workers(http: httpx2.Client) -> bool:
    return not http.get("/admin/v1/workers").json()["workers"]


def _says(http: httpx2.Client, path: str, member: str, value: object) -> bool:
    return bool(http.get(path).json().get(member) == value)


def infer(http: httpx2.Client, model: str, value: float = 1.0, timeout_s: float = WAIT_S) -> httpx2.Response:
    body, headers = v2.request(
        {"x": np.full((1, 4), value, np.float32)}, parameters={"timeout": round(timeout_s * 1e6)}
    )
    return http.post(f"/v2/models/{model}/infer", content=body, headers=headers)


def check(reply: httpx2.Response, value: float = 1.0) -> None:
    assert reply.status_code == 200, reply.text
    [answer] = v2.outputs(reply.content, dict(reply.headers)).values()
    assert answer.tolist() == [[2 * value] * 2]


def test_a_thousand_first_calls_through_two_gateways_cause_one_load(gateways):
    worker, other = gateways.worker(obedient=True), gateways.worker(obedient=True)
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    with ThreadPoolExecutor(32) as callers:
        replies = list(
            callers.map(
                lambda i: infer(gateways.http[i % 2], manifest.model, float(i)), range(CALLS), timeout=CALL_S_MAX
            )
        )
    for i, reply in enumerate(replies):
        check(reply, float(i))
    loads = Counter(worker.loads + other.loads)
    assert loads == {manifest.content_id: 1}
    assert len(worker.orders + other.orders) == 1


def test_a_first_call_is_answered_before_any_record_says_that_its_version_is_ready(gateways):
    worker = gateways.worker()
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    with ThreadPoolExecutor(1) as callers:
        call = callers.submit(infer, gateways.http[0], manifest.model)
        worker.until_ordered()
        worker.serve_unpublished(manifest)
        check(call.result())
    check(infer(gateways.http[0], manifest.model, 2.0), 2.0)
    assert _counts(gateways.http[0], manifest, "cold_requests_total", 1)
    assert _counts(gateways.http[0], manifest, "load_wait_seconds_count", 1)
    assert _counts(gateways.http[0], manifest, "model_cache_misses_total", 1)
    assert _counts(gateways.http[0], manifest, "model_cache_hits_total", 1)


def test_a_version_on_standby_is_shown_as_one_that_answers(gateways):
    gateways.worker()
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    http, name = gateways.http[0], manifest.model
    wait_until(lambda: http.get("/v2/health/ready").status_code == 200, what="the gateway is ready")
    for path in ("/v2/health/ready", f"/v2/models/{name}/ready", f"/v2/models/{name}/versions/1/ready", "/ping"):
        assert http.get(path).status_code == 200, path
    assert http.get(f"/v1/models/{name}").json()["model_version_status"][0]["state"] == "AVAILABLE"
    assert http.get(f"/v2/models/{name}").json()["versions"] == ["1"]
    index = {entry["name"]: entry for entry in http.post("/v2/repository/index", json={"ready": True}).json()}
    assert index[name]["state"] == "READY"
    assert "standby" in index[name]["reason"]


def test_calls_of_cold_models_are_counted_with_their_wait(gateways):
    worker = gateways.worker()
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    with ThreadPoolExecutor(3) as callers:
        calls = [callers.submit(infer, gateways.http[0], manifest.model) for _ in range(3)]
        worker.until_ordered()
        wait_until(partial(_counts, gateways.http[0], manifest, "cold_requests_total", 3), what="3 cold requests")
        assert _counts(gateways.http[0], manifest, "model_cache_hits_total", 0)
        worker.serve(manifest)
        for call in calls:
            check(call.result())
    check(infer(gateways.http[0], manifest.model))
    assert _counts(gateways.http[0], manifest, "cold_requests_total", 3)
    assert _counts(gateways.http[0], manifest, "load_wait_seconds_count", 3)
    assert _counts(gateways.http[0], manifest, "model_cache_misses_total", 3)
    assert _counts(gateways.http[0], manifest, "model_cache_hits_total", 1)


def _counts(http: httpx2.Client, manifest: Manifest, name: str, count: int) -> bool:
    page = Page(http.get("/metrics").text)
    return page.value(f"millstream_{name}", model=manifest.model) == count


def test_probes_of_readiness_load_nothing(gateways):
    worker = gateways.worker()
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    for _ in range(50):
        assert gateways.http[0].get(f"/v2/models/{manifest.model}/ready").status_code == 200
    assert worker.orders == []


def test_a_refusal_reaches_the_callers_that_wait_and_those_that_come(gateways):
    worker = gateways.worker()
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    with ThreadPoolExecutor(4) as callers:
        waiting = [callers.submit(infer, gateways.http[i % 2], manifest.model) for i in range(4)]
        worker.until_ordered()
        worker.refuse(manifest, "thrashing", "the models in memory were loaded a moment ago", REFUSED_S)
        replies = [call.result() for call in waiting] + [infer(http, manifest.model) for http in gateways.http]
    for reply in replies:
        assert reply.status_code == 503
        assert "loaded a moment ago" in reply.json()["error"]
        # One more: a gateway's estimate of Redis' clock is off by a little, and seconds are rounded up.
        assert 1 <= int(reply.headers["retry-after"]) <= REFUSED_S + 1
    # The gateway that did not give the order may give one, too, before it learns of the refusal.
    assert 1 <= len(worker.orders) <= len(gateways.http)


def test_another_worker_loads_what_the_first_refused(gateways):
    workers = {worker.id: worker for worker in (gateways.worker(), gateways.worker())}
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(infer, gateways.http[0], manifest.model)
        first = wait_until(lambda: next((one for one in workers.values() if one.orders), None), what="an order")
        [second] = [one for one in workers.values() if one is not first]
        first.refuse(manifest, "nothing_evictable", "all models are in use", REFUSED_S)
        second.until_ordered()
        second.load(manifest)
        second.serve(manifest)
        check(waiting.result())


def test_the_worker_that_was_ordered_dies_and_another_loads_it(gateways):
    workers = {worker.id: worker for worker in (gateways.worker(), gateways.worker())}
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(infer, gateways.http[0], manifest.model)
        first = wait_until(lambda: next((one for one in workers.values() if one.orders), None), what="an order")
        [second] = [one for one in workers.values() if one is not first]
        first.load(manifest)
        first.die()
        second.until_ordered()
        second.serve(manifest)
        check(waiting.result())


def test_requests_on_their_way_survive_an_unload(gateways):
    worker = gateways.worker()
    manifest = gateways.publish()
    gateways.state(manifest, "standby")
    with ThreadPoolExecutor(8) as callers:
        waiting = [callers.submit(infer, gateways.http[i % 2], manifest.model, float(i)) for i in range(8)]
        worker.until_ordered()
        for _ in range(3):
            orders = len(worker.orders)  # the next may come as soon as the version is unloaded
            worker.serve(manifest)
            worker.unload(manifest)
            # No worker serves the lane now: these wait for another load, and so do those of before that were too late.
            waiting += [callers.submit(infer, gateways.http[i % 2], manifest.model, float(i)) for i in range(8)]
            worker.until_ordered(orders + 1)
        worker.serve(manifest)
        for i, call in enumerate(waiting):
            check(call.result(), float(i % 8))


def test_an_activated_version_is_loaded_while_the_one_before_it_serves(gateways):
    worker = gateways.worker(obedient=True)
    before = gateways.publish()
    gateways.state(before, "standby")
    check(infer(gateways.http[0], before.model))
    gateways.state(before, "ready")
    after = gateways.publish(before.model, 2)
    gateways.state(after, "ready")  # without a call
    for http in gateways.http:
        wait_until(partial(_says, http, f"/admin/v1/models/{before.model}", "serving", 2), what="version 2")
    assert worker.orders[-1].why == "it was activated"
