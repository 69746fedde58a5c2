"""Finished requests -> spans. Pure: ids and the offset of Unix time are passed in.

trace of a request: server ─┬─ decode ─ lane ─ queue ─ worker ─ reply      the span `worker` links to its batch
                            └──────────────────────────┴─ run
trace of a batch:   batch ──┬─ queue ─ gather ─ run ─ split               the span `batch` links to its requests

A span is made when its request has ended, with the times that statistics measure. Those within a worker come with its
reply, as durations, and their spans have the worker's resource.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from millstream.gateway.observing.finished import BatchTiming, Finished, Run
from millstream.services.traceparent import context_of
from millstream.services.version import VERSION
from millstream.services.wire.batch import ReplyHeader

LINKS_MAX = 128  # links of one span, the default limit of OpenTelemetry
_TEXT_MAX = 256  # characters of a value that a caller chose
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("millstream", VERSION)

Value = str | int


class SpanMaker:
    """Makes the spans of requests.

    Args:
        resource_of: returns the resource of a worker, by its name; of "": that of this process.
        ids: makes ids of spans, and the trace ids of batches.
    """

    def __init__(self, resource_of: Callable[[str], Resource], ids: IdGenerator) -> None:
        self.resource_of = resource_of
        self._ids = ids

    def spans_of(self, requests: Iterable[Finished], offset_ns: int) -> Iterator[ReadableSpan]:
        """Yield the spans of requests, and of the batches that they were in; of each batch once.

        `offset_ns`: what Unix time is ahead of the clock of the requests.
        """
        batches: dict[int, tuple[BatchTiming, Run, list[Link]]] = {}
        for request in requests:
            assert request.trace is not None
            sent = context_of(request.trace)
            trace_id, caller = int.from_bytes(sent.trace_id), int.from_bytes(sent.parent_id)
            server = self.context(trace_id)
            above = SpanContext(trace_id, caller, is_remote=True) if caller else None
            spans = _Spans(self, server, offset_ns, above)
            yield _server(spans, request)
            for run in request.runs:
                if run.timing is not None:
                    if run.timing.span is None:
                        run.timing.span = self.context(self._ids.generate_trace_id())
                        batches[id(run.timing)] = run.timing, run, []
                    if id(run.timing) in batches:
                        batches[id(run.timing)][2].append(Link(server))
                yield from _parts(spans, request, run)
        for timing, run, links in batches.values():
            yield from _batch(_Spans(self, timing.span, offset_ns), timing, run, links[:LINKS_MAX])

    def context(self, trace_id: int) -> SpanContext:
        return SpanContext(trace_id, self._ids.generate_span_id(), is_remote=False, trace_flags=_SAMPLED)


class _Spans:
    """Makes the spans of one trace, below its outermost span `outer`."""

    def __init__(self, maker: SpanMaker, outer: SpanContext, offset_ns: int, caller: SpanContext | None = None) -> None:
        self._maker = maker
        self._caller = caller
        self._offset_ns = offset_ns
        self.outer = outer

    def span(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        parent: SpanContext | None = None,
        worker: str = "",
        **more: Any,
    ) -> ReadableSpan:
        """Return a span below `parent`, which is the outermost span if it is None."""
        context = self._maker.context(self.outer.trace_id)
        return self._made(name, context, parent or self.outer, (start, end), attributes, worker, more)

    def outermost(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], **more: Any
    ) -> ReadableSpan:
        """Return the outermost span, below that of the caller."""
        return self._made(name, self.outer, self._caller, (start, end), attributes, "", more)

    def _made(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Value] | None,
        worker: str,
        more: dict[str, Any],
    ) -> ReadableSpan:
        start, end = times
        return ReadableSpan(
            name,
            context,
            parent,
            self._maker.resource_of(worker),
            attributes,
            instrumentation_scope=_SCOPE,
            start_time=self._offset_ns + int(start * 1e9),
            end_time=self._offset_ns + int(max(start, end) * 1e9),
            **more,
        )


def _server(spans: _Spans, request: Finished) -> ReadableSpan:
    attributes: dict[str, Value] = {"millstream.request_id": request.request_id}
    if request.client:
        attributes["client.address"] = request.client
    if request.protocol == "http":
        attributes |= {
            "http.request.method": request.method,
            "http.response.status_code": request.status,
            "http.response.body.size": request.reply_bytes,
            "url.path": _text(request.path),
            "url.scheme": "http",
        }
        if request.route:
            attributes["http.route"] = request.route
        name = f"{request.method} {request.route}" if request.route else request.method
    else:
        attributes |= {
            "rpc.system": "grpc",
            "rpc.service": request.route,
            "rpc.method": request.method,
            "rpc.grpc.status_code": request.status,
        }
        name = f"{request.route}/{request.method}"
    if request.runs:
        attributes |= _model(request.runs[0])
    if request.failed:
        attributes["error.type"] = str(request.status)
    status = Status(StatusCode.ERROR if request.failed else StatusCode.UNSET)
    return spans.outermost(_text(name), request.started, request.ended, attributes, kind=SpanKind.SERVER, status=status)


def _parts(spans: _Spans, request: Finished, run: Run) -> Iterator[ReadableSpan]:
    """Yield the spans of one inference request of a call, in the order of their times; none ends after the call."""
    ended = request.ended
    yield spans.span("decode", min(request.started, run.arrival), min(run.arrival, ended))
    timing = run.timing
    if timing is None:  # refused, expired, cancelled, or it had no rows
        yield spans.span("lane", run.arrival, ended, _model(run))
        return
    header, start, end = timing.header, *_worker_times(timing)
    yield spans.span("lane", run.arrival, min(timing.put_at, ended), _model(run))
    yield spans.span("queue", timing.put_at, min(start, ended), kind=SpanKind.PRODUCER)
    shared = _form(header) | {"millstream.batch.requests": timing.requests, "millstream.run.rows": header.run_rows}
    worker = spans.span(
        "worker",
        start,
        min(end, ended),
        _model(run) | shared,
        kind=SpanKind.CONSUMER,
        links=(Link(timing.span),),
        worker=header.worker,
    )
    yield worker
    run_start = min(start + _sane(header.input_s), end)
    run_end = min(run_start + _sane(header.infer_s), end, ended)
    yield spans.span("run", run_start, run_end, worker=header.worker, parent=worker.context)
    yield spans.span("reply", timing.replied_at, ended)


def _batch(spans: _Spans, timing: BatchTiming, run: Run, links: Sequence[Link]) -> Iterator[ReadableSpan]:
    header = timing.header
    attributes = _form(header) | {
        "millstream.model": _text(run.model),
        "millstream.version": run.version,
        "millstream.pool": run.pool,
        "millstream.batch.requests": timing.requests,
        "millstream.batch.failures": len(header.failures),
        "millstream.run.rows": header.run_rows,
        "millstream.attempt": header.attempt,
        "millstream.worker": header.worker,
    }
    kind = SpanKind.PRODUCER
    yield spans.outermost("batch", timing.put_at, timing.replied_at, attributes, kind=kind, links=links)
    start, end = _worker_times(timing)
    gathered = min(start + _sane(header.input_s), end)
    ran = min(gathered + _sane(header.infer_s), end)
    yield spans.span("queue", timing.put_at, start)
    for name, begin, finish in (("gather", start, gathered), ("run", gathered, ran), ("split", ran, end)):
        yield spans.span(name, begin, finish, worker=header.worker)


def _form(header: ReplyHeader) -> dict[str, Value]:
    return {"millstream.form": _text(header.form)} if header.form else {}


def _worker_times(timing: BatchTiming) -> tuple[float, float]:
    """Return when the run of a batch began and ended, neither after the reply."""
    header = timing.header
    start = min(timing.put_at + _sane(header.queue_s), timing.replied_at)
    run_s = _sane(header.input_s) + _sane(header.infer_s) + _sane(header.output_s)
    return start, min(start + run_s, timing.replied_at)


def _sane(seconds: float) -> float:
    """Return a duration that a worker measured; 0 for one that cannot be: negative, or NaN."""
    return seconds if seconds > 0 else 0.0


def _model(run: Run) -> dict[str, Value]:
    return {
        "millstream.model": _text(run.model),
        "millstream.version": run.version,
        "millstream.pool": run.pool,
        "millstream.rows": run.rows,
        **({"millstream.step": run.step} if run.step else {}),
    }


def _text(text: str) -> str:
    """Return a text that a caller chose, cut, and with escapes for what is not UTF-8."""
    return text[:_TEXT_MAX].encode("utf-8", "backslashreplace").decode()
