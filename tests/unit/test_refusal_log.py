"""Refusals are logged once for each reason and interval, with their number, whatever their rate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream.gateway.access.access_control import RefusalLog
from millstream.services.metrics.catalogue import REQUESTS_REFUSED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.cancellation import cancel_all


def test_a_line_for_each_reason_and_none_without_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = MetricsRegistry(tmp_path, "gateway-0")
    registry.counter(REQUESTS_REFUSED, "lane_full").add(3)
    refusals = RefusalLog(registry)
    refusals.log()
    assert caplog.messages == []  # those were of an earlier process
    for _ in range(1000):
        registry.counter(REQUESTS_REFUSED, "lane_full").add()
        refusals.count("not_authorized")
    registry.counter(REQUESTS_REFUSED, "deadline").add(2)
    refusals.log()
    assert sorted(caplog.messages) == [
        "1000 requests were refused within a minute: lane_full",
        "1000 requests were refused within a minute: not_authorized",
        "2 requests were refused within a minute: deadline",
    ]
    caplog.clear()
    refusals.log()
    assert caplog.messages == []
    registry.close()


@pytest.mark.anyio
async def test_what_is_left_is_logged_when_the_gateway_stops(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog(MetricsRegistry(None, "gateway-0"))
    task = asyncio.create_task(refusals.run())
    await asyncio.sleep(0)
    refusals.count("x")
    await cancel_all([task])
    assert caplog.messages == ["1 requests were refused within a minute: x"]
