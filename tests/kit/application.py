"""Runs the gateway's HTTP application over a real repository, with clients in process or over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import cast

import grpc
import httpx2
import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Scope

from millstream.gateway.access.access_control import KeyWatch
from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate, Keyless
from millstream.gateway.access.principal import Principal
from millstream.gateway.app import build_app
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.quotas import UploadSlots
from millstream.gateway.catalog.snapshot import ScaleView, version_number
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.infer_handler import HttpReply, InferHeaders
from millstream.gateway.grpc.server import GrpcServer
from millstream.gateway.http.deps import Deps
from millstream.gateway.observing.observer import Recorder
from millstream.gateway.parts import GatewayParts, PreparerParts, build_parts, build_preparers
from millstream.gateway.scheduling.caller import caller_of
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.services.access.access_keys import AccessKeys
from millstream.services.access.audit_log import AuditLog
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.plugin.registry import contributions
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import StoredLogLevels
from millstream.services.queue.url import RedisAddress, async_client
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import settings_class
from millstream.services.traceparent import Trace
from tests.kit.catalog import RepositoryCatalog

LOCAL = "http://127.0.0.1"
TOKEN = "mt_the-token-of-this-test"
OPERATOR = {"authorization": f"Bearer {TOKEN}"}


class Exchange:
    """One ASGI request, message by message: the test feeds body chunks and waits for the status."""

    def __init__(
        self, app: FastAPI, method: str, path: str, query: str = "", headers: dict[str, str] | None = None
    ) -> None:
        names = {"host": "127.0.0.1", **OPERATOR, **(headers or {})}
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in names.items()],
            "client": ("127.0.0.1", 5000),
        }
        self._fed: asyncio.Queue[Message] = asyncio.Queue()
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self.task = asyncio.create_task(app(scope, self._fed.get, self._sent.put))

    def feed(self, body: bytes, *, more: bool = False) -> None:
        self._fed.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self._fed.put_nowait({"type": "http.disconnect"})

    async def status(self) -> int:
        """Wait for the reply and return its status."""
        await asyncio.wait_for(self.task, 120)
        status = (await self._sent.get())["status"]
        assert isinstance(status, int)
        return status


class Submission:
    """A request that reached the infer handler, with the callback that answers it."""

    def __init__(
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes | memoryview,
        done: Callable[[HttpReply], None],
    ) -> None:
        self.model = model
        self.version = version
        self.headers = headers
        self.body = body
        self.done = done
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class Inbox:
    """An infer handler whose requests the test answers: `next` returns them in order of arrival."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Submission] = asyncio.Queue()

    def submit(
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes | memoryview,
        done: Callable[[HttpReply], None],
        request_id: bytes = b"",
        principal: Principal | None = None,
        trace: Trace | None = None,
    ) -> Submission:
        submission = Submission(model, version, headers, body, done)
        self._arrived.put_nowait(submission)
        return submission

    async def next(self) -> Submission:
        return await self._arrived.get()

    @property
    def empty(self) -> bool:
        return self._arrived.empty()


class Application:
    """The application and its parts, which tests may access. Create it inside a running event loop.

    `gate`: its check of keys; None: one without keys.
    """

    def __init__(self, home: Path, gate: Gate | None = None, /, **settings: object) -> None:
        self.settings = settings_class().model_validate(
            {"home": home, "shm_dir": home, "installation_name": "test", **settings}
        )
        self.repository = FolderRepository(self.settings.repository_dir)
        self.catalog = RepositoryCatalog(self.repository)
        self.inbox = Inbox()
        self.reply_budget = ReplyBudget(self.settings.reply_unread_bytes_max)
        self.receive_budget = ReceiveBudget(self.settings.inflight_bytes_max)
        self.ready = True
        self.is_ready: Callable[[], bool] = lambda: self.ready
        self.registry = MetricsRegistry(None, "gateway")
        self.accepts: list[str | None] = []
        self.events: list[str] = []
        key = self.settings.admin_key
        self.gate = gate or Gate(
            None if key is None else key.get_secret_value(),
            local_token=TOKEN,
            keyless=Keyless(self.settings.open_control, warns=self.settings.keys == "warn"),
        )
        self.browser_guard = BrowserGuard(self.settings.cors_origin_list, AllowedHosts(self.settings.allowed_host_list))
        no_redis = RedisAddress.unix(str(home / "no-redis"))
        cluster_state = ClusterState(no_redis, InstallationKeys("test"))
        log_levels = StoredLogLevels(no_redis, InstallationKeys("test"))
        for stored in (
            cluster_state,
            log_levels,
        ):  # it never comes: repeated tries took most of the time of these tests
            stored._redis = async_client(no_redis, retries=0)
        caller = caller_of(self._find, 600, self.gate.check_model)
        made = contributions("client_memory", FunctionType)
        preparers = build_preparers(PreparerParts(self.settings, self.repository, self.receive_budget))
        parts = preparers + build_parts(
            GatewayParts(
                settings=self.settings,
                name="gateway-0",
                unique_name="0-test",
                address=no_redis,
                keys=InstallationKeys("test"),
                registry=self.registry,
                repository=self.repository,
                catalog=cast("Catalog", self.catalog),
                lanes=LaneTable(),
                scale=ScaleView(),
                cluster_state=cluster_state,
                caller=caller,
                gate=self.gate,
                client_memory=made[0](self.settings, lambda: self.gate.enforced) if made else None,
                recorded=(recorder := Recorder(self.settings, self.registry, "gateway-0")).parts,
                observer=recorder.observer,
                set_verbose=lambda _: None,
                answering=lambda _: True,
                load=self._load,
                uploading=lambda *_: nullcontext(),
                on_drain=lambda _act: None,
            )
        )
        self.parts = parts
        self.app: FastAPI = build_app(
            Deps(
                settings=self.settings,
                registry=self.registry,
                repository=self.repository,
                catalog=cast("Catalog", self.catalog),
                cluster_state=cluster_state,
                upload_slots=UploadSlots(cast("Catalog", self.catalog)),
                infer=self.inbox,
                caller=caller,
                load=self._load,
                receive_budget=self.receive_budget,
                shared_buffers=None,
                http_counts=HttpCounts(self.registry),
                reply_budget=self.reply_budget,
                log_levels=log_levels,
                ready=self._ready,
                preloading=lambda: False,
                answering=lambda _: self._ready(),
                count_refusal=lambda _: None,
                metrics=self._metrics,
                start=self._start,
                stop=self._stop,
                version="1.2.3",
                gate=self.gate,
                browser_guard=self.browser_guard,
                keys=KeyWatch(
                    "gateway",
                    self.gate,
                    AccessKeys(self.settings.repository_dir),
                    cluster_state,
                    self.settings,
                    self.registry,
                ),
                audit=AuditLog(self.settings.repository_dir, "gateway"),
                parts=parts,
                footprint=lambda manifest, worker: self.repository.footprints.of(manifest, worker.backend),
            )
        )

    def audit_text(self) -> str:
        """Return the audit log."""
        folder = self.settings.repository_dir / "audit"
        return "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))

    def client(self, *, address: str = "127.0.0.1", base_url: str = LOCAL, operator: bool = True) -> httpx2.AsyncClient:
        """Return an in-process client whose calls seem to come from `address`, with the operator's token or none."""
        transport = httpx2.ASGITransport(self.app, client=(address, 5000))
        return httpx2.AsyncClient(transport=transport, base_url=base_url, headers=OPERATOR if operator else None)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve the application with uvicorn on a free port; yields its URL."""
        server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_config=None, ws="none"))
        listener = server.config.bind_socket()
        listener.listen()  # connections before the server has started wait in the backlog
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"{LOCAL}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running
            listener.close()

    @asynccontextmanager
    async def grpc_channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """Serve the gRPC API on a free port; yields a channel to it. `grpc_port` of the settings has to be 0."""
        serving = GrpcServer(self.app.state.deps, Drain(), shared=False)
        await serving.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}") as channel:
                yield channel
        finally:
            await serving.close()

    def _find(self, model: str, version: str | None) -> ModelRoute:
        number = None if version is None else version_number(model, version)
        manifest = self.catalog.snapshot.model(model).version(number).manifest
        raise Failure(Code.UNAVAILABLE, f"no worker serves version {manifest.version} of {model!r}")

    def _ready(self) -> bool:
        return self.is_ready()

    async def _metrics(self, accept: str | None) -> tuple[bytes, str]:
        self.accepts.append(accept)
        return b"up 1\n", "text/plain; version=0.0.4; charset=utf-8"

    async def _load(self, _manifest: Manifest, _seconds_max: float) -> None:
        """There is no worker: everything counts as loaded."""

    async def _start(self) -> None:
        self.events.append("start")

    async def _stop(self) -> None:
        self.events.append("stop")
