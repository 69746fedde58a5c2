"""The fast path and the ASGI route count the same requests under the same labels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.services.metrics.catalogue import HTTP_REQUESTS
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit.application import Application
from tests.kit.loopback import Loopback
from tests.kit.wire import Wire, post, serving

pytestmark = pytest.mark.anyio

BODY_BYTES_MAX = 1 << 16
GOOD = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
INFER, VERSION_INFER = "/v2/models/m/infer", "/v2/models/m/versions/1/infer"
REQUESTS = (
    post(INFER, GOOD),
    post(INFER, GOOD, "Connection: close"),
    post(f"{INFER}?a=1", GOOD),
    post("/v2/models/%6D/infer", GOOD),
    post(VERSION_INFER, GOOD) + post(VERSION_INFER, GOOD) + post(INFER, b"{"),  # pipelined
    post("/v2/models/idle/infer", GOOD),
    post("/v2/models/no/infer", GOOD),
    post("/v2/models/m/versions/9/infer", GOOD),
    post(VERSION_INFER, bytes(BODY_BYTES_MAX + 1)),
    b"GET /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n",
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


async def counted(home: Path, *, fast: bool) -> dict[tuple[str, ...], float]:
    """Send all requests, each on a connection of its own; return the replies by labels."""
    loopback = Loopback(home / "loopback", request_bytes_max=BODY_BYTES_MAX)
    await loopback.open()
    application = Application(home / "application", request_bytes_max=BODY_BYTES_MAX)
    counts = HttpCounts(registry := MetricsRegistry(None, "gateway"))
    deps = dataclasses.replace(application.app.state.deps, infer=loopback.infer, http_counts=counts)
    protocol: Any = "httptools"
    if fast:
        budgets, context = (ReceiveBudget(1 << 26), ReplyBudget(1 << 30)), ConnectionContext(http_counts=counts)
        protocol = fast_path_protocol(loopback.infer, BODY_BYTES_MAX, 100, *budgets, context=context)
    async with serving(build_app(deps), protocol) as served:
        for request in REQUESTS:
            async with await Wire.connect(served.port) as client, client.sending(request):
                for _ in range(request.count(b" HTTP/1.1\r\n")):
                    await client.reply(head=request.startswith(b"HEAD"))
    return {key.labels: value for key, (value,) in registry.totals().items() if key.name == HTTP_REQUESTS.name}


async def test_both_count_the_same(tmp_path: Path) -> None:
    fast, plain = await counted(tmp_path / "fast", fast=True), await counted(tmp_path / "plain", fast=False)
    assert sum(fast.values()) == len(REQUESTS) + 2
    assert fast == {**dict.fromkeys(fast, 0.0), **plain}
