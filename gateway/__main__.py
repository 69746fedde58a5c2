"""python -m millstream.gateway: one gateway process. Objects of the gateway are built here and nowhere else."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import socket
import sys

from millstream.services.extras import exit_without

if __name__ == "__main__":
    exit_without("gateway", "cpu")

import uvicorn

from millstream.gateway.app import build_app
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.labels import Labels, read_labels
from millstream.gateway.catalog.shared_settings import SharedDocument, watch
from millstream.gateway.catalog.upload_slots import Uploads
from millstream.gateway.connection.drain import Drain, asgi_protocol
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.fd_limit import allow_connections
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.connection.reply_budget import ReplyBudget
from millstream.gateway.connection.server import Server, SideServer
from millstream.gateway.memory_trim import MemoryTrim
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.openai.embeddings import Embeddings
from millstream.gateway.protocols.openai.tokenizers import Tokenizers
from millstream.gateway.protocols.v2.codec import V2CodecFactory
from millstream.gateway.protocols.v2.service import InferService
from millstream.gateway.scheduling.admission import Admission
from millstream.gateway.scheduling.caller import Caller
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.readiness import ReadinessProbe
from millstream.gateway.scheduling.router import Router
from millstream.gateway.tensors.json_text import JsonLimits
from millstream.gateway.triton.loader import RepositoryLoader
from millstream.gateway.triton.log import SharedLogSettings
from millstream.gateway.triton.metrics import Page
from millstream.gateway.triton.model_config import VersionConfigurations
from millstream.gateway.triton.shared_memory import ClientMemory
from millstream.gateway.triton.statistics import MachineStatistics
from millstream.gateway.triton.trace import SharedTraceSettings
from millstream.services.errors import Code, Failure, invalid
from millstream.services.installation import installation_name, shm_prefix
from millstream.services.metrics import catalogue
from millstream.services.metrics.page import GaugeSample, MetricsPage
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.process.cancel import cancel_all
from millstream.services.process.gc_tuning import freeze_gc
from millstream.services.process.private_files import create_files_private
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.death_notices import Death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import host_token, remove_leftovers
from millstream.services.settings import LOG_SETTINGS, TRACE_SETTINGS, Settings, read_settings
from millstream.services.trace_settings import at_start
from millstream.services.version import VERSION
from millstream.services.wire.worker_id import pool_of

DEPTHS_AT_ONCE = 100
DEPTHS_S_MAX = 1.0  # for the streams' depths on the metrics page: all else is shown without Redis


class Gateway:
    """The parts of one gateway process, and the order in which they start and stop."""

    def __init__(self, settings: Settings, index: int) -> None:
        if settings.redis_url is None:
            raise invalid("set MILLSTREAM_REDIS_URL to the Redis that gateways and workers share")
        address = RedisAddress.parse(settings.redis_url.get_secret_value())
        settings = settings.model_copy(update={"installation_name": installation_name(settings)})
        keys = InstallationKeys(installation_name(settings))
        self.settings = settings
        self.name = f"{index}-{os.getpid()}-{os.urandom(8).hex()}"
        self.registry = MetricsRegistry(settings.metrics_dir, f"gateway-{index}")
        self.segments: SegmentPool | None = None
        if settings.shm_bytes_max:
            # What a gateway that was killed left behind is nobody's: the one that takes its place gives it back.
            remove_leftovers(settings.shm_dir, shm_prefix(settings))
            prefix = f"{shm_prefix(settings)}.{self.name}"
            in_use = self.registry.gauge(catalogue.SEGMENT_BYTES_IN_USE)
            self.segments = SegmentPool(settings.shm_dir, prefix, settings.shm_bytes_max, in_use)
        self.admission = Admission(
            settings.inflight_requests_max,
            settings.inflight_bytes_max,
            self.registry.gauge(catalogue.REQUESTS_IN_FLIGHT),
            self.registry.counter(catalogue.REFUSED, "gateway_full"),
        )
        self.receive_budget = ReceiveBudget(
            settings.inflight_bytes_max, self.registry.counter(catalogue.REFUSED, "receiving_full")
        )
        self.reply_budget = ReplyBudget(
            settings.reply_unread_bytes_max, self.registry.counter(catalogue.REFUSED, "unread_full")
        )
        self.drain = Drain()
        self.repository = FolderRepository(settings.repository_dir)
        self.cluster_state = ClusterState(address, keys)
        self.producer = Producer(address, keys, self.name, self.registry, settings.queue_lease_s)
        self.client_memory = ClientMemory(settings.shm_dir, shm_prefix(settings), allowed=settings.shm_allow_clients)
        self.lanes = Router(
            settings,
            self.producer,
            self.admission,
            self.segments,
            self.registry,
            host_token(settings.shm_dir),
            V2CodecFactory(self._labels, self.client_memory, self.reply_budget, settings.request_bytes_max),
        )
        self.producer.lanes = self.lanes.all
        self.lanes.quarantine.tell = self._tell_of_poison
        events = {"died": self._death, "poison": self._poison}
        self.catalog = Catalog(self.name, self.repository, self.cluster_state, self.lanes.apply, events)
        self.readiness_probe = ReadinessProbe(
            lambda: self.lanes.serving, self.producer.connected, lambda: len(self.catalog.snapshot.workers), self.drain
        )
        self.infer = InferService(
            self.lanes, self.receive_budget, settings.request_bytes_max, settings.request_timeout_s_max
        )
        self.caller = Caller(self.lanes.find, settings.request_timeout_s_max)
        json_limits = JsonLimits(settings.json_bytes_max, settings.json_values_max)
        self.embeddings = Embeddings(self.caller, Tokenizers(self.repository), json_limits)
        self.statistics = MachineStatistics(self.registry, lambda: self.catalog.snapshot)
        self.page = Page(lambda: self.catalog.snapshot)
        self.metrics_page = MetricsPage(self.registry)
        self.configurations = VersionConfigurations(lambda: self.catalog.snapshot)
        self.control = RepositoryLoader(
            self.repository, self.catalog, settings, answering=self.readiness_probe.answering
        )
        run = settings.home / "run"
        self.traces = SharedTraceSettings(
            SharedDocument(run / TRACE_SETTINGS),
            self.lanes.traces,
            settings.trace_file or settings.home / "logs" / "trace.json",
            lambda: self.catalog.snapshot.models,
            at_start(settings.trace_config),
        )
        self.logs = SharedLogSettings(SharedDocument(run / LOG_SETTINGS), logging.getLogger().handlers)
        self._memory = MemoryTrim(self.admission, self.receive_budget, self.reply_budget, self.registry)
        self._loops: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self._scrape = asyncio.Lock()
        self._unreadable = self.registry.gauge(catalogue.RECORDS_UNREADABLE)
        self.version = VERSION
        self.registry.gauge(catalogue.BUILD_INFO, self.version, platform.python_version()).set(1)

    def _labels(self, manifest: Manifest) -> Labels:
        return read_labels(self.repository.local_path(manifest.model, manifest.version), manifest)

    async def _death(self, text: str) -> None:
        """A supervisor saw a worker die (millstream.services.queue.death_notices): nobody waits for its lease to run out."""
        death = Death.read(text)
        pool = pool_of(death.worker)
        await self.producer.reclaim(pool, death)
        if death.blamed:
            await self.producer.circuit_breaker.count(pool, death.blamed, death.worker)

    def _tell_of_poison(self, digest: str) -> None:
        task = asyncio.create_task(self._publish(f"poison:{digest}"))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _publish(self, message: str) -> None:
        with contextlib.suppress(Failure):  # they find it out as we did
            await self.cluster_state.publish(message)

    async def _poison(self, digest: str) -> None:
        """Some gateway, perhaps this one, refuses a request that killed workers."""
        self.lanes.quarantine.learn(digest)

    async def start(self) -> None:
        await self.catalog.start()
        self.producer.start()
        self.readiness_probe.start()
        await self.control.start()
        documents = {self.traces.document: self.traces.apply, self.logs.document: self.logs.apply}
        self._loops.append(asyncio.create_task(watch(documents, self.traces.flush)))
        self._loops.append(asyncio.create_task(self._memory.run()))
        freeze_gc()

    async def stop(self) -> None:
        await self.readiness_probe.stop()
        await self.catalog.stop()
        await self.producer.stop()
        await cancel_all(self._loops)
        await self.traces.close()
        if self.segments is not None:
            self.segments.close()
        self.registry.close()

    def ready(self) -> bool:
        return self.readiness_probe.ready()

    async def settle(self) -> None:
        """Return when nothing is on its way, canaries included."""
        await self.readiness_probe.stop()
        await self.producer.settle()

    def abandon(self) -> None:
        """Refuse whatever is still on its way, and all that comes."""
        self.admission.closed = True
        for lane in self.lanes.all():
            lane.abandon(Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1))

    async def metrics(self, accept: str | None) -> tuple[bytes, str]:
        """The metrics page; the depths of the streams are read for it."""
        async with self._scrape:
            self._unreadable.set(len(self.cluster_state.unreadable))
            depths: list[GaugeSample] = []
            with contextlib.suppress(Failure, TimeoutError):
                async with asyncio.timeout(DEPTHS_S_MAX):
                    await self._stream_depths(depths)
            return await asyncio.to_thread(self.metrics_page.render, accept, self.page.lines, depths)

    async def _stream_depths(self, depths: list[GaugeSample]) -> None:
        by_pool: dict[str, list[Lane]] = {}
        for lane in self.lanes.all():
            by_pool.setdefault(lane.manifest.config.pool, []).append(lane)
        for pool, of_pool in by_pool.items():
            # A few at a time: the event loop has other things to do.
            for start in range(0, len(of_pool), DEPTHS_AT_ONCE):
                lanes = of_pool[start : start + DEPTHS_AT_ONCE]
                entries = await self.cluster_state.stream_entries(pool, [lane.content_id for lane in lanes])
                for lane, count in zip(lanes, entries, strict=True):
                    labels = (lane.manifest.model, str(lane.manifest.version), pool)
                    depths.append(GaugeSample(catalogue.STREAM_ENTRIES, labels, count))

    def deps(self) -> Deps:
        return Deps(
            settings=self.settings,
            repository=self.repository,
            catalog=self.catalog,
            uploads=Uploads(self.catalog),
            infer=self.infer,
            caller=self.caller,
            embed=self.embeddings.answer,
            client_memory=self.client_memory,
            receive_budget=self.receive_budget,
            reply_budget=self.reply_budget,
            statistics=self.statistics,
            configurations=self.configurations,
            control=self.control,
            traces=self.traces,
            logs=self.logs,
            ready=self.readiness_probe.ready,
            answering=self.readiness_probe.answering,
            metrics=self.metrics,
            start=self.start,
            stop=self.stop,
            version=self.version,
        )


def _grpc(settings: Settings, gateway: Gateway, deps: Deps, *, shared: bool) -> SideServer | None:
    if settings.grpc_port < 0:
        return None
    # Imported here: without gRPC, neither the time nor the memory is spent.
    from millstream.gateway.protocols.grpc.server import GrpcServer

    return GrpcServer(deps, gateway.drain, shared=shared)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m millstream.gateway", description="Run one gateway process.")
    parser.add_argument("--fd", type=int, help="a listening socket to serve, inherited from a supervisor")
    parser.add_argument("--index", type=int, default=0, help="number of the gateway on this machine")
    parser.add_argument("--ready-fd", type=int, help="where to say that it is ready: a pipe to a supervisor")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    create_files_private()
    try:
        settings = read_settings()
        allow_connections(settings.client_connections_max * (1 if settings.grpc_port < 0 else 2))
        gateway = Gateway(settings, arguments.index)
        protocol = _protocol(settings, gateway)
    except (Failure, OSError) as error:
        print(f"error: {error.message if isinstance(error, Failure) else error}", file=sys.stderr)
        return 1
    deps = gateway.deps()
    config = uvicorn.Config(
        build_app(deps),
        host=settings.host,
        port=settings.http_port,
        http=protocol,
        loop="uvloop",
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        backlog=4096,
        timeout_keep_alive=round(settings.http_keep_alive_s),
        lifespan="on",
    )
    shared = arguments.fd is not None
    side_server = _grpc(settings, gateway, deps, shared=shared)
    server = Server(
        config,
        gateway,
        settings.drain_s,
        shared_port=shared,
        ready_fd=arguments.ready_fd,
        side_server=side_server,
    )
    # Not as `fd`: uvicorn would take it for a unix socket, and replies would wait 40 ms for Nagle's algorithm.
    server.run([socket.socket(fileno=arguments.fd)] if shared else None)
    return 0 if server.started else 1


def _protocol(settings: Settings, gateway: Gateway) -> type[asyncio.Protocol]:
    if not settings.http_fast_path:
        return asgi_protocol(gateway.drain)
    return fast_path_protocol(
        gateway.infer,
        settings.request_bytes_max,
        settings.client_connections_max,
        gateway.receive_budget,
        gateway.reply_budget,
        settings.client_stall_s_max,
        gateway.drain,
    )


if __name__ == "__main__":
    sys.exit(main())
