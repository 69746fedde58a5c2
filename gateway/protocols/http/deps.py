"""What the HTTP application stands on, handed to it in one value. Knows nothing of HTTP frameworks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.catalog.snapshot import Snapshot
from gateway.connection.infer_handler import InferHandler
from gateway.connection.receive_budget import ReceiveBudget
from gateway.connection.reply_budget import ReplyBudget
from gateway.scheduling.caller import Caller
from gateway.triton import interfaces
from services.repository.base import Repository
from services.settings import Settings
from services.wire.records import State

#: (model, version) of an upload in progress; version None: its number is given when it is published
UploadKey = tuple[str, int | None]


class ModelCatalog(Protocol):
    """What is known about models now, in all processes, as far as this gateway has heard."""

    @property
    def snapshot(self) -> Snapshot:
        """Replaced as a whole; never changed in place."""

    @property
    def uploads(self) -> Mapping[UploadKey, State]:
        """Uploads in progress in any gateway: UPLOADED while bytes come in, then CHECKING."""

    async def refresh(self) -> None:
        """Read the repository and the workers' records again."""

    async def announce(self, model: str) -> None:
        """Tell all gateways and workers that the repository changed, and refresh."""

    async def next_change(self, timeout_s: float) -> bool:
        """Wait until the snapshot changes; False when `timeout_s` passed first."""

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        """Make an upload in progress visible to all gateways; None: it has ended."""


@dataclass(frozen=True, slots=True)
class Deps:
    """`version`: of the product. `ready`: a recent canary inference came back; `answering`: one of this release did.

    `receive_budget`: the receive budget of the gateway; `reply_budget`: its reply budget. `metrics`: Accept header -> page, content type.

    `start` and `stop` are awaited when the application starts and stops.
    """

    settings: Settings
    repository: Repository
    catalog: ModelCatalog
    infer: InferHandler
    caller: Caller
    statistics: interfaces.Statistics
    traces: interfaces.TraceSettings
    logs: interfaces.LogSettings
    configurations: interfaces.Configurations
    control: interfaces.ModelLoader
    client_memory: interfaces.MemoryRegistry
    receive_budget: ReceiveBudget
    reply_budget: ReplyBudget
    ready: Callable[[], bool]
    answering: Callable[[str], bool]
    metrics: Callable[[str | None], Awaitable[tuple[bytes, str]]]
    start: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]
    version: str
