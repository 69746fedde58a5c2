"""Builds the parts of one gateway process, and starts and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Collection
from functools import partial
from types import FunctionType

from millstream.gateway.access.access_control import AccessControl
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.quotas import Quotas, UploadSlots
from millstream.gateway.catalog.snapshot import ScaleView, Snapshot, SnapshotCell
from millstream.gateway.certificate_watch import CertificateWatch
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.server import HTTP_SHARE
from millstream.gateway.connection.tls_connection import HANDSHAKES_MAX, Handshakes
from millstream.gateway.http.deps import Deps
from millstream.gateway.memory_budgets import MemoryBudgets
from millstream.gateway.metrics_page import GatewayMetricsPage
from millstream.gateway.observing.observer import Recorder
from millstream.gateway.parts import (
    GatewayParts,
    PreparerParts,
    build_parts,
    build_preparers,
    prepared_of,
    start_parts,
    stop_parts,
)
from millstream.gateway.placement.demands import Demands
from millstream.gateway.redis_events import QuarantineNews, RedisProbe, event_handlers
from millstream.gateway.scheduling.caller import caller_of
from millstream.gateway.scheduling.composed import runner_of
from millstream.gateway.scheduling.lane_state import SharedParts
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.producer import Producer, ReplyWays
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.gateway.scheduling.readiness import Preloads, ReadinessProbe
from millstream.gateway.scheduling.router import Router
from millstream.gateway.tensors.output_options import ClientRegions
from millstream.gateway.v2.service import InferService, v2_codec
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.forked_check import end_fork_servers
from millstream.services.installation import installation_name, shared_metrics
from millstream.services.metrics import catalogue
from millstream.services.metrics.process import ProcessMetrics
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.plugin.registry import contributions
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.gc_tuning import freeze_gc
from millstream.services.process.log_level import LogLevel
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import InstallationLevel, StoredLogLevels
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.sandbox.confine import Layers, available
from millstream.services.segments.segment import host_token
from millstream.services.settings import LOG_LEVELS, Settings
from millstream.services.tls.files import TlsFiles
from millstream.services.version import VERSION
from millstream.services.wire.records import WorkerRecord

log = logging.getLogger("millstream.gateway")


class Gateway:
    """The parts of one gateway process, and the order in which they start and stop."""

    def __init__(self, settings: Settings, index: int, preloads: Preloads) -> None:
        """Build the parts, start none. `index`: the gateway's number on this machine. Raises Failure, OSError."""
        address, role = _redis_address(settings), f"gateway-{index}"
        keys = InstallationKeys(installation_name(settings))
        self.settings = settings = settings.model_copy(update={"installation_name": installation_name(settings)})
        self.name = f"{index}-{os.getpid()}-{os.urandom(8).hex()}"
        self.registry = MetricsRegistry(shared_metrics(settings), role, models_max=settings.metrics_models_max)
        self.certificates = _certificates(settings, self.registry)
        self.registry.gauge(catalogue.CONNECTIONS_MAX, role).set(settings.client_connections_max)
        # Fewer where few descriptors are left for connections.
        self.handshakes = Handshakes(min(HANDSHAKES_MAX, HTTP_SHARE * settings.client_connections_max))
        self._process_metrics = ProcessMetrics(self.registry)
        self.recorder = Recorder(settings, self.registry, role)
        self.drain = Drain()
        self.http_counts = HttpCounts(self.registry)
        self.budgets = MemoryBudgets(self.name, settings, self.registry)
        self.repository = FolderRepository(settings.repository_dir)
        self.cluster_state = ClusterState(address, keys)
        self._redis_probe = RedisProbe(self.cluster_state, self.registry)
        self.access = AccessControl(self.name, settings, self.registry, self.cluster_state)
        self.client_memory = self._client_memory()
        self._log_level = LogLevel(
            "gateway", settings.home / "run" / LOG_LEVELS, InstallationLevel(address, keys, "gateway").read
        )
        self.log_levels = StoredLogLevels(address, keys)
        self.snapshots, self.lanes, self.scale = SnapshotCell(), LaneTable(), ScaleView()
        self.producer = self._producer(address, keys)
        self.demands = Demands(self.snapshots.get, self.lanes, self._footprint, self.scale)
        self.quarantine = Quarantine(
            self.registry.gauge(catalogue.REQUESTS_QUARANTINED),
            self.registry.counter(catalogue.REQUESTS_REFUSED, "quarantined"),
            QuarantineNews(self.cluster_state).publish,
        )
        preparer_parts = PreparerParts(settings, self.repository, self.budgets.receiving)
        self.preparers = build_preparers(preparer_parts)
        self.router = self._router()
        self.catalog = Catalog(
            self.name,
            self.repository,
            self.cluster_state,
            self.snapshots,
            self.scale,
            self._apply,
            event_handlers(self.producer, self.quarantine, self.access.keys),
        )
        self.readiness_probe = ReadinessProbe(
            lambda: self.router.serving,
            self.producer.connected,
            self._workers_or_asleep,
            self.drain,
            preloads,
            self.registry,
        )
        self.infer = InferService(
            self.router, self.budgets.receiving, settings.request_bytes_max, settings.request_timeout_s_max
        )
        self.load = partial(self.demands.load_and_wait, self.catalog)
        self.caller = caller_of(self.router.find, settings.request_timeout_s_max, self.access.gate.check_model)
        self.parts = (*self.preparers, *build_parts(self._gateway_parts(role)))
        self._loops: list[asyncio.Task[None]] = []

    def _client_memory(self) -> ClientRegions | None:
        made = contributions("client_memory", FunctionType)
        return made[0](self.settings, lambda: self.access.gate.enforced) if made else None

    def _producer(self, address: RedisAddress, keys: InstallationKeys) -> Producer:
        settings = self.settings
        ways = ReplyWays(settings.shm_dir, settings.queue_direct, _reply_port(settings, address))
        return Producer(address, keys, self.name, self.lanes, self.registry, settings.queue_lease_s, ways)

    def _router(self) -> Router:
        settings, budgets = self.settings, self.budgets
        return Router(
            settings,
            self.producer,
            self.demands,
            SharedParts(
                budgets.admission,
                budgets.segments,
                self.quarantine,
                self.access.gate,
                self.recorder,
                partial(runner_of, self.repository.local_path),
                partial(prepared_of, self.preparers),
            ),
            self.registry,
            host_token(settings.shm_dir),
            partial(
                v2_codec, self.repository.local_path, self.client_memory, budgets.replies, settings.request_bytes_max
            ),
        )

    def _gateway_parts(self, name: str) -> GatewayParts:
        return GatewayParts(
            settings=self.settings,
            name=name,
            unique_name=self.name,
            address=_redis_address(self.settings),
            keys=InstallationKeys(installation_name(self.settings)),
            registry=self.registry,
            repository=self.repository,
            catalog=self.catalog,
            lanes=self.lanes,
            scale=self.scale,
            cluster_state=self.cluster_state,
            caller=self.caller,
            gate=self.access.gate,
            client_memory=self.client_memory,
            recorded=self.recorder.parts,
            observer=self.recorder.observer,
            set_verbose=self._log_level.set_verbose,
            answering=self.readiness_probe.answering,
            load=self.load,
            uploading=Quotas(self.access.gate, self.catalog, self.repository).upload,
            on_drain=self.drain.on_begin,
        )

    async def _apply(self, snapshot: Snapshot, changed: Collection[str]) -> None:
        await self.router.apply(snapshot, changed)
        self.readiness_probe.note_empty()
        self.demands.apply(snapshot, changed)

    def _workers_or_asleep(self) -> int:
        """Return the number of live workers, and of pools that have none until their first request."""
        workers = self.snapshots.current.workers
        return len(workers) or len(self.scale.asleep(()))

    def _footprint(self, manifest: Manifest, worker: WorkerRecord) -> Footprint:
        return self.repository.footprints.of(manifest, worker.kind)

    def _manifests(self) -> list[Manifest]:
        return [view.manifest for model in self.snapshots.current.models.values() for view in model.versions.values()]

    def _tell_sandbox(self) -> None:
        """Log and export what confines uploads on this machine. It starts a process where Landlock is missing."""
        try:
            layers = available()
        except (OSError, subprocess.SubprocessError) as error:
            log.error("the sandbox of uploads cannot be set up: %s", error)  # noqa: TRY400 - it has said why
            layers = Layers(0, False, False)
        for name, active in layers._asdict().items():
            self.registry.gauge(catalogue.SANDBOX, name).set(float(active > 0))
        if layers.stand:
            log.info("uploads are confined by %s", layers)
            return
        accepted = self.settings.unconfined_imports == "accept"
        log.warning(
            "uploads are confined by %s: models that may execute code are %s; `millstream doctor` says what is missing",
            layers,
            "imported all the same (MILLSTREAM_UNCONFINED_IMPORTS)" if accepted else "refused",
        )

    async def start(self) -> None:
        self._process_metrics.start()
        self.recorder.start()
        self._log_level.start()
        await self.access.keys.start()
        self.producer.start()  # before the first batch: a worker that finds no reply socket looks again seconds later
        await self.catalog.start()
        self.demands.start()
        self.readiness_probe.start()
        await start_parts(self.parts)
        loops = [
            *self.access.loops(),
            self.budgets.trim_when_idle(),
            self._redis_probe.run(),
            asyncio.to_thread(self.repository.footprints.learn, self._manifests()),  # the start does not wait for it
            asyncio.to_thread(self._tell_sandbox),
        ]
        if self.certificates is not None:
            loops.append(self.certificates.run())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        freeze_gc()

    async def stop(self) -> None:
        await self.readiness_probe.stop()
        await self.demands.stop()
        await cancel_all(self._loops)  # before the connections that they use are closed
        await self.catalog.stop()
        await self.producer.stop()
        await stop_parts(self.parts)
        self._log_level.stop()
        await self.log_levels.close()
        await asyncio.to_thread(self.recorder.close)
        await end_fork_servers()
        self.budgets.close()
        self._process_metrics.stop()
        self.registry.close()

    def ready(self) -> bool:
        return self.readiness_probe.ready()

    async def settle(self) -> None:
        """Return when no batch is in flight, readiness probes included."""
        await self.readiness_probe.stop()
        await self.producer.settle()

    def abandon(self) -> None:
        """Fail all admitted requests, and refuse further ones."""
        self.budgets.admission.closed = True
        for lane in self.lanes.all():
            lane.abandon(Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1))

    def deps(self) -> Deps:
        """Return what routes and the gRPC server need."""
        metrics_page = GatewayMetricsPage(
            self.registry,
            self.snapshots.get,
            self.cluster_state,
            self.lanes,
            self.settings.repository_dir,
            self.catalog.exists,
        )
        return Deps(
            settings=self.settings,
            registry=self.registry,
            repository=self.repository,
            catalog=self.catalog,
            cluster_state=self.cluster_state,
            upload_slots=UploadSlots(self.catalog),
            infer=self.infer,
            caller=self.caller,
            receive_budget=self.budgets.receiving,
            shared_buffers=self.budgets.shared_buffers,
            http_counts=self.http_counts,
            reply_budget=self.budgets.replies,
            load=self.load,
            log_levels=self.log_levels,
            ready=self.readiness_probe.ready,
            preloading=self.readiness_probe.preloads.loading,
            answering=self.readiness_probe.answering,
            count_refusal=self.access.refusals.count,
            metrics=metrics_page.render,
            start=self.start,
            stop=self.stop,
            version=VERSION,
            footprint=self._footprint,
            gate=self.access.gate,
            browser_guard=self.access.browser_guard,
            keys=self.access.keys,
            audit=self.access.audit,
            load_s=self.demands.load_s,
            observer=self.recorder.observer,
            parts=self.parts,
        )


def _redis_address(settings: Settings) -> RedisAddress:
    if settings.redis_url is None:
        raise invalid("set MILLSTREAM_REDIS_URL to the Redis that gateways and workers share")
    return RedisAddress.parse(settings.redis_url.get_secret_value())


def _reply_port(settings: Settings, address: RedisAddress) -> int | None:
    """Return the reply port; None: there is none."""
    if settings.reply_port < 0 or address.path is not None:  # the Redis of one machine: no worker is on another one
        return None
    if address.tls is not None:
        log.warning("MILLSTREAM_REPLY_PORT is not used: replies go through Redis, whose connections are encrypted")
        return None
    return settings.reply_port


def _certificates(settings: Settings, registry: MetricsRegistry) -> CertificateWatch | None:
    files = TlsFiles.of(settings)
    listeners = ("http", "grpc") if settings.serves_grpc else ("http",)
    return None if files is None else CertificateWatch(files, registry, listeners)
