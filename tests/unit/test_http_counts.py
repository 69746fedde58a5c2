"""Replies over HTTP are counted by the template of their path, and callers cannot make series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from millstream.gateway.app import CORE
from millstream.gateway.connection.http_counts import INFER_ROUTE, INFER_VERSION_ROUTE, HttpCounts
from millstream.services.metrics.catalogue import HTTP_REQUESTS
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit.application import Application

pytestmark = pytest.mark.anyio

Counts = dict[tuple[str, ...], float]


def counted(registry: MetricsRegistry) -> Counts:
    """Replies by (route, method, status); those that were never counted are left out."""
    return {
        key.labels: values[0]
        for key, values in registry.totals().items()
        if key.name == HTTP_REQUESTS.name and values[0]
    }


def test_the_templates_of_the_fast_path_are_those_of_the_application() -> None:
    templates = {
        route.path_format
        for adapter in CORE
        for routes in adapter.routes
        for route in routes.router.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    }
    assert {INFER_ROUTE, INFER_VERSION_ROUTE} <= templates


def test_the_fast_path_counts_by_its_two_templates() -> None:
    registry = MetricsRegistry(None, "gateway")
    counts = HttpCounts(registry)
    for values, at in counts.infer_ok:
        values[at] += 1
    counts.add_infer(("m", None), 200)  # the reply to HTTP/1.0
    counts.add_infer(("m", "3"), 404)
    counts.add_infer(("", None), 431)  # the head was refused: no path is known
    assert counted(registry) == {
        (INFER_ROUTE, "POST", "200"): 2,
        (INFER_VERSION_ROUTE, "POST", "200"): 1,
        (INFER_VERSION_ROUTE, "POST", "404"): 1,
        ("other", "other", "431"): 1,
    }


def test_methods_and_statuses_of_callers_make_no_series() -> None:
    registry = MetricsRegistry(None, "gateway")
    counts = HttpCounts(registry)
    for number in range(1000):
        counts.add(None, f"M{number}", 404)
        counts.add("/metrics", "GET", 600 + number)
    assert counted(registry) == {("other", "other", "404"): 1000, ("/metrics", "GET", "other"): 1000}
    assert len(counts._counters) == 4  # two of the fast path, and one for all that callers make up of each path


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("method", "path", "labels"),
    [
        ("GET", "/v2/health/live", ("/v2/health/live", "GET", "200")),
        ("HEAD", "/v2/health/live", ("/v2/health/live", "HEAD", "200")),
        ("GET", "/v2/models/nope", ("/v2/models/{model}", "GET", "404")),
        ("GET", "/v2/models/a%2Fb", ("other", "GET", "400")),
        ("DELETE", "/v2/models/nope/infer", ("/v2/models/{model}/infer", "DELETE", "405")),
        ("GET", "/no/such/path", ("other", "GET", "404")),
        ("BREW", "/v2", ("/v2", "other", "405")),
        ("POST", "/predictions/nope", ("/predictions/{model}", "POST", "404")),
        ("GET", "/metrics", ("/metrics", "GET", "200")),
    ],
)
async def test_the_application_counts_by_template(
    tmp_path: Path, method: str, path: str, labels: tuple[str, ...]
) -> None:
    application = Application(tmp_path)
    async with application.client() as client:
        reply = await client.request(method, path)
    assert str(reply.status_code) == labels[2]
    assert counted(application.registry) == {labels: 1}


@pytest.mark.plugins
async def test_our_own_fault_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise ZeroDivisionError

    application = Application(tmp_path)
    monkeypatch.setattr(application.app.state.deps.caller("torchserve"), "find", broken)
    monkeypatch.setattr("millstream.plugins.compat.torchserve.gateway.find", broken)
    async with application.client() as client:
        assert (await client.post("/predictions/m", json=[1])).status_code == 500
    assert counted(application.registry) == {("/predictions/{model}", "POST", "500"): 1}
