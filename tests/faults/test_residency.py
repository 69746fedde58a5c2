"""A worker with memory for three models of five: what it loads, unloads and refuses, whatever happens meanwhile.

Orders are given as gateways give them; models are those of the simulated backend, which claim their bytes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.queue.consumer_link import ConsumerLink
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.orders import Order
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from tests.kit import v2
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

MIB = 1 << 20
MODEL_BYTES = 200 * MIB
BUDGET_BYTES = 800 * MIB  # three models and the interpreter
ROW = np.ones((1, 4), np.float32)
LIFE_MS = 600_000


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

    def start(self) -> None:
        """Start the worker, and wait for its first record."""
        settings = {"worker_memory": f"{BUDGET_BYTES >> 20}MiB"}
        self.worker = self._exits.enter_context(running_worker(self.stack, self.pool, settings=settings))
        pid = self.worker.pid
        wait_until(lambda: self.records and self.record.pid == pid and self.record.token, what="its record")

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
        [record] = self.records
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

    def until_answers(self, name: str) -> None:
        wait_until(lambda: self.call(name) == 200, what=f"{name} answers")

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

    def push(self, order: Order) -> None:
        """Give the worker an order as the controller does."""
        self.stack.redis.rpush(self.keys.orders(self.record.id), order.model_dump_json())

    def no_demands(self) -> bool:
        return not self.stack.redis.exists(self.keys.demands)

    def call(self, name: str) -> int:
        body, headers = v2.request({"x": ROW})
        return int(self.stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers).status_code)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("residency")) as stack:
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
        assert shop.order(manifests[name])
        shop.until_ready(manifests[name])
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
        shop.order(manifests[name])
        shop.until_ready(manifests[name])
        shop.until_answers(name)
    for name in ("h", "i"):
        if not shop.is_ready(manifests[name]):
            assert shop.order(manifests[name])
            shop.until_ready(manifests[name])
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
