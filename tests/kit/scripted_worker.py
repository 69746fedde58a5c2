"""A worker in the test's process: it loads what it is ordered to load when the test says so, and answers batches.

orders:<worker> ─> `orders` ─> load (LOADING) ─> serve (READY) ─> doubles the first two columns of tests.kit.versions
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from typing import Any

from millstream.services.model.manifest import Manifest
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.scripts import script
from millstream.services.queue.url import RedisAddress, client
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.batch import BATCH_FORMATS
from millstream.services.wire.orders import Order
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord
from millstream.workers.batches.consumer import Consumer, Finished
from tests.kit.loopback import doubled
from tests.kit.wait import wait_until

LEASE_MS = 40_000  # of its gateways, too (`queue_lease_s`): no pause of the test's process is a death
BEAT_S = 0.05
_numbers = itertools.count()


class ScriptedWorker:
    """A worker that follows the repository and holds nothing by itself. Call `close` at the end.

    `orders` are all orders so far. With `obedient`, each order is carried out at once.
    """

    def __init__(
        self,
        address: RedisAddress,
        installation: str,
        repository: FolderRepository,
        *,
        obedient: bool = False,
        pool: str = "cpu",
        **fields: Any,
    ) -> None:
        self.id = f"{pool}-scripted-{next(_numbers)}-{time.monotonic_ns()}"
        self.orders: list[Order] = []
        self.loads: list[str] = []
        self.runs = 0
        self._fields = {"budget_bytes": 1 << 30, "used_bytes": 1 << 28} | fields
        self._pool, self._obedient, self._repository = pool, obedient, repository
        self._keys = InstallationKeys(installation).pool(pool)
        self._address = address
        self._redis: Any = client(address)
        self._redis.script_load(script("end_demand").text)
        self._instances: dict[str, InstanceRecord] = {}
        self._refusals: dict[str, RefusalRecord] = {}
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._beats = self._consumer()
        self._beat()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._run, self._obey)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Leave the pool."""
        self._stop()
        self._beats.leave(6)
        self._beats.close()
        self._redis.close()

    def die(self) -> None:
        """Stop without a word, as if the lease had passed since."""
        self._stop()
        with self._changing:
            self._redis.delete(self._keys.record(self.id))
            self._redis.zadd(self._keys.workers, {self.id: 1}, xx=True)

    def _stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def load(self, manifest: Manifest) -> None:
        """Publish the version as LOADING."""
        self.loads.append(manifest.content_id)
        self._set(manifest, State.LOADING, why="a call")

    def serve_unpublished(self, manifest: Manifest) -> None:
        """Serve the version's lane; no record says so."""
        with self._changing:
            self._beats.add_lanes([manifest.content_id])

    def serve(self, manifest: Manifest) -> None:
        """Publish the version as READY, and serve its lane."""
        self.serve_unpublished(manifest)
        self._set(manifest, State.READY, loaded_at=time.time(), resident_bytes=1 << 20, load_s=0.1)
        self._end_demand(manifest.content_id)

    def unload(self, manifest: Manifest) -> None:
        """Stop serving the version's lane, as after a drain."""
        with self._changing:
            self._instances.pop(manifest.content_id, None)
            self._beats.remove_lane(manifest.content_id)
        self._beat()

    def fail(self, manifest: Manifest, reason: str) -> None:
        """Publish the version as FAILED."""
        self._set(manifest, State.FAILED, reason=reason)
        self._end_demand(manifest.content_id)

    def refuse(self, manifest: Manifest, kind: str, reason: str, seconds: float) -> None:
        """Publish that the version is not loaded for some seconds."""
        until = time.time() + seconds  # Redis runs on this machine
        with self._changing:
            self._refusals[manifest.content_id] = RefusalRecord(
                content_id=manifest.content_id, kind=kind, reason=reason, until=until
            )
        self._beat()
        self._end_demand(manifest.content_id)

    def until_ordered(self, number: int = 1) -> list[Order]:
        """Wait for a number of orders, and return all."""
        wait_until(lambda: len(self.orders) >= number, what=f"{number} orders")
        return self.orders

    def _set(self, manifest: Manifest, state: State, **fields: Any) -> None:
        with self._changing:
            self._instances[manifest.content_id] = InstanceRecord(
                content_id=manifest.content_id, model=manifest.model, version=manifest.version, state=state, **fields
            )
        self._beat()

    def _end_demand(self, content_id: str) -> None:
        with self._changing:
            self._beats._script("end_demand", (self._keys.demands,), content_id, self.id)

    def _consumer(self) -> Consumer:
        return Consumer(self._address, self._keys, self.id, RedisClock())

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            pool=self._pool,
            device="cpu",
            backend="scripted",
            pid=0,
            host="elsewhere",
            started=0.0,
            batch_formats=BATCH_FORMATS,
            instances=tuple(self._instances.values()),
            token=self._repository.token(),
            refusals=tuple(self._refusals.values()),
            **self._fields,
        )

    def _beat(self) -> None:
        with self._changing:
            self._beats.beat(self._record().model_dump_json().encode(), LEASE_MS)
            self._beats.announce()

    def _obey(self) -> None:
        token = ""
        while not self._ended.is_set():
            popped = self._redis.blpop(self._keys.orders(self.id), BEAT_S)
            if popped is not None:
                order = Order.model_validate_json(popped[1])
                self.orders.append(order)  # before a reply can say that it was carried out
                if self._obedient:
                    manifest = self._manifest(order.content_id)
                    self.load(manifest)
                    self.serve(manifest)
            seen = self._repository.token()
            with self._changing:
                self._beats.beat(self._record().model_dump_json().encode(), LEASE_MS)
                if seen != token:
                    self._beats.announce()
            token = seen

    def _manifest(self, content_id: str) -> Manifest:
        model, version, _ = content_id.split(":")
        return self._repository.manifest(model, int(version))

    def _run(self) -> None:
        consumer = self._consumer()
        finished: list[Finished] = []
        while not self._ended.is_set():
            consumer.send_wait(finished, 16, BEAT_S)
            leases, _ = consumer.receive_wait()
            finished = []
            for lease in leases:
                self.runs += 1
                finished.append(Finished(lease, doubled(lease.header.name, lease.inline), b""))
        with suppress(OSError):
            consumer.close()
