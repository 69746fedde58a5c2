"""python -m millstream.gateway: runs one gateway process. The only place that builds the gateway's objects."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Protocol as TypingProtocol

from millstream.services.extras import exit_unfit, exit_without
from millstream.services.process.gc_tuning import collect_rarely, freeze_gc

if __name__ == "__main__":
    collect_rarely()
    exit_without("gateway", "cpu")
    exit_unfit("millstream.gateway.connection.uvicorn_hooks", "millstream.services.queue.redis_parts")

import uvicorn

from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate
from millstream.gateway.access.key_watch import KeyWatch
from millstream.gateway.app import build_app
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.labels import Labels, read_labels
from millstream.gateway.catalog.shared_settings import SharedDocument, watch
from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.catalog.upload_slots import UploadSlots
from millstream.gateway.certificate_watch import CertificateWatch
from millstream.gateway.cluster_events import ClusterEvents
from millstream.gateway.connection.asgi_protocol import asgi_protocol
from millstream.gateway.connection.cors import with_cors
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.fd_limit import allow_connections
from millstream.gateway.connection.foreign_protocol import PLAIN_GRPC, PLAIN_HTTP, Foreign, ForeignLog
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.connection.reply_budget import ReplyBudget
from millstream.gateway.connection.server import Server, SideServer
from millstream.gateway.connection.shared_port import shared_port_protocol
from millstream.gateway.connection.tls_connection import TlsListener, tls_protocol
from millstream.gateway.connection.tls_handshakes import HANDSHAKES_MAX, Handshakes
from millstream.gateway.memory_trim import MemoryTrim
from millstream.gateway.metrics_page import GatewayMetricsPage
from millstream.gateway.observing.observed_protocol import with_observer
from millstream.gateway.observing.setup import Observing
from millstream.gateway.placement.demands import Demands
from millstream.gateway.placement.load_wait import LoadWait
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.openai.embeddings import Embeddings
from millstream.gateway.protocols.v2.codec import V2CodecFactory
from millstream.gateway.protocols.v2.service import InferService
from millstream.gateway.redis_probe import RedisProbe
from millstream.gateway.scaling.reporter import LoadReporter
from millstream.gateway.scheduling.admission import Admission
from millstream.gateway.scheduling.caller import Callers
from millstream.gateway.scheduling.preloads import Preloads
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.readiness import ReadinessProbe
from millstream.gateway.scheduling.router import Router
from millstream.gateway.tensors.json_text import JsonLimits
from millstream.gateway.texts.texts import Texts
from millstream.gateway.texts.tokenizers import Tokenizers
from millstream.gateway.triton.loader import RepositoryLoader
from millstream.gateway.triton.log import SharedLogSettings
from millstream.gateway.triton.metrics import TritonMetricsPage
from millstream.gateway.triton.model_config import VersionConfigurations
from millstream.gateway.triton.shared_memory import ClientMemory
from millstream.gateway.triton.statistics import MachineStatistics
from millstream.gateway.triton.trace import SharedTraceSettings
from millstream.services.access.audit_log import AuditLog
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.check_process import end_fork_server
from millstream.services.installation import installation_name, shm_prefix
from millstream.services.metrics import catalogue
from millstream.services.metrics.process import ProcessMetrics
from millstream.services.metrics.refusal_log import RefusalLog
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.process.cancel import cancel_all
from millstream.services.process.log_level import LogLevel
from millstream.services.process.logs import configure_logs, exit_message
from millstream.services.process.private_files import create_files_private
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import InstallationLevel, StoredLogLevels
from millstream.services.queue.scale_state import ScaleState
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.access_keys import AccessKeys
from millstream.services.repository.folder import FolderRepository
from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import host_token, remove_leftovers
from millstream.services.segments.shared_buffers import SHARE, SharedBuffers
from millstream.services.settings import (
    LOG_LEVELS,
    LOG_SETTINGS,
    TRACE_SETTINGS,
    Settings,
    check_platform_port,
    read_settings,
)
from millstream.services.start_log import log_start
from millstream.services.tls.files import TlsFiles
from millstream.services.trace_settings import at_start
from millstream.services.version import VERSION
from millstream.services.wire.records import WorkerRecord


class Gateway:
    """The parts of one gateway process, and the order in which they start and stop."""

    def __init__(self, settings: Settings, index: int, preloads: Preloads) -> None:
        """Build the parts, start none. `index`: the gateway's number on this machine. Raises Failure, OSError."""
        address = _redis_address(settings)
        keys = InstallationKeys(installation_name(settings))
        settings = settings.model_copy(update={"installation_name": installation_name(settings)})
        self.settings = settings
        self._index = index
        self.name = f"{index}-{os.getpid()}-{os.urandom(8).hex()}"
        self.registry = MetricsRegistry(
            settings.metrics_dir, f"gateway-{index}", models_max=settings.metrics_models_max
        )
        self.certificates = _certificates(settings, self.registry)
        self.handshakes = Handshakes()
        self._process_metrics = ProcessMetrics(self.registry)
        self.observing = Observing(settings, self.registry, f"gateway-{index}")
        self.drain = Drain()
        self.segments = _segment_pool(settings, self.name, self.registry)
        self.admission = _admission(settings, self.registry)
        self.receive_budget = _receive_budget(settings, self.registry)
        self.reply_budget = _reply_budget(settings, self.registry)
        self.http_counts = HttpCounts(self.registry)
        self.repository = FolderRepository(settings.repository_dir)
        self.cluster_state = ClusterState(address, keys)
        self.producer = Producer(address, keys, self.name, self.registry, settings.queue_lease_s, settings.shm_dir)
        self.client_memory = ClientMemory(
            settings.shm_dir,
            shm_prefix(settings),
            allowed=settings.shm_allow_clients,
            enforced=lambda: self.gate.enforced,
        )
        self.router = Router(
            settings,
            self.producer,
            self.admission,
            self.segments,
            self.registry,
            host_token(settings.shm_dir),
            V2CodecFactory(self._labels, self.client_memory, self.reply_budget, settings.request_bytes_max),
        )
        self.producer.lanes = self.router.all
        self._scale_state = ScaleState(address, keys)
        self.loads = LoadReporter(
            self.name, self._scale_state, self.producer.called, self.producer.ticking, self.producer.pending
        )
        self.gate = _gate(settings, self.registry)
        self.keys = KeyWatch(
            self.name,
            self.gate,
            AccessKeys(settings.repository_dir.absolute()),
            self.cluster_state,
            settings,
            self.registry,
        )
        self.keys.on_load = self._keys_changed
        self.demands = Demands(lambda: self.catalog.snapshot, self.router.lane_of, self._footprint)
        self.router.demands = self.demands
        self.demands.displaced = self.router.displaced
        self.demands.start_s = self.loads.start_s
        events = ClusterEvents(self.producer, self.router.quarantine, self.cluster_state)
        events.handlers["keys"] = self.keys.reload
        self.catalog = Catalog(self.name, self.repository, self.cluster_state, self._apply, events.handlers)
        self.catalog.asleep = self.loads.asleep
        self.readiness_probe = ReadinessProbe(
            lambda: self.router.serving,
            self.producer.connected,
            self._workers_or_asleep,
            self.drain,
            preloads,
            self.registry,
        )
        self.texts = Texts(Tokenizers(self.repository))
        self.infer = InferService(
            self.router, self.receive_budget, settings.request_bytes_max, settings.request_timeout_s_max, self.texts
        )
        self.control = RepositoryLoader(
            self.repository,
            self.catalog,
            settings,
            answering=self.readiness_probe.answering,
            have_loaded=LoadWait(lambda: self.catalog, self.demands).load,
        )
        self.traces = _traces(settings, self.router, self.catalog)
        self._log_level = LogLevel(
            "gateway", settings.home / "run" / LOG_LEVELS, InstallationLevel(address, keys, "gateway").read
        )
        self.logs = SharedLogSettings(
            SharedDocument(settings.home / "run" / LOG_SETTINGS),
            logging.getLogger().handlers,
            self._log_level.set_verbose,
        )
        self.log_levels = StoredLogLevels(address, keys)
        self._memory_trim = MemoryTrim(
            self.admission, self.receive_budget, self.reply_budget, self.segments, self.registry
        )
        self.refusals = RefusalLog(self.registry)
        self.browser_guard = BrowserGuard(
            settings.cors_origin_list,
            AllowedHosts(settings.allowed_host_list, (socket.gethostname(), settings.host)),
            self.refusals.count,
        )
        self._redis_probe = RedisProbe(self.cluster_state, self.registry)
        self._loops: list[asyncio.Task[None]] = []

    def _keys_changed(self) -> None:
        self.router.costs.on = self.gate.meters_compute

    async def _apply(self, snapshot: Snapshot, changed: Collection[str]) -> None:
        await self.router.apply(snapshot, changed)
        self.readiness_probe.note_empty()
        self.demands.apply(snapshot, changed)

    def _workers_or_asleep(self) -> int:
        """Return the number of live workers, and of pools that have none until their first request."""
        workers = self.catalog.snapshot.workers
        return len(workers) or len(self.loads.asleep(()))

    def _footprint(self, manifest: Manifest, worker: WorkerRecord) -> Footprint:
        return self.repository.footprints.of(manifest, worker.kind)

    def _labels(self, manifest: Manifest) -> Labels:
        return read_labels(self.repository.local_path(manifest.model, manifest.version), manifest)

    async def start(self) -> None:
        self._process_metrics.start()
        self.observing.start()
        self._log_level.start()
        await self.keys.start()
        self.producer.start()  # before the first batch: a worker that finds no reply socket looks again seconds later
        await self.catalog.start()
        self.demands.start()
        self.readiness_probe.start()
        await self.control.start()
        documents = {self.traces.document: self.traces.apply, self.logs.document: self.logs.apply}
        self._loops.append(asyncio.create_task(watch(documents, self.traces.flush)))
        self._loops.append(asyncio.create_task(self.keys.run()))
        self._loops.append(asyncio.create_task(self.keys.settle()))
        self._loops.append(asyncio.create_task(self._memory_trim.run()))
        self._loops.append(asyncio.create_task(self.refusals.run()))
        self._loops.append(asyncio.create_task(self._redis_probe.run()))
        self._loops.append(asyncio.create_task(self.loads.run()))
        if self.certificates is not None:
            self._loops.append(asyncio.create_task(self.certificates.run()))
        freeze_gc()

    async def stop(self) -> None:
        await self.readiness_probe.stop()
        await self.demands.stop()
        await cancel_all(self._loops)  # before the connections that they use are closed
        await self.loads.close()
        await self.catalog.stop()
        await self.producer.stop()
        await self.traces.close()
        await asyncio.to_thread(self.observing.close)
        self._log_level.stop()
        await self.log_levels.close()
        await end_fork_server()
        if self.segments is not None:
            self.segments.close()
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
        self.admission.closed = True
        for lane in self.router.all():
            lane.abandon(Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1))

    @cached_property
    def shared_buffers(self) -> SharedBuffers | None:
        """The shared memory of large requests over both protocols; None where shared memory is turned off."""
        if self.segments is None:
            return None
        return SharedBuffers(self.segments, int(self.settings.shm_bytes_max * SHARE))

    def deps(self) -> Deps:
        """Return what routes and the gRPC server need."""
        metrics_page = GatewayMetricsPage(
            self.registry, TritonMetricsPage(lambda: self.catalog.snapshot), self.cluster_state, self.router.all
        )
        callers = Callers(self.router.find, self.settings.request_timeout_s_max, self.gate.check_model)
        json_limits = JsonLimits(self.settings.json_bytes_max, self.settings.json_values_max)
        return Deps(
            settings=self.settings,
            registry=self.registry,
            repository=self.repository,
            catalog=self.catalog,
            cluster_state=self.cluster_state,
            upload_slots=UploadSlots(self.catalog),
            infer=self.infer,
            callers=callers,
            embed=Embeddings(callers.openai, self.texts, json_limits).answer,
            texts=self.texts,
            client_memory=self.client_memory,
            receive_budget=self.receive_budget,
            shared_buffers=self.shared_buffers,
            http_counts=self.http_counts,
            reply_budget=self.reply_budget,
            statistics=MachineStatistics(self.registry, lambda: self.catalog.snapshot),
            configurations=VersionConfigurations(lambda: self.catalog.snapshot),
            control=self.control,
            load=LoadWait(lambda: self.catalog, self.demands).load,
            traces=self.traces,
            logs=self.logs,
            log_levels=self.log_levels,
            ready=self.readiness_probe.ready,
            preloading=self.readiness_probe.preloads.loading,
            answering=self.readiness_probe.answering,
            count_refusal=self.refusals.count,
            metrics=metrics_page.render,
            start=self.start,
            stop=self.stop,
            version=VERSION,
            footprint=self._footprint,
            decisions=self._scale_state.decisions,
            gate=self.gate,
            browser_guard=self.browser_guard,
            keys=self.keys,
            audit=AuditLog(self.settings.repository_dir.absolute(), f"{socket.gethostname()}-gateway-{self._index}"),
            load_s=self.demands.load_s,
            observer=self.observing.observer,
        )


def _redis_address(settings: Settings) -> RedisAddress:
    if settings.redis_url is None:
        raise invalid("set MILLSTREAM_REDIS_URL to the Redis that gateways and workers share")
    return RedisAddress.parse(settings.redis_url.get_secret_value())


def _certificates(settings: Settings, registry: MetricsRegistry) -> CertificateWatch | None:
    files = TlsFiles.of(settings)
    listeners = ("http",) if _has_no_grpc(settings) else ("http", "grpc")
    return None if files is None else CertificateWatch(files, registry, listeners)


def _gate(settings: Settings, registry: MetricsRegistry) -> Gate:
    key = None if settings.admin_key is None else settings.admin_key.get_secret_value()
    return Gate(key, lambda name, outcome: registry.counter(catalogue.KEY_REQUESTS, name, outcome))


def _segment_pool(settings: Settings, name: str, registry: MetricsRegistry) -> SegmentPool | None:
    """Return the gateway's shared memory, None where it is turned off; remove what a killed gateway left behind."""
    if not settings.shm_bytes_max:
        return None
    remove_leftovers(settings.shm_dir, shm_prefix(settings))
    in_use = registry.gauge(catalogue.SEGMENT_IN_USE_BYTES)
    return SegmentPool(settings.shm_dir, f"{shm_prefix(settings)}.{name}", settings.shm_bytes_max, in_use)


def _admission(settings: Settings, registry: MetricsRegistry) -> Admission:
    in_flight = registry.gauge(catalogue.REQUESTS_IN_FLIGHT)
    refused = registry.counter(catalogue.REQUESTS_REFUSED, "gateway_full")
    return Admission(settings.inflight_requests_max, settings.inflight_bytes_max, in_flight, refused)


def _receive_budget(settings: Settings, registry: MetricsRegistry) -> ReceiveBudget:
    return ReceiveBudget(settings.inflight_bytes_max, registry.counter(catalogue.REQUESTS_REFUSED, "receiving_full"))


def _reply_budget(settings: Settings, registry: MetricsRegistry) -> ReplyBudget:
    return ReplyBudget(settings.reply_unread_bytes_max, registry.counter(catalogue.REQUESTS_REFUSED, "unread_full"))


def _traces(settings: Settings, router: Router, catalog: Catalog) -> SharedTraceSettings:
    return SharedTraceSettings(
        SharedDocument(settings.home / "run" / TRACE_SETTINGS),
        router.traces,
        settings.trace_file or settings.home / "logs" / "trace.json",
        lambda: catalog.snapshot.models,
        at_start(settings.trace_config),
    )


class _GrpcServer(SideServer, TypingProtocol):
    @property
    def http2(self) -> Callable[[], asyncio.Protocol] | None:
        """Makes a connection for the HTTP port; None: the server cannot."""


def _has_no_grpc(settings: Settings) -> bool:
    return settings.grpc_port < 0 and not settings.grpc_on_http_port


def _grpc(settings: Settings, gateway: Gateway, deps: Deps, *, shared: bool) -> _GrpcServer | None:
    if _has_no_grpc(settings):
        return None
    # Imported only where gRPC is on: the import costs time and memory.
    certificates = gateway.certificates
    if settings.grpc == "fast":
        from millstream.gateway.protocols.grpc.fast_server import FastGrpcServer

        tls = None
        if certificates is not None:
            tls = _tls(gateway, lambda: certificates.identity.h2_context, "gRPC", PLAIN_GRPC)
        return FastGrpcServer(deps, gateway.drain, shared=shared, tls=tls)
    from millstream.gateway.protocols.grpc.server import GrpcServer

    identity = None if certificates is None else lambda: certificates.identity
    return GrpcServer(deps, gateway.drain, shared=shared, identity=identity)


def _http(settings: Settings, deps: Deps, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(deps),
        host=settings.host,
        port=settings.http_port,
        http=protocol,
        loop="uvloop",
        log_config=None,  # its records are ours
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        backlog=4096,
        timeout_keep_alive=round(settings.http_keep_alive_s),
        lifespan="on",
    )


def _protocol(settings: Settings, gateway: Gateway, grpc: _GrpcServer | None) -> type[asyncio.Protocol]:
    """Return the protocol class of HTTP connections: over TLS if there is a certificate. Raises Failure(INVALID)."""
    plain, certificates = _plain_protocol(settings, gateway), gateway.certificates
    if settings.grpc_on_http_port:
        if grpc is None or grpc.http2 is None:
            raise invalid("MILLSTREAM_GRPC_ON_HTTP_PORT needs MILLSTREAM_GRPC=fast: grpc.aio's server has its own port")
        plain = shared_port_protocol(plain, grpc.http2)
    if certificates is None:
        return plain
    if settings.grpc_on_http_port:
        return tls_protocol(plain, _tls(gateway, lambda: certificates.identity.shared_context))
    return tls_protocol(plain, _tls(gateway, lambda: certificates.identity.context))


def _tls(
    gateway: Gateway, context: Callable[[], ssl.SSLContext], port: str = "HTTP", plain: Foreign = PLAIN_HTTP
) -> TlsListener:
    return TlsListener(context, gateway.handshakes, ForeignLog(time.monotonic, port), plain=plain)


def _plain_protocol(settings: Settings, gateway: Gateway) -> type[asyncio.Protocol]:
    if not settings.http_fast_path:
        plain = asgi_protocol(gateway.drain, settings.client_connections_max, settings.client_stall_s_max)
        return with_cors(plain, settings.cors_origin_list)
    protocol = fast_path_protocol(
        gateway.infer,
        settings.request_bytes_max,
        settings.client_connections_max,
        gateway.receive_budget,
        gateway.reply_budget,
        settings.client_stall_s_max,
        gateway.drain,
    )
    protocol.shared_buffers = gateway.shared_buffers
    protocol.http_counts = gateway.http_counts
    protocol.gate = gateway.gate
    protocol.browser_guard = gateway.browser_guard
    return with_observer(with_cors(protocol, settings.cors_origin_list), gateway.observing.observer)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m millstream.gateway", description="Run one gateway process.")
    parser.add_argument("--fd", type=int, help="a listening socket to serve, inherited from a supervisor")
    parser.add_argument("--index", type=int, default=0, help="number of the gateway on this machine")
    parser.add_argument("--ready-fd", type=int, help="a pipe to a supervisor, written to when the gateway is ready")
    parser.add_argument("--preload-fd", type=int, help="a pipe of a supervisor that ends when the models are loaded")
    return parser.parse_args()


def main() -> int:
    """Return the exit status: 0 after a drain that SIGTERM or SIGINT began; 1 if the gateway could not start."""
    arguments = _arguments()
    name = f"gateway-{arguments.index}"
    configure_logs("text", name)
    create_files_private()
    try:
        settings = read_settings()
        configure_logs(settings.log_format, name)
        check_platform_port()
        connections_max = settings.client_connections_max * (1 if _has_no_grpc(settings) else 2)
        allow_connections(connections_max + (0 if settings.tls_cert_file is None else HANDSHAKES_MAX))
        gateway = Gateway(settings, arguments.index, Preloads(arguments.preload_fd))
        shared = arguments.fd is not None
        deps = gateway.deps()
        grpc = _grpc(settings, gateway, deps, shared=shared)
        protocol = _protocol(settings, gateway, grpc)
    except (Failure, OSError) as error:
        exit_message(error.message if isinstance(error, Failure) else str(error))
        return 1
    log_start(settings, name, supervised=shared)
    server = Server(
        _http(settings, deps, protocol),
        gateway,
        settings.drain_s,
        shared_port=shared,
        ready_fd=arguments.ready_fd,
        side_server=grpc,
        handshakes=gateway.handshakes,
    )
    # Not as `fd`: uvicorn would take it for a unix socket, and replies would wait 40 ms for Nagle's algorithm.
    server.run([socket.socket(fileno=arguments.fd)] if shared else None)
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
