"""A worker with memory for three models of five: what it loads, unloads and refuses, whatever happens meanwhile.

Orders are given as gateways give them; models are those of the simulated backend, which claim their bytes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import numpy as np
import pytest

from millstream.services.model.manifest import EndpointPlacement, Manifest, ModelConfig
from millstream.services.queue.consumer_link import ConsumerLink
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.footprints import Measured
from millstream.services.wire.orders import Order
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from tests.kit import v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

MIB = 1 << 20
MODEL_BYTES = 200 * MIB
BUDGET_BYTES = 800 * MIB  # three models and the interpreter
ROW = np.ones((1, 4), np.float32)
LIFE_MS = 600_000
LEASE_S = 5.0  # no supervisor tells of the death of these workers


class Shop:
    """A running stack whose pool `pool` has one worker with the simulated backend, and its repository."""

    def __init__(self, stack: Stack, pool: str) -> None:
        self.stack = stack
        self.pool = pool
        self.repository = FolderRepository(stack.home / "repository")
        self.keys = InstallationKeys(stack.installation).pool(pool)
        self._link = ConsumerLink(RedisAddress.unix(str(stack.socket)))
        self.load_scripts()
        self._exits = ExitStack()
        self.worker: subprocess.Popen[bytes] | None = None

    def load_scripts(self) -> None:
        for name in ("demand", "end_demand"):
            self._link.call("SCRIPT", "LOAD", script(name).text)

    def start(self, index: int = 0) -> None:
        """Start the worker, and wait for its first record."""
        settings = {"queue_lease_s": LEASE_S, "worker_memory": f"{BUDGET_BYTES >> 20}MiB"}
        self.worker = self._exits.enter_context(running_worker(self.stack, self.pool, index=index, settings=settings))
        pid, token = self.worker.pid, self.repository.token()
        wait_until(lambda: any(one.pid == pid and one.token == token for one in self.records), what="its record")

    def close(self) -> None:
        self._exits.close()
        self._link.close()

    def publish(self, name: str, **behaviour: Any) -> Manifest:
        behaviour.setdefault("bytes", MODEL_BYTES)
        return publish_simulated(self.repository, name, behaviour, config=ModelConfig(pools=(self.pool,)))

    @property
    def records(self) -> list[WorkerRecord]:
        redis: Any = self.stack.redis
        found: list[WorkerRecord] = []
        for worker in redis.zrange(self.keys.workers, 0, -1):
            data = redis.get(self.keys.record(worker.decode()))
            stored = redis.hvals(self.keys.instances(worker.decode()))
            if data:
                instances = tuple(InstanceRecord.model_validate_json(one) for one in stored)
                found.append(WorkerRecord.model_validate_json(data).model_copy(update={"instances": instances}))
        return found

    @property
    def record(self) -> WorkerRecord:
        assert self.worker is not None
        [record] = [one for one in self.records if one.pid == self.worker.pid]
        return record

    def instance(self, manifest: Manifest) -> InstanceRecord | None:
        for record in self.records:
            for instance in record.instances:
                if instance.content_id == manifest.content_id:
                    return instance
        return None

    def is_ready(self, manifest: Manifest) -> bool:
        instance = self.instance(manifest)
        return instance is not None and instance.state is State.READY

    def until_ready(self, manifest: Manifest) -> None:
        wait_until(lambda: self.is_ready(manifest), what=f"{manifest.model} is ready")

    def until_known(self, name: str) -> None:
        """Wait until the gateway knows a model, and the worker has seen it."""
        wait_until(lambda: self.stack.http.get(f"/v2/models/{name}").status_code == 200, what=f"{name} is known")
        wait_until(lambda: self.record.token == self.repository.token(), what="the worker has seen it")

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in (self.stack.home / "logs").glob(f"{self.pool}-*.log"))

    def until_answers(self, name: str) -> None:
        """Call a model until it answers; it may be refused for a while, but only with a time to try again."""

        def answers() -> bool:
            reply = self.infer(name)
            assert reply.status_code == 200 or float(reply.headers["retry-after"]) > 0, reply.text
            return reply.status_code == 200

        wait_until(answers, 90, what=f"{name} answers")

    def ready(self) -> set[str]:
        return {instance.model for instance in self.record.instances if instance.state is State.READY}

    def settled(self) -> set[str]:
        """Wait until nothing loads, and the worker follows the repository; return the models that are ready."""

        def quiet() -> bool:
            record = self.record
            states = {instance.state for instance in record.instances}
            return states <= {State.READY, State.FAILED} and record.token == self.repository.token()

        wait_until(quiet, what="nothing loads")
        return self.ready()

    def order(self, manifest: Manifest, **fields: Any) -> bool:
        """Order the worker to load a version, as a gateway does; False: it was ordered before, or is served."""
        order = Order(do="load", content_id=manifest.content_id, why="a call", evict=True, **fields)
        call = script_call(
            "demand",
            self.keys,
            (self.keys.demands,),
            manifest.content_id,
            LIFE_MS,
            order.model_dump_json(),
            self.record.id,
        )
        return bool(self._link.call(*call)[1])

    def load(self, manifest: Manifest) -> None:
        """Order the worker to load a version until it has: it refuses while all others are too young to be unloaded."""

        def loaded() -> bool:
            return self.is_ready(manifest) or (self.order(manifest) and False)

        wait_until(loaded, 90, what=f"{manifest.model} is ready")

    def push(self, order: Order) -> None:
        """Give the worker an order as the controller does."""
        self.stack.redis.rpush(self.keys.orders(self.record.id), order.model_dump_json())

    def no_demands(self) -> bool:
        return not self.stack.redis.exists(self.keys.demands)

    def infer(self, name: str) -> httpx2.Response:
        body, headers = v2.request({"x": ROW})
        return self.stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)

    def call(self, name: str) -> int:
        return self.infer(name).status_code

    def place(self, manifest: Manifest, **fields: Any) -> None:
        """Change where and how often a model is loaded."""
        endpoint = self.repository.endpoint(manifest.model)
        self.repository.replace_endpoint(endpoint.model_copy(update={"placement": EndpointPlacement(**fields)}))
        wait_until(lambda: self.record.token == self.repository.token(), what="the worker knows")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("residency"), settings={"queue_lease_s": LEASE_S}) as stack:
        yield stack


@pytest.fixture
def shop(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Shop]:
    shop = Shop(stack, request.node.name.removeprefix("test_").replace("_", "-")[:30])
    try:
        yield shop
    finally:
        shop.close()


def test_a_worker_holds_what_fits_and_loads_what_is_called(shop: Shop) -> None:
    manifests = {name: shop.publish(name) for name in ("a", "b", "c", "d", "e")}
    shop.start()
    wait_until(lambda: len(shop.settled()) in {2, 3} and shop.record.used_bytes <= BUDGET_BYTES, what="it fits")
    held = shop.ready()
    assert {instance.model for instance in shop.record.instances} == held, "the others are on standby"

    for name in sorted(manifests.keys() - held):
        shop.load(manifests[name])
        wait_until(lambda: shop.record.used_bytes <= BUDGET_BYTES, what="what was not known before its load is repaid")
        shop.until_answers(name)
        instance = shop.instance(manifests[name])
        assert instance is not None
        assert instance.why == "a call"
    wait_until(shop.no_demands, what="all demands are met")


def test_what_is_called_stays(shop: Shop) -> None:
    manifests = {name: shop.publish(name) for name in ("f", "g", "h", "i")}
    shop.start()
    shop.settled()
    for name in ("f", "g"):
        shop.load(manifests[name])
        shop.until_answers(name)
    missing = next(name for name in ("h", "i") if name not in shop.ready())
    shop.load(manifests[missing])
    assert {"f", "g"} <= shop.ready(), "what was never called was unloaded first"


def test_two_orders_cause_one_load(shop: Shop) -> None:
    manifest = shop.publish("slow", load_s=1.0)
    shop.start()
    order = Order(do="load", content_id=manifest.content_id, why="a call", evict=True)
    for _ in range(3):
        shop.push(order)
    shop.until_ready(manifest)
    wait_until(lambda: not shop.stack.redis.exists(shop.keys.orders(shop.record.id)), what="all orders are taken")
    text = (shop.stack.home / "logs" / f"{shop.pool}-0.log").read_text()
    assert text.count("loading: slow version 1") == 1


def test_a_cold_call_waits_for_its_load_and_is_answered(shop: Shop) -> None:
    names = ("j", "k", "l", "m", "n")
    for name in names:
        shop.publish(name)
    shop.start()
    shop.settled()
    for name in names:
        shop.until_known(name)
        shop.until_answers(name)
    for name in names[:2]:  # the worker may have unloaded them meanwhile
        shop.until_answers(name)
    wait_until(lambda: shop.record.used_bytes <= BUDGET_BYTES, what="within the budget")
    wait_until(shop.no_demands, what="all demands are met")


def test_nothing_in_use_is_unloaded(shop: Shop) -> None:
    busy = [shop.publish(name, run_s=0.05) for name in ("busy-1", "busy-2", "busy-3")]
    cold = [shop.publish(name) for name in ("cold-1", "cold-2")]
    shop.start()
    shop.settled()
    for manifest in (*cold, *busy):  # so that all of them were measured
        shop.until_known(manifest.model)
        shop.until_answers(manifest.model)
    wait_until(lambda: shop.ready() == {one.model for one in busy}, what="the last ones are there")
    request = v2.request({"x": ROW})
    with ExitStack() as loads:
        running = [
            loads.enter_context(constant_load(shop.stack.port, f"/v2/models/{one.model}/infer", [request], 4))
            for one in busy
        ]
        for load in running:
            load.more(5)
        for manifest in cold:
            assert shop.order(manifest)
        wait_until(lambda: len(shop.record.refusals) == len(cold), what="both are refused")
        assert {one.kind for one in shop.record.refusals} <= {"nothing_evictable", "thrashing"}
        assert shop.ready() == {one.model for one in busy}
        for load in running:
            load.more(5)
    for load in running:
        assert {answer.status for answer in load.answers} == {200}
    wait_until(shop.no_demands, what="refused demands have ended")
    wait_until(lambda: not shop.record.refusals, what="refusals are over")


def test_a_worker_that_is_killed_during_a_demanded_load(shop: Shop) -> None:
    others = [shop.publish(name) for name in ("o", "p", "q")]
    shop.start()
    for manifest in others:
        shop.load(manifest)
    slow = shop.publish("slow-one", load_s=2.0)
    shop.until_known("slow-one")
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(shop.infer, "slow-one")
        wait_until(lambda: shop.instance(slow), what="its load has begun")
        assert shop.worker is not None
        shop.worker.kill()
        shop.worker.wait()
        shop.start(index=1)
        reply = call.result()
    assert reply.status_code == 200, reply.text
    wait_until(shop.no_demands, what="all demands are met")


def test_a_version_that_is_deleted_during_its_demanded_load(shop: Shop) -> None:
    steady = shop.publish("steady")
    shop.start()
    shop.settled()
    used_bytes = shop.record.used_bytes
    gone = shop.publish("gone", load_s=60.0)
    shop.order(gone)
    wait_until(lambda: shop.instance(gone), what="its load has begun")
    shop.repository.delete_model("gone")
    wait_until(lambda: shop.instance(gone) is None, what="it is gone")
    wait_until(shop.no_demands, what="its demand has ended")
    wait_until(lambda: shop.record.used_bytes <= used_bytes + 16 * MIB, what="its memory is free")
    assert shop.is_ready(steady)


def test_a_redis_that_loses_its_data_during_a_demanded_load(shop: Shop) -> None:
    shop.start()
    slow = shop.publish("slow-too", load_s=2.0)
    shop.until_known("slow-too")
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(shop.infer, "slow-too")
        wait_until(lambda: shop.instance(slow), what="its load has begun")
        shop.stack.redis.flushall()
        reply = call.result()
    assert reply.status_code == 200, reply.text
    wait_until(shop.no_demands, what="all demands are met")


def test_orders_to_unload(shop: Shop) -> None:
    pinned, plain, idle = shop.publish("pinned"), shop.publish("plain"), shop.publish("idle")
    shop.start()
    for manifest in (pinned, plain, idle):
        shop.until_ready(manifest)
    shop.place(pinned, pin=True)
    shop.place(idle, idle_s=0.1)
    wait_until(lambda: shop.instance(idle) is None, what="it was idle for too long")
    shop.push(Order(do="unload", content_id=pinned.content_id, why="idle", token=7))
    shop.push(Order(do="unload", content_id=plain.content_id, why="idle", token=6))
    shop.push(Order(do="load", content_id="unknown:1:00", why="of another controller", token=8))
    wait_until(lambda: "its controller was replaced" in shop.log, what="the old token is ignored")
    shop.push(Order(do="unload", content_id=plain.content_id, why="idle", token=8))
    shop.stack.redis.rpush(shop.keys.orders(shop.record.id), b"no order")
    wait_until(lambda: shop.instance(plain) is None, what="it is unloaded")
    wait_until(lambda: "an order cannot be read" in shop.log, what="the order that is none is ignored")
    assert shop.ready() == {"pinned"}
    shop.until_answers("plain")


def test_two_with_large_peaks_go_where_one_alone_frees_little(shop: Shop) -> None:
    shop.start()
    peaked = [shop.publish(name, bytes=40 * MIB, peak_bytes=250 * MIB, allocate=True) for name in ("peak-1", "peak-2")]
    for manifest in peaked:
        shop.load(manifest)
    shop.settled()
    record = shop.record
    peaks = [one.peak_bytes for one in record.instances]  # a probe of one may have run while the other was measured
    one_frees = 40 * MIB + max(peaks) - min(peaks)
    need = BUDGET_BYTES - record.used_bytes + one_frees + 20 * MIB
    large = shop.publish("large", load_s=0.01, bytes=need)
    known = Measured(resident_bytes=need, load_s=0.01)
    shop.repository.footprints.write(large, "simulated.cpu", known)
    shop.load(large)
    assert "peak-1" not in shop.ready()
    assert "peak-2" not in shop.ready()
    assert shop.log.count(f"to make room for {large.content_id}") == len(peaked)


def test_a_version_that_takes_more_memory_than_there_is(shop: Shop) -> None:
    shop.start()
    huge = shop.publish("huge", bytes=4 * BUDGET_BYTES, allocate=True)
    shop.until_known("huge")
    wait_until(lambda: shop.instance(huge), what="it was tried")
    wait_until(lambda: {one.state for one in shop.record.instances} == {State.FAILED}, what="it has failed")
    shop.order(huge)
    wait_until(lambda: shop.record.refusals, what="it is refused")
    [refusal] = shop.record.refusals
    assert (refusal.content_id, refusal.kind) == (huge.content_id, "too_large")
    assert "it takes " in refusal.reason
    wait_until(shop.no_demands, what="its demand has ended")
    small = shop.publish("small")
    shop.until_ready(small)
