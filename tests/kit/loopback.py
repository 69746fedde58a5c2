"""A gateway's infer path without Redis and workers: real Infer, lanes and codecs over a link that runs the batches.

The model has tests.kit.versions' signature: FP32 x [-1, 4] -> FP32 y [-1, 2], the first two columns of 2 x.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from millstream.gateway.access.gate import Gate
from millstream.gateway.catalog.snapshot import ModelView, Replica, ScaleView, Snapshot, VersionView
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.observing.observer import Recorder
from millstream.gateway.placement.demands import Demands
from millstream.gateway.scheduling.composed import runner_of
from millstream.gateway.scheduling.lane_state import SharedParts
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.gateway.scheduling.request import Admission
from millstream.gateway.scheduling.router import Router
from millstream.gateway.v2.service import InferService, v2_codec
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import ModelConfig
from millstream.services.placement.views import Footprint
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.sharing import Share
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import settings_class
from millstream.services.wire.batch import ReplyHeader, ReplyOutput, decode_batch, encode_reply
from millstream.services.wire.records import State
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish

NOWHERE = RedisAddress.parse("redis://127.0.0.1:1")  # no test connects to it


class LoopbackLink(ProducerLink):
    """Runs each batch one turn of the event loop after it was put; while `held` is set, only in `run_held`."""

    def __init__(self, producer: Producer, pool: str = "cpu") -> None:
        keys = InstallationKeys("test").pool(pool)
        super().__init__(NOWHERE, keys, "loopback", producer._on_reply, lambda _: None, lambda *_: None)
        self.held = False
        self.waiting: list[tuple[bytes, bytes]] = []
        self.left: list[tuple[str, float]] = []  # batches without callers, and the seconds until their last deadline

    @property
    def writable(self) -> bool:
        return True

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    def put(
        self,
        lane: str,
        name: str,
        entry: bytes,
        blob: bytes,
        deadline_ms: float,
        attempt: int,
        share: Share,
    ) -> None:
        self.waiting.append((entry, blob))
        if not self.held:
            asyncio.get_running_loop().call_soon(self.run_held)

    def withdraw(self, lane: str, name: str, *, refused: bool = False) -> None:
        return

    def leave(self, name: str, life_s: float) -> None:
        self.left.append((name, life_s))

    def run_held(self) -> None:
        """Run all batches that were kept."""
        waiting, self.waiting = self.waiting, []
        for entry, blob in waiting:
            self._on_reply(run_batch(entry, blob))


def run_batch(entry: bytes, blob: bytes) -> bytes:
    """Return the reply to a batch as it was put."""
    header, inline = decode_batch(entry)
    return doubled(header.name, blob or inline)


def doubled(batch: str, inputs: bytes | memoryview) -> bytes:
    """Return the reply to a batch of versions with the signature of tests.kit.versions."""
    x = np.frombuffer(inputs, np.float32).reshape(-1, 4)
    y = np.ascontiguousarray(2 * x[:, :2])
    output = ReplyOutput((2,), y.nbytes, None, None)
    return encode_reply(
        ReplyHeader(batch, "loopback", 0.0, 0.0, 0.0, 0.0, len(x), [len(x)], {}, [output], ""), [y.tobytes()]
    )


class Loopback:
    """`infer` serves version 1 of the model `m`; the model `idle` has no active version. Await `open` first."""

    def __init__(self, home: Path, **settings: Any) -> None:
        self.settings = settings_class().model_validate({"home": home, **settings})
        self.repository = FolderRepository(self.settings.repository_dir)
        tally = self.tally = MetricsRegistry(None, "gateway")
        self.admission = Admission(
            self.settings.inflight_requests_max,
            self.settings.inflight_bytes_max,
            tally.gauge(catalogue.REQUESTS_IN_FLIGHT),
            tally.counter(catalogue.REQUESTS_REFUSED, "gateway_full"),
        )
        self.producer = Producer(
            NOWHERE, InstallationKeys("test"), "loopback", LaneTable(), tally, self.settings.queue_lease_s
        )
        self.link = LoopbackLink(self.producer)
        self.producer._links["cpu"] = self.link
        self.reply_budget = ReplyBudget(self.settings.reply_unread_bytes_max)
        folder_of, bytes_max = self.repository.local_path, self.settings.request_bytes_max
        codec_of = partial(v2_codec, folder_of, None, self.reply_budget, bytes_max)
        demands = Demands(lambda: Snapshot({}, ()), self.producer.lanes, lambda *_: Footprint(0), ScaleView())
        quarantine = Quarantine(
            tally.gauge(catalogue.REQUESTS_QUARANTINED),
            tally.counter(catalogue.REQUESTS_REFUSED, "quarantined"),
            lambda _: None,
        )
        recorder, runners = Recorder(self.settings, tally, "loopback"), partial(runner_of, folder_of)
        shared = SharedParts(self.admission, None, quarantine, Gate(), recorder, runners)
        self.lanes = Router(self.settings, self.producer, demands, shared, tally, "here", codec_of)
        self.receive_budget = ReceiveBudget(self.settings.inflight_bytes_max)
        self.infer = InferService(
            self.lanes,
            self.receive_budget,
            self.settings.request_bytes_max,
            self.settings.request_timeout_s_max,
        )

    async def open(self) -> None:
        views = {}
        for name, serving in (("m", 1), ("idle", None)):
            manifest = publish(self.repository, name, 1, ModelConfig(rows_max=65536))
            holder = worker(instance(manifest))
            version = VersionView(manifest, State.READY, None, (Replica(holder, holder.instances[0]),))
            views[name] = ModelView(name, serving, serving, {1: version})
        await self.lanes.apply(Snapshot(views, ()), views)
