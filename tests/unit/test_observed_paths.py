"""What is kept of the path of a request is bounded: thousands of them wait while a collector or a disk hangs."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.gateway.connection.error_reply import JSON_HEADERS
from millstream.gateway.connection.fast_path import FastPathProtocol
from millstream.gateway.connection.infer_handler import HttpReply
from millstream.gateway.observing import observed_http
from millstream.gateway.observing.finished import PATH_MAX, Finished
from millstream.gateway.observing.observed_http import ObservedApp, with_observer
from millstream.gateway.observing.observer import Observer, Wants
from millstream.plugins.tracing.sampler import HeadSampler, Sampler

LONG = "x" * 60_000


class Kept:
    """Keeps the calls that its sampler selects; all without one."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.requests: list[Finished] = []
        self.wants: Wants | None = None if sampler is None else sampler.selected
        self.traces = True

    def start(self) -> None:
        return

    def add(self, request: Finished) -> None:
        self.requests.append(request)

    def close(self) -> None:
        return


def test_the_path_of_a_route() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404})

    async def nothing(*_: Any) -> None:
        return

    kept = Kept(Sampler(HeadSampler(), 0.0, lambda: None))
    scope = {"type": "http", "headers": [], "method": "POST", "path": f"/{LONG}"}
    asyncio.run(ObservedApp(app, Observer((kept,)))(scope, nothing, nothing))
    (request,) = kept.requests
    assert (request.status, len(request.path)) == (404, PATH_MAX)


def test_an_observer_replaces_nothing_of_the_fast_path_but_what_it_observes() -> None:
    """A method of its own had the name of one of the fast path, which then called it."""
    own = {name for name in vars(observed_http._Observed) if not name.startswith("__")}
    assert {name for name in own if hasattr(FastPathProtocol, name)} == {"_submit", "_answer", "connection_lost"}


class Protocol(asyncio.Protocol):
    """A connection that submits and answers nothing."""

    client = ("127.0.0.1", 1)

    def _submit(self, cycle: Any, body: bytes) -> None:
        return

    def _answer(self, cycle: Any, reply: HttpReply) -> int:
        return reply.status


def cycle_of(model: str, traceparent: bytes | None = None) -> Any:
    headers = SimpleNamespace(traceparent=traceparent)
    return SimpleNamespace(
        path=(model, "1"), submitted_at=0.0, request_id=b"r", headers=headers, trace=None, ticket=None
    )


def test_the_path_of_the_fast_path() -> None:
    kept = Kept()
    connection: Any = with_observer(Protocol, Observer((kept,)))()
    connection._answer(cycle_of(LONG), HttpReply(404, JSON_HEADERS, b""))
    (request,) = kept.requests
    assert (request.status, len(request.path)) == (404, PATH_MAX)


def test_an_unsampled_request_of_the_fast_path_is_kept_if_it_was_slow_or_failed() -> None:
    kept = Kept(Sampler(HeadSampler(0.0), 100.0, lambda: None))
    connection: Any = with_observer(Protocol, Observer((kept,)))()
    begun = time.monotonic()
    cycles = {model: cycle_of(model) for model in ("quick", "slow", "failed")}
    for cycle in cycles.values():
        connection._submit(cycle, b"")
        assert begun <= cycle.submitted_at <= time.monotonic()
    cycles["slow"].submitted_at -= 100.0
    for model, cycle in cycles.items():
        connection._answer(cycle, HttpReply(503 if model == "failed" else 200, JSON_HEADERS, b"12"))
    slow, failed = kept.requests
    assert (slow.path, slow.status, slow.reply_bytes) == ("/v2/models/slow/versions/1/infer", 200, 2)
    assert (slow.started, slow.trace) == (cycles["slow"].submitted_at, cycles["slow"].trace)
    assert 100.0 <= slow.ended - slow.started <= time.monotonic() - begun + 100.0
    assert (failed.status, failed.trace) == (503, cycles["failed"].trace)


def test_a_request_whose_head_was_refused_belongs_to_the_trace_of_its_caller() -> None:
    kept = Kept(Sampler(HeadSampler(0.0), 0.0, lambda: None))
    connection: Any = with_observer(Protocol, Observer((kept,)))()
    sent = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    connection._answer(cycle_of("m", sent), HttpReply(413, JSON_HEADERS, b""))
    (request,) = kept.requests
    assert request.trace == sent


def test_a_defect_of_what_records_calls_costs_no_other_its_record(caplog: pytest.LogCaptureFixture) -> None:
    kept, defective = Kept(), Kept()
    defective.add = None  # type: ignore[assignment]
    connection: Any = with_observer(Protocol, Observer((defective, kept)))()
    assert connection._answer(cycle_of("m"), HttpReply(200, JSON_HEADERS, b"")) == 200
    assert len(kept.requests) == 1
    assert "a request could not be recorded" in caplog.text


def test_calls_are_observed_while_there_is_a_sink() -> None:
    observer, kept = Observer(), Kept()
    made: Any = with_observer(Protocol, observer)
    connection = made()
    plain = made._answer
    observer.attach(kept)
    connection._submit(cycle_of("m"), b"")
    connection._answer(cycle_of("m"), HttpReply(200, JSON_HEADERS, b""))
    assert [one.path for one in kept.requests] == ["/v2/models/m/versions/1/infer"]
    observer.detach(kept)
    connection._answer(cycle_of("m"), HttpReply(200, JSON_HEADERS, b""))
    assert len(kept.requests) == 1
    assert made._answer is plain, "the hot path has the code of the observer, and nothing observes"
