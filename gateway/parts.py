"""What plug-ins add to a gateway, and what of the gateway they may use.

contributions("gateway"): build(GatewayParts) ─> a part ─> started with the gateway ─> deps.part(Type) in its routes
contributions("preparer"): build(PreparerParts) ─> a Preparer ─> the plans of requests that give texts or files
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol

from millstream.gateway.access.gate import Gate
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.snapshot import ScaleView
from millstream.gateway.connection.budgets import ReceiveBudget
from millstream.gateway.observing.observer import Observer
from millstream.gateway.scheduling.caller import Caller
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.output_options import ClientRegions
from millstream.gateway.tensors.prepared import PreparedPlans
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.plugin.registry import contributions
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of a gateway that those of plug-ins may use."""

    settings: Settings
    name: str  # the process's, as logs and metrics have it
    unique_name: str  # another one after each start of the process, in Redis
    address: RedisAddress
    keys: InstallationKeys
    registry: MetricsRegistry
    repository: FolderRepository
    catalog: Catalog
    lanes: LaneTable
    scale: ScaleView  # a plug-in that scales pools sets it
    cluster_state: ClusterState
    caller: Callable[[str], Caller]  # runs requests of a protocol, by its label of the metrics
    gate: Gate  # says whether calls need a key
    client_memory: ClientRegions | None  # clients pass tensors in it
    recorded: tuple[object, ...]  # what records requests
    observer: Observer  # takes finished calls; a part may attach a sink while it needs them
    set_verbose: Callable[[bool], None]  # has debug messages logged, unless an operator chose a level
    answering: Callable[[str], bool]  # content id -> whether a recent readiness probe of it came back
    load: Callable[[Manifest, float], Awaitable[None]]  # has a version loaded, and waits for it so many seconds
    uploading: Callable[[str, int], AbstractAsyncContextManager[object]]  # counts an upload: model, bytes
    on_drain: Callable[[Callable[[], None]], None]  # has a function called when the gateway begins to drain


def build_parts(of: GatewayParts) -> tuple[object, ...]:
    """Return the parts that plug-ins add. Raises Failure and OSError: one cannot be built."""
    return tuple(build(of) for build in contributions("gateway", FunctionType))


async def start_parts(parts: Iterable[object]) -> None:
    """Start the parts that have `start`, a coroutine function, in their order."""
    for part in parts:
        if (start := getattr(part, "start", None)) is not None:
            await start()


async def stop_parts(parts: Iterable[object]) -> None:
    """Stop the parts that have `stop`, a coroutine function, in the order of their start reversed."""
    for part in reversed(tuple(parts)):
        if (stop := getattr(part, "stop", None)) is not None:
            await stop()


class Preparer(Protocol):
    """A part of a gateway that makes tensors of what requests give in another form, for the versions that take it."""

    def plans(self, manifest: Manifest, own: InputPlans) -> PreparedPlans | None:
        """Return the plans of such requests; None: the version takes none. `own`: the version's own plans."""


@dataclass(frozen=True, slots=True)
class PreparerParts:
    """The parts of a gateway that a preparer may use."""

    settings: Settings
    repository: FolderRepository
    receive_budget: ReceiveBudget  # bounds what is being prepared, as it bounds bodies that arrive


def build_preparers(of: PreparerParts) -> tuple[Preparer, ...]:
    """Return the preparers that plug-ins add."""
    return tuple(build(of) for build in contributions("preparer", FunctionType))


def prepared_of(preparers: Sequence[Preparer], manifest: Manifest, own: InputPlans) -> PreparedPlans | None:
    """Return the plans of requests that the first preparer of the version prepares; None: none does."""
    found = (one.plans(manifest, own) for one in preparers)
    return next((plans for plans in found if plans is not None), None)
