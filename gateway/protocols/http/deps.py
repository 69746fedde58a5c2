"""What the HTTP application stands on, handed to it in one value. Knows nothing of HTTP frameworks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from millstream.gateway.catalog.interfaces import ModelCatalog
from millstream.gateway.connection.infer_handler import InferHandler
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.gateway.connection.reply_budget import ReplyBudget
from millstream.gateway.scheduling.caller import Caller
from millstream.gateway.triton import interfaces
from millstream.services.repository.base import Repository
from millstream.services.settings import Settings


@dataclass(frozen=True, slots=True)
class Deps:
    """`version`: of the product. `ready`: a recent canary inference came back; `answering`: one of this content id did.

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
