"""What a controller does when the clock of Redis is set, or its repository does not answer: nothing for a moment."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from millstream.plugins.fleet.controller import controller as module
from millstream.plugins.fleet.controller.controller import SETTLE_S, STEP_S_MIN, ClockSteps, Controller
from millstream.plugins.fleet.controller.metrics import ControllerMetrics
from millstream.plugins.fleet.controller.survey import Survey
from millstream.services.errors import Failure
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import EndpointPlacement
from millstream.services.placement.views import Footprint
from millstream.services.queue.leader_lock import Delivery
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.orders import Order
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from tests.kit.catalog import worker
from tests.kit.versions import publish_simulated

IDLE_S = 60.0


class Fleet:
    """A controller with one worker, which holds one version that is unloaded IDLE_S after its last call."""

    def __init__(self, folder: Path) -> None:
        self.monotonic = 100.0
        self.redis_ahead_s = 1_700_000_000.0
        self.published_ahead_s = self.redis_ahead_s  # with which the worker made the instants in its record
        self.called_at = 90.0  # monotonic
        self.token = 7
        self.orders: list[Order] = []
        self.able: list[bool] = []  # to lead, as the controller said
        self.repository = repository = FolderRepository(folder)
        self._manifest = publish_simulated(repository, "m")
        placement = EndpointPlacement(idle_s=IDLE_S)
        repository.replace_endpoint(repository.endpoint("m").model_copy(update={"placement": placement}))
        parts: Any = self
        metrics = ControllerMetrics(MetricsRegistry(None, "controller"))
        self.controller = Controller(parts, parts, parts, repository, metrics, lambda: self.monotonic)

    def round(self) -> int:
        """Run a round; return how many orders it gave."""
        before = len(self.orders)
        asyncio.run(self.controller.round(self.token))
        return len(self.orders) - before

    def pause(self) -> None:
        self.able.append(False)

    def resume(self) -> None:
        self.able.append(True)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        at = self.called_at + self.published_ahead_s
        one = self._manifest
        held = InstanceRecord(
            content_id=one.content_id, model="m", version=1, state=State.READY, loaded_at=at, last_used=at
        )
        return (worker(name="w", pool="simulated").model_copy(update={"instances": (held,)}),)

    async def now(self) -> float:
        return self.monotonic + self.redis_ahead_s

    async def fence(self, pools: list[str], token: int) -> bool:
        return bool(pools and token)

    async def waiting_orders(self, pool: str, worker: str) -> list[Order]:
        return []

    async def order(self, pool: str, worker: str, order: Order) -> Delivery:
        self.orders.append(order)
        return Delivery.GIVEN


def test_no_version_seems_idle_because_the_clock_was_set_forward(tmp_path):
    fleet = Fleet(tmp_path)
    assert fleet.round() == 0
    fleet.redis_ahead_s += 3600
    assert fleet.round() == 0, "the worker has not published its instants anew"
    fleet.published_ahead_s = fleet.redis_ahead_s
    fleet.monotonic += SETTLE_S
    assert fleet.round() == 0
    fleet.monotonic = fleet.called_at + IDLE_S + 1
    assert fleet.round() == 1


def test_an_order_is_not_in_flight_for_an_hour_because_the_clock_was_set_back(tmp_path):
    fleet = Fleet(tmp_path)
    fleet.monotonic = fleet.called_at + IDLE_S + 1
    assert fleet.round() == 1
    fleet.monotonic += 1
    assert fleet.round() == 0, "it is in flight"
    fleet.redis_ahead_s -= 3600
    fleet.published_ahead_s = fleet.redis_ahead_s
    assert fleet.round() == 0
    fleet.monotonic += SETTLE_S
    assert fleet.round() == 1, "the order is given again, which a worker ignores that carried it out"


def test_steps_of_the_clock_are_told_from_drift_and_pauses():
    steps = ClockSteps()
    assert steps.observe(1e9, 0.0) == 0.0
    assert steps.is_settled(0.0)
    assert steps.observe(1e9 + 5000.1, 5000.0) == 0.0, "the process was stopped, and the clocks drift"
    assert steps.observe(1e9 + 5001.1 + STEP_S_MIN, 5001.0) == STEP_S_MIN
    assert not steps.is_settled(5001.0 + SETTLE_S / 2)
    assert steps.is_settled(5001.0 + SETTLE_S)
    assert steps.observe(1e9, 5002.0) < -5000


def test_what_is_remembered_of_a_version_moves_with_the_clock():
    survey = Survey(lambda _, __: cast("Footprint", None))
    used = InstanceRecord(content_id="m:1:c", model="m", version=1, state=State.READY, last_used=900.0, runs=1)
    holder = worker(name="w").model_copy(update={"instances": (used,)})
    survey.take([holder], {}, 1000.0)
    survey.clock_was_set(-600.0)
    assert survey.habits("m:1:c").last_used == 300.0
    later = used.model_copy(update={"last_used": 350.0, "runs": 31})
    survey.take([holder.model_copy(update={"instances": (later,)})], {}, 430.0)
    assert survey.habits("m:1:c").last_used == 350.0


def test_a_repository_that_does_not_answer_leaves_the_lead_to_others_until_it_does(tmp_path, monkeypatch):
    fleet, answers = Fleet(tmp_path), threading.Event()
    token = fleet.repository.token
    monkeypatch.setattr(module, "READ_S_MAX", 0.0)
    monkeypatch.setattr(fleet.repository, "token", lambda: token() if answers.wait() else "")

    async def work() -> None:
        for _ in range(2):  # one read at a time
            with pytest.raises(Failure, match="does not answer"):
                await fleet.controller.round(fleet.token)
        assert fleet.able == [False, False]
        answers.set()
        while fleet.able[-1] is False:
            await asyncio.sleep(0)
        assert fleet.able == [False, False, True]

    asyncio.run(work())
