"""request_spans: finished requests -> spans. Pure: ids are passed in.

trace of a request: server ─┬─ decode ─ lane ─ queue ─ worker ─ reply      the span `worker` links to its batch
                            └──────────────────────────┴─ run
trace of a batch:   batch ──┬─ queue ─ gather ─ run ─ split               the span `batch` links to its requests

The times are those that statistics measure. Those within a worker come with its reply, as durations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from millstream.gateway.observing.finished import Finished, Run
from millstream.gateway.observing.timing import BatchTiming
from millstream.plugins.tracing.span import Span, SpanKind, Value
from millstream.services.traceparent import context_of
from millstream.services.wire.batch import ReplyHeader

LINKS_MAX = 128  # links of one span, the default limit of OpenTelemetry
_TEXT_MAX = 256  # characters of a value that a caller chose

NewId = Callable[[int], bytes]
"""Returns random bytes."""


def spans_of(requests: Iterable[Finished], new_id: NewId) -> Iterator[Span]:
    """Yield the spans of requests, and of the batches that they were in; of each batch once."""
    batches: dict[int, tuple[BatchTiming, Run, list[bytes]]] = {}
    for request in requests:
        assert request.trace is not None
        context = context_of(request.trace)
        server_id = new_id(8)
        yield _server(request, context.trace_id, server_id, context.parent_id)
        for run in request.runs:
            if run.timing is not None:
                if not run.timing.span:
                    run.timing.span = new_id(24)
                    batches[id(run.timing)] = run.timing, run, []
                if id(run.timing) in batches:
                    batches[id(run.timing)][2].append(context.trace_id + server_id)
            yield from _parts(request, run, context.trace_id, server_id, new_id)
    for timing, run, links in batches.values():
        yield from _batch(timing, run, links, new_id)


def _server(request: Finished, trace_id: bytes, span_id: bytes, parent_id: bytes) -> Span:
    attributes: dict[str, Value] = {"millstream.request_id": request.request_id}
    if request.client:
        attributes["client.address"] = request.client
    if request.protocol == "http":
        attributes |= {
            "http.request.method": request.method,
            "http.response.status_code": request.status,
            "http.response.body.size": request.reply_bytes,
            "url.path": request.path[:_TEXT_MAX],
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
    error = str(request.status) if request.failed else ""
    return Span(
        name, trace_id, span_id, parent_id, SpanKind.SERVER, request.started, request.ended, attributes, error=error
    )


def _parts(request: Finished, run: Run, trace_id: bytes, server_id: bytes, new_id: NewId) -> Iterator[Span]:
    """Yield the spans of one inference request of a call, in the order of their times."""

    def span(name: str, start: float, end: float, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        return Span(name, trace_id, new_id(8), server_id, kind, start, max(start, min(end, request.ended)), {})

    yield span("decode", min(request.started, run.arrival), run.arrival)
    timing = run.timing
    if timing is None:  # refused, expired, cancelled, or it had no rows
        yield span("lane", run.arrival, request.ended)._replace(attributes=_model(run))
        return
    header, start, end = timing.header, *_worker_times(timing)
    yield span("lane", run.arrival, timing.put_at)._replace(attributes=_model(run))
    yield span("queue", timing.put_at, start, SpanKind.PRODUCER)
    worker = span("worker", start, end, SpanKind.CONSUMER)._replace(
        attributes=_model(run)
        | _form(header)
        | {"millstream.batch.requests": timing.requests, "millstream.run.rows": header.run_rows},
        links=(timing.span,),
        worker=header.worker,
    )
    yield worker
    run_start = min(start + _sane(header.input_s), end)
    yield span("run", run_start, min(run_start + _sane(header.infer_s), end))._replace(
        parent_id=worker.span_id, worker=header.worker
    )
    yield span("reply", timing.replied_at, request.ended)


def _batch(timing: BatchTiming, run: Run, links: list[bytes], new_id: NewId) -> Iterator[Span]:
    trace_id, batch_id = timing.span[:16], timing.span[16:]
    header = timing.header
    attributes: dict[str, Value] = _form(header) | {
        "millstream.model": run.model[:_TEXT_MAX],
        "millstream.version": run.version,
        "millstream.pool": run.pool,
        "millstream.batch.requests": timing.requests,
        "millstream.batch.failures": len(header.failures),
        "millstream.run.rows": header.run_rows,
        "millstream.attempt": header.attempt,
        "millstream.worker": header.worker,
    }
    kind = SpanKind.PRODUCER
    yield Span(
        "batch", trace_id, batch_id, b"", kind, timing.put_at, timing.replied_at, attributes, tuple(links[:LINKS_MAX])
    )
    start, end = _worker_times(timing)
    gathered = min(start + _sane(header.input_s), end)
    ran = min(gathered + _sane(header.infer_s), end)
    for name, begin, finish, worker in (
        ("queue", timing.put_at, start, ""),
        ("gather", start, gathered, header.worker),
        ("run", gathered, ran, header.worker),
        ("split", ran, end, header.worker),
    ):
        yield Span(name, trace_id, new_id(8), batch_id, SpanKind.INTERNAL, begin, finish, {}, worker=worker)


def _form(header: ReplyHeader) -> dict[str, Value]:
    return {"millstream.form": header.form[:_TEXT_MAX]} if header.form else {}


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
        "millstream.model": run.model[:_TEXT_MAX],
        "millstream.version": run.version,
        "millstream.pool": run.pool,
        "millstream.rows": run.rows,
    }
