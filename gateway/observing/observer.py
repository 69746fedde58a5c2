"""What is recorded of requests, by the core and by plug-ins, and how finished calls get there.

a batch has its reply ─> BatchSink: Triton's trace files
a call has its reply ──> Observer ─> CallSink: access log, spans

begin: trace, instant ─> … ─> end: instant, status ─> takers ─none──> nothing is built: most calls are not sampled
                                                          └─some──> Finished, with its runs ─> their `add`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from random import getrandbits
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

from millstream.gateway.observing.access_log import AccessLog, block_writer, json_text, stdout_writer, text_line
from millstream.gateway.observing.finished import Finished, key_of, runs_of
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.plugin.registry import contributions
from millstream.services.settings import Settings
from millstream.services.supervisor.log import ACCESS_SUFFIX as FILE_SUFFIX
from millstream.services.supervisor.log import LogFile
from millstream.services.traceparent import Trace

log = logging.getLogger("millstream.gateway")


class Wants(Protocol):
    """Says whether a sink takes a finished call. It runs for each call, in the event loop."""

    def __call__(
        self, trace: Trace | None, seconds: float, now: float, *, failed: bool, invalid: bool, reads: bool
    ) -> bool:
        """Return whether it takes a call.

        Args:
            trace: that the call belongs to; not None for a sink that traces.
            seconds: how long it took.
            now: when it ended, in seconds on the monotonic clock.
            failed: whether the server failed, or refused because of overload.
            invalid: whether its caller got it wrong.
            reads: whether it is a GET or HEAD.
        """


class CallSink(Protocol):
    """Takes finished calls, in the event loop.

    `wants`: selects calls; None: it takes all. `traces`: whether it takes only calls that belong to a trace; others
    begin one.
    """

    wants: Wants | None
    traces: bool

    def start(self) -> None:
        """Start its thread."""

    def add(self, request: Finished) -> None:
        """Take a call."""

    def close(self) -> None:
        """Pass on what waits, and end the thread. Blocks for some seconds at most."""


Takers = tuple[CallSink, ...]


def guarded(record: Callable[..., None], *arguments: Any) -> None:
    """Call what records a request. Its defect is logged, and costs no request its answer."""
    try:
        record(*arguments)
    except Exception:
        log.exception("a request could not be recorded")


class Observer:
    """Passes finished calls on to `sinks`. `active`: whether there are any; else calls are not observed at all.

    `times_batches`: whether requests get the times of their batches although there are no sinks: graphs count those of
    their steps.
    """

    times_batches = False

    def __init__(self, sinks: Sequence[CallSink] = ()) -> None:
        self._switches: list[Callable[[bool], None]] = []
        self._set(tuple(sinks))

    def _set(self, sinks: tuple[CallSink, ...]) -> None:
        self._sinks = sinks
        self._takes_all: Takers = tuple(sink for sink in sinks if sink.wants is None)
        self._selects = tuple((sink.wants, sink) for sink in sinks if sink.wants is not None)
        self._traces = any(sink.traces for _, sink in self._selects)
        self.active = bool(sinks)
        for switch in self._switches:
            switch(self.active)

    def attach(self, sink: CallSink) -> None:
        """Pass calls on to one more sink, from the event loop. Calls that began before may lack their start."""
        self._set((*self._sinks, sink))

    def detach(self, sink: CallSink) -> None:
        """Pass no more calls on to a sink."""
        self._set(tuple(one for one in self._sinks if one is not sink))

    def on_switch(self, switch: Callable[[bool], None]) -> None:
        """Call `switch` now, and whenever sinks come or go, with whether there are any."""
        self._switches.append(switch)
        switch(self.active)

    def trace(self, sent: bytes | None) -> Trace | None:
        """Return the trace that a call belongs to: that of its caller (`sent`), else a new one if traces are on."""
        return getrandbits(128) or 1 if sent is None and self._traces else sent

    def takers(
        self,
        trace: Trace | None,
        started: float,
        ended: float,
        *,
        failed: bool,
        invalid: bool = False,
        reads: bool = False,
    ) -> Takers:
        """Return what takes a finished call: call `finish` for it unless there is nothing.

        Args:
            trace: of `trace`.
            started: when the call was read, in seconds on the monotonic clock.
            ended: when its reply was written.
            failed: whether the server failed, or refused because of overload.
            invalid: whether its caller got it wrong.
            reads: whether it is a GET or HEAD.
        """
        takers = self._takes_all
        for wants, sink in self._selects:
            if (trace is not None or not sink.traces) and wants(
                trace, ended - started, ended, failed=failed, invalid=invalid, reads=reads
            ):
                takers = (*takers, sink)
        return takers

    @staticmethod
    def finish(takers: Takers, request: Finished, tickets: Iterable[Any]) -> None:
        """Pass a call on to its takers. `tickets`: the handles on its inference requests."""
        whole = Finished(*request[:-2], request.key or key_of(tickets), runs_of(tickets))
        for taker in takers:
            guarded(taker.add, whole)


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

    `parts`: all that plug-ins and the core added. `observer`: takes finished calls, also of sinks that come later.
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
        self.observer = Observer(self._calls)

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
