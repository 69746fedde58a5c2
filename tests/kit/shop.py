"""A running stack with one worker of the simulated backend, to which orders are given as gateways give them."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import ExitStack
from typing import Any

import httpx2
import numpy as np

from millstream.services.model.manifest import EndpointPlacement, Manifest, ModelConfig
from millstream.services.queue.consumer_link import ConsumerLink
from millstream.services.queue.death_notices import Death, publish_death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.footprints import Measured
from millstream.services.wire.orders import Order
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from tests.kit import v2
from tests.kit.stack import Stack
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

MIB = 1 << 20
MODEL_BYTES = 200 * MIB
BUDGET_BYTES = 800 * MIB  # three models and the interpreter
ROW = np.ones((1, 4), np.float32)
LIFE_MS = 600_000
LEASE_S = 40.0  # a worker that this machine lets wait is not dead; `kill` tells of one that is


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

    def start(self, index: int = 0, **settings: object) -> None:
        """Start the worker, and wait for its first record."""
        settings = {"queue_lease_s": LEASE_S, "worker_memory": f"{BUDGET_BYTES >> 20}MiB", **settings}
        self.worker = self._exits.enter_context(running_worker(self.stack, self.pool, index=index, settings=settings))
        pid, token = self.worker.pid, self.repository.token()
        wait_until(lambda: any(one.pid == pid and one.token == token for one in self.records), what="its record")

    def kill(self) -> None:
        """Kill the worker, and tell the gateways as its supervisor would."""
        assert self.worker is not None
        worker = self.record.id
        self.worker.kill()
        self.worker.wait()
        address, keys = RedisAddress.unix(str(self.stack.socket)), self.keys.of_installation
        assert asyncio.run(publish_death(address, keys, Death(worker)))

    def close(self) -> None:
        self._exits.close()
        self._link.close()

    def publish(self, name: str, **behaviour: Any) -> Manifest:
        behaviour.setdefault("bytes", MODEL_BYTES)
        return publish_simulated(self.repository, name, behaviour, config=ModelConfig(pools=(self.pool,)))

    def publish_known(self, name: str, kind: str, known: Measured, **behaviour: Any) -> Manifest:
        """Publish a version whose memory was measured before: the worker never sees it without."""
        elsewhere = FolderRepository(self.stack.home / "elsewhere" / name)
        config = ModelConfig(pools=(self.pool,))
        publish_simulated(self.repository, name, {"bytes": 1}, config=ModelConfig(pools=("none",)))
        manifest = publish_simulated(elsewhere, name, behaviour, 2, config)
        self.repository.footprints.write(manifest, kind, known)
        published = publish_simulated(self.repository, name, behaviour, 2, config)
        assert published.content_id == manifest.content_id
        return published

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
        """The worker's record, which is missing for a moment if the worker was held up for longer than its life."""
        return wait_until(self._record, what="the worker's record")

    def _record(self) -> WorkerRecord | None:
        assert self.worker is not None
        return next((one for one in self.records if one.pid == self.worker.pid), None)

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
        """Wait until the gateway knows a model's active version, and the worker has seen it."""
        active = self.repository.endpoint(name).active
        path = f"/admin/v1/models/{name}"
        wait_until(lambda: self.stack.http.get(path).json().get("active") == active, what=f"{name} is known")
        wait_until(lambda: self.record.token == self.repository.token(), what="the worker has seen it")

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in (self.stack.home / "logs").glob(f"{self.pool}-*.log"))

    def evictions(self, name: str, reason: str) -> float:
        """Return how often the worker unloaded a model for a reason."""
        return self.stack.metrics().value("millstream_evictions_total", model=name, pool=self.pool, reason=reason)

    def until_answers(self, name: str) -> None:
        """Call a model until it answers; it may be refused for a while, but only with a time to try again."""

        def answers() -> bool:
            reply = self.infer(name)
            assert reply.status_code == 200 or float(reply.headers["retry-after"]) > 0, reply.text
            return reply.status_code == 200

        wait_until(answers, what=f"{name} answers")

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

        wait_until(loaded, what=f"{manifest.model} is ready")

    def push(self, order: Order) -> None:
        """Give the worker an order as the controller does."""
        self.stack.redis.rpush(self.keys.orders(self.record.id), order.model_dump_json())

    def no_demands(self) -> bool:
        return not self.stack.redis.exists(self.keys.demands)

    def infer(self, name: str) -> httpx2.Response:
        body, headers = v2.request({"x": ROW}, parameters=v2.PATIENT)
        return self.stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)

    def call(self, name: str) -> int:
        return self.infer(name).status_code

    def place(self, manifest: Manifest, **fields: Any) -> None:
        """Change where and how often a model is loaded."""
        endpoint = self.repository.endpoint(manifest.model)
        self.repository.replace_endpoint(endpoint.model_copy(update={"placement": EndpointPlacement(**fields)}))
        wait_until(lambda: self.record.token == self.repository.token(), what="the worker knows")
