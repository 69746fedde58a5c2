"""What is recorded of requests, by the core and by plug-ins.

a batch has its reply ─> BatchSink: Triton's trace files
a call has its reply ──> Observer ─> CallSink: access log, spans
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Protocol, runtime_checkable

from millstream.gateway.observing.access_log import AccessLog, block_writer, json_text, stdout_writer, text_line
from millstream.gateway.observing.observer import CallSink, Observer
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.plugin.registry import contributions
from millstream.services.settings import Settings
from millstream.services.supervisor.log import ACCESS_SUFFIX as FILE_SUFFIX
from millstream.services.supervisor.log import LogFile


@runtime_checkable
class BatchSink(Protocol):
    """Records batches when their replies have come, in the event loop.

    `on`: whether it records at all. It is looked up for each batch.
    """

    on: bool

    def batch(self, batch: Any, header: Any, live: Any, outputs: Any, end: float) -> None:
        """Record a batch (InFlightBatch) whose reply (ReplyHeader) came at `end`.

        Args:
            batch: the batch.
            header: the header of its reply.
            live: its requests that did not fail.
            outputs: their outputs (Outputs); None: the reply could not be read.
            end: instant of the reply, in seconds on the monotonic clock.
        """

    def split(self, manifest: Any, request: Any, reply: Any, header: Any, put_at: float, end: float) -> None:
        """Record a request of a version (Manifest) that ran in parts, with the header and the times of the last one."""


class Recorder:
    """Holds what records the requests of a gateway.

    `parts`: all that plug-ins and the core added. `observer`: takes finished calls; None: nothing records any.
    `batches`: what records batches.

    Raises Failure and OSError: a sink cannot be built.
    """

    def __init__(self, settings: Settings, registry: MetricsRegistry, name: str) -> None:
        made = [build(settings, registry, name) for build in contributions("recorder", FunctionType)]
        if settings.access_log != "off":
            made.append(_access_log(settings, registry, name))
        self.parts = tuple(sink for sink in made if sink is not None)
        self.batches = tuple(sink for sink in self.parts if isinstance(sink, BatchSink))
        self._calls: list[CallSink] = [sink for sink in self.parts if sink not in self.batches]
        self.observer = Observer(self._calls) if self._calls else None

    def start(self) -> None:
        """Start the threads."""
        for sink in self._calls:
            sink.start()

    def close(self) -> None:
        """Export and write what waits, and end the threads. Blocks for some seconds at most."""
        for sink in self._calls:
            sink.close()


def _access_log(settings: Settings, registry: MetricsRegistry, name: str) -> AccessLog:
    if settings.access_log == "file":
        folder = settings.home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        write = block_writer(LogFile(folder / f"{name}{FILE_SUFFIX}.log"))
    else:
        write = stdout_writer()
    return AccessLog(write, json_text(name) if settings.log_format == "json" else text_line, registry)
