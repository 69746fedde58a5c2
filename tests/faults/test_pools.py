"""A version in two pools: its workers in the preferred one are killed, and the other answers. It costs no request."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.kit import models
from tests.kit.load import constant_load
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

INFER = "/v2/models/steady/infer"
KILLS = 3


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pools")
    with running_stack(folder, gateways=2, pools="fast=1,slow=1") as stack:
        config = json.dumps({"pools": ["fast", "slow"]})
        stack.push("steady", models.scale(folder / "m.onnx"), config=config)
        yield stack


def ready_pools(stack: Stack) -> set[str]:
    """Return the pools that have the version ready, as both gateways know it."""
    known: list[set[str]] = []
    for index in range(stack.gateways):
        with stack.gateway(index) as gateway:
            instances = gateway.get("/admin/v1/models/steady/versions/1").json()["instances"]
            known.append({one["worker"].partition("-")[0] for one in instances if one["state"] == "ready"})
    return set.intersection(*known)


def answered_by(stack: Stack, pool: str) -> float:
    return stack.metrics().value("millstream_request_duration_seconds_count", model="steady", pool=pool)


def test_the_preferred_pool_answers_while_it_can(stack: Stack) -> None:
    fast, slow = answered_by(stack, "fast"), answered_by(stack, "slow")
    with constant_load(stack.port, INFER, BODIES) as load:
        load.more(200)
    check_answers(load)
    assert answered_by(stack, "fast") == fast + len(load.answers)
    assert answered_by(stack, "slow") == slow


def test_the_other_pool_answers_when_all_workers_of_the_preferred_one_are_killed(stack: Stack) -> None:
    with constant_load(stack.port, INFER, BODIES, callers=16) as load:
        for _ in range(KILLS):
            slow, before = answered_by(stack, "slow"), stack.pids()["fast-0"]
            os.kill(before, signal.SIGKILL)
            load.until(lambda: answered_by(stack, "slow") > slow)  # noqa: B023
            wait_until(lambda: stack.pids().get("fast-0", before) != before)  # noqa: B023
            wait_until(lambda: ready_pools(stack) == {"fast", "slow"})
            fast = answered_by(stack, "fast")
            load.until(lambda: answered_by(stack, "fast") > fast + 500)  # noqa: B023
    check_answers(load)
    page = stack.metrics()
    total = sum(answered_by(stack, pool) for pool in ("fast", "slow"))
    assert page.value("millstream_requests_total", model="steady", outcome="ok") == total
