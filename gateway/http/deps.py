"""The parts of a gateway that routes and gRPC calls use, made in gateway/gateway.py, and how a route gets them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from millstream.gateway.access.access_control import KeyWatch
from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.access.gate import Gate
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.quotas import UploadSlots
from millstream.gateway.catalog.snapshot import VersionView
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.infer_handler import InferHandler
from millstream.gateway.observing.observer import Observer
from millstream.gateway.scheduling.caller import Caller
from millstream.services.access.audit_log import AuditLog
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.log_levels import StoredLogLevels
from millstream.services.repository.folder import FolderRepository
from millstream.services.segments.shared_buffers import SharedBuffers
from millstream.services.settings import Settings
from millstream.services.wire.records import WorkerRecord

T = TypeVar("T")


def part_of(parts: Iterable[object], of: type[T]) -> T:
    """Return the part of a type. Raises LookupError: no plug-in added one."""
    for part in parts:
        if isinstance(part, of):
            return part
    raise LookupError(f"no plug-in added a part of type {of.__name__}")


@dataclass(frozen=True, slots=True)
class Deps:
    """The parts of one gateway process."""

    settings: Settings
    registry: MetricsRegistry
    repository: FolderRepository
    catalog: Catalog
    cluster_state: ClusterState
    upload_slots: UploadSlots
    infer: InferHandler  # v2 over HTTP
    caller: Callable[[str], Caller]  # the other protocols, by their label of the metrics
    log_levels: StoredLogLevels
    load: Callable[[Manifest, float], Awaitable[None]]  # has a version loaded, and waits for it so many seconds
    receive_budget: ReceiveBudget  # bounds the bodies of requests that are being received
    http_counts: HttpCounts  # replies over HTTP, of the fast path, too
    shared_buffers: SharedBuffers | None  # for large messages; None: without shared memory
    reply_budget: ReplyBudget  # bounds replies that clients have not read
    ready: Callable[[], bool]  # whether a recent readiness probe came back, and the models of the start are loaded
    preloading: Callable[[], bool]  # whether the models of the start are still being loaded
    answering: Callable[[str], bool]  # content id -> whether a recent readiness probe of it came back
    count_refusal: Callable[[str], None]  # reason of a refusal, for the log
    metrics: Callable[[str | None], Awaitable[tuple[bytes, str]]]  # Accept header -> page, content type
    start: Callable[[], Awaitable[None]]  # awaited when the application starts
    stop: Callable[[], Awaitable[None]]  # awaited when the application stops
    version: str  # Millstream's version
    footprint: Callable[[Manifest, WorkerRecord], Footprint]  # what a version takes in a worker; reads files
    gate: Gate  # checks the keys of calls
    browser_guard: BrowserGuard  # refuses calls of web pages of other origins
    keys: KeyWatch  # keeps the keys as the repository has them
    audit: AuditLog
    observer: Observer | None = None  # takes finished requests, where traces or the access log are on
    load_s: Callable[[VersionView], float] = lambda _: 0.0  # predicted seconds of a version's load; 0: unknown
    parts: tuple[object, ...] = ()  # those of plug-ins

    def part(self, of: type[T]) -> T:
        """Return the part of a type that a plug-in added. Raises LookupError: none did."""
        return part_of(self.parts, of)


def deps_of(request: Request) -> Deps:
    """Return the parts of the gateway that the application was built with."""
    deps = request.app.state.deps
    assert isinstance(deps, Deps)
    return deps


#: the parameter by which a route gets the parts of the gateway
DepsOf = Annotated[Deps, Depends(deps_of)]
