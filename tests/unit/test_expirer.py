"""The expirer sleeps while nothing is in flight, and is woken by what it has to look at."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import cast

import pytest

from millstream.gateway.scheduling import lane_table
from millstream.gateway.scheduling.lane_state import InFlightBatch
from millstream.gateway.scheduling.lane_table import LaneTable, run_expirer


def test_a_batch_in_flight_wakes_the_expirer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_table, "IDLE_S", 1e6)

    async def work() -> None:
        lanes, ticked = LaneTable(), asyncio.Event()
        task = asyncio.create_task(run_expirer(lanes, ticked.set))
        while not task.done() and not lanes.busy._waiters:
            await asyncio.sleep(0)
        batch = SimpleNamespace(earliest=math.inf, left=True, put_at=math.inf)
        lanes.pending["b"] = cast("InFlightBatch", batch)
        async with asyncio.timeout(60):
            await ticked.wait()
        task.cancel()

    asyncio.run(work())
