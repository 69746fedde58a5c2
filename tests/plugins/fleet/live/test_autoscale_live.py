"""Pools that scale themselves: workers come with the load and go without it, and nothing is lost on the way."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx2
import numpy as np
import pytest

from millstream.services.model.manifest import ModelConfig
from millstream.services.queue.keys import InstallationKeys
from millstream.services.repository.folder import FolderRepository
from tests.kit import v2
from tests.kit.command_line import Millstream
from tests.kit.controllers import ControllerBeside, controller_beside
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until

LIMIT_S = 240.0
POOLS = "sim=0:3,backend=simulated"
PATH = "/v2/models/slow/infer"
ROW = np.ones((1, 4), np.float32)
#: microseconds: the default of a minute may pass while a worker starts on a busy machine
PATIENT: dict[str, object] = {"timeout": round(LIMIT_S * 1e6)}
#: a run takes 20 ms of a device, one row at a time: a worker answers 50 rows a second
SLOW = {"run_s": 0.02}
CALLERS = 100


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, ControllerBeside]]:
    """A pool of 0 to 3 workers with simulated devices, whose workers go 5 s after they were last needed."""
    settings = {"scale_down_s": 5, "scale_latency_ms": 500, "drain_s": LIMIT_S}
    folder = tmp_path_factory.mktemp("scaled")
    with (
        running_stack(folder, pools=POOLS, settings=settings) as stack,
        controller_beside(stack, settings | {"pools": POOLS}) as controller,
    ):
        repository = FolderRepository(stack.home / "repository")
        publish_simulated(repository, "slow", SLOW, config=ModelConfig(rows_max=1))
        yield stack, controller


@pytest.fixture(scope="module")
def scaled(running: tuple[Stack, ControllerBeside]) -> Stack:
    return running[0]


@pytest.fixture(scope="module")
def controller(running: tuple[Stack, ControllerBeside]) -> ControllerBeside:
    return running[1]


def decision(stack: Stack) -> dict[str, Any]:
    stored: Any = stack.redis.hget(InstallationKeys(stack.installation).scale.decode(), "sim")
    return {} if stored is None else json.loads(stored)


def asleep(stack: Stack) -> bool:
    """Whether the pool has no worker, and the gateway knows that it needs none."""
    found = decision(stack)
    model = stack.http.get("/v2/models/slow/ready").status_code
    return bool(found) and found["wanted"] == 0 == found["ready"] and model == 200


def answers(stack: Stack) -> bool:
    with suppress(httpx2.HTTPError):
        return bool(stack.http.get("/v2/models/slow/ready").status_code == 200)
    return False


def infer(stack: Stack, parameters: dict[str, object] = PATIENT) -> Any:
    body, headers = v2.request({"x": ROW}, parameters=parameters)
    return stack.http.post(PATH, content=body, headers=headers)


def sizes(stack: Stack) -> list[int]:
    """Return the sizes that the supervisor gave the pool so far."""
    return [int(line.split()[2]) for line in stack.lines if line.startswith("pool sim: ")]


def test_a_request_wakes_a_pool_that_sleeps_and_waits_for_its_worker(scaled):
    wait_until(lambda: asleep(scaled), LIMIT_S, "the pool sleeps")
    wait_until(lambda: scaled.http.get("/v2/health/ready").status_code == 200, what="the gateway is ready")
    answer = infer(scaled)
    assert answer.status_code == 200, answer.text
    assert sizes(scaled)[-1] >= 1


def test_a_request_that_cannot_wait_for_the_start_is_refused_and_wakes_the_pool_all_the_same(scaled):
    def refused() -> Any:
        wait_until(lambda: asleep(scaled), LIMIT_S, "the pool sleeps")
        answer = infer(scaled, {"timeout": 50_000})
        assert answer.status_code in {429, 504}, answer.text  # 504: the gateway itself had to wait so long for a core
        return answer if answer.status_code == 429 else None

    answer = wait_until(refused, LIMIT_S, "it is refused")
    assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: decision(scaled)["ready"] > 0, LIMIT_S, "a worker serves")


def test_workers_come_with_the_load_and_go_without_it_and_nothing_is_lost(scaled):
    wait_until(lambda: answers(scaled), LIMIT_S, "the gateway knows the model")
    before = len(sizes(scaled))
    # So many that what waits for two workers takes longer than the target, however slow the machine makes their runs.
    body = [v2.request({"x": ROW}, parameters=PATIENT)]
    with constant_load(scaled.port, PATH, body, callers=CALLERS, pause_s=0) as load:
        wait_until(lambda: decision(scaled).get("ready") == 3, LIMIT_S, "three workers serve")
        load.more(200)
    statuses = Counter(answer.status for answer in load.answers)
    assert set(statuses) == {200}, statuses
    wait_until(lambda: asleep(scaled), LIMIT_S, "the pool sleeps")
    wait_until(lambda: sizes(scaled)[-1] == 0, what="the last size is told")
    changes = sizes(scaled)[before:]
    assert max(changes) == 3, changes
    # Not back and forth: a load that stands still for seconds, with its machine, may cost a worker for a moment.
    turns = sum(one < two > three for one, two, three in zip([0, *changes], changes, changes[1:], strict=False))
    assert turns <= 2, changes


def test_a_new_gateway_knows_the_models_of_a_pool_that_sleeps(scaled):
    """It has never seen a worker of the pool, and the models name none."""
    wait_until(lambda: asleep(scaled), LIMIT_S, "the pool sleeps")
    os.kill(scaled.pids()["gateway-0"], signal.SIGKILL)
    scaled.reconnect()
    wait_until(lambda: answers(scaled), LIMIT_S, "the new gateway is ready")
    assert infer(scaled).status_code == 200


def waits(stack: Stack) -> bool:
    """Whether a gateway reports that a request waits for the pool."""
    reported: Any = stack.redis.hvals(InstallationKeys(stack.installation).loads.decode())
    loads = [json.loads(value.partition(b" ")[2]) for value in reported]
    return any(load["pools"].get("sim", {}).get("queue_rows", 0) > 0 for load in loads)


def queued(stack: Stack) -> int:
    """Return how many batches are in streams."""
    redis: Any = stack.redis
    return sum(redis.xlen(stream) for stream in redis.scan_iter("ms:*:stream:*"))


@contextmanager
def waiting_call(stack: Stack, controller: ControllerBeside) -> Iterator[tuple[Future[int], Callable[[], None]]]:
    """Call the pool that sleeps while the controller is frozen, so that the request waits and no worker starts.

    Yields the status of the answer, 0 if its connection breaks, and a function that lets the controller go on.
    """

    def status() -> int:
        with suppress(httpx2.TransportError):
            return int(infer(stack).status_code)
        return 0

    wait_until(lambda: asleep(stack), LIMIT_S, "the pool sleeps")
    with ThreadPoolExecutor(1) as caller, ExitStack() as frozen:
        frozen.enter_context(sigstopped(controller.pid))
        answer = caller.submit(status)
        wait_until(lambda: waits(stack), what="the request waits")
        assert queued(stack) == 0, "in its gateway"
        yield answer, frozen.close


def test_a_request_that_waits_for_a_worker_outlives_redis(scaled, controller):
    """Its gateway has it: an empty Redis learns of it with the next report."""
    with waiting_call(scaled, controller) as (answer, go_on):
        before = scaled.pids()["redis"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: scaled.pids().get("redis", before) != before, LIMIT_S, "Redis runs again, empty")
        assert not answer.done()
        go_on()
        assert answer.result(LIMIT_S) == 200


def test_a_request_that_waits_for_a_worker_outlives_a_start_that_fails(scaled, controller):
    with waiting_call(scaled, controller) as (answer, go_on):
        go_on()
        first = wait_until(lambda: scaled.pids().get("sim-0"), LIMIT_S, "a worker starts")
        os.kill(first, signal.SIGKILL)
        scaled.wait_for_line("sim-0 was ended by SIGKILL")
        assert answer.result(LIMIT_S) == 200


def leaves(stack: Stack) -> bool:
    """Whether the gateway says, on an open connection, that it leaves."""
    reply = stack.http.get("/v2/health/ready")
    return (reply.status_code, reply.headers.get("connection")) == (503, "close")


def test_a_request_that_waits_for_a_worker_outlives_the_end_of_its_gateway(scaled, controller):
    """A gateway that drains reports what waits, as before, and so gets the worker: as in a rolling restart."""
    with waiting_call(scaled, controller) as (answer, go_on):
        before = scaled.pids()["gateway-0"]
        os.kill(before, signal.SIGTERM)
        wait_until(lambda: leaves(scaled), what="it drains")
        assert scaled.pids()["gateway-0"] == before
        assert not answer.done()
        go_on()
        assert answer.result(LIMIT_S) == 200
        scaled.reconnect()
        wait_until(lambda: scaled.pids().get("gateway-0", before) != before, LIMIT_S, "the next gateway runs")
        wait_until(lambda: answers(scaled), LIMIT_S, "it is ready")


def test_a_request_whose_gateway_is_killed_leaves_nothing_behind(scaled, controller):
    """Its caller's connection ends with the gateway, so no answer could be sent, and none is computed."""
    with waiting_call(scaled, controller) as (answer, go_on):
        os.kill(scaled.pids()["gateway-0"], signal.SIGKILL)
        assert answer.result(LIMIT_S) == 0
        go_on()
        scaled.reconnect()
        wait_until(lambda: answers(scaled), LIMIT_S, "the new gateway is ready")
        wait_until(lambda: not waits(scaled), LIMIT_S, "the request counts no longer")
        wait_until(lambda: asleep(scaled), LIMIT_S, "the pool sleeps")
        # Not before: a worker that the request had started gets the gateway's readiness probes.
        assert queued(scaled) == 0


def test_a_killed_controller_changes_nothing_and_the_next_one_goes_on(scaled, controller):
    assert infer(scaled).status_code == 200
    before = decision(scaled)["decided_at"]
    controller.kill()
    controller.start()
    wait_until(lambda: decision(scaled)["decided_at"] > before + 5, LIMIT_S, "the next controller decides")
    wait_until(lambda: asleep(scaled), LIMIT_S, "the pool sleeps")


def test_a_rolling_restart_replaces_what_there_is(scaled):
    assert infer(scaled).status_code == 200
    wait_until(lambda: decision(scaled)["ready"] > 0, LIMIT_S, "a worker serves")
    with constant_load(scaled.port, PATH, [v2.request({"x": ROW}, parameters=PATIENT)], callers=2) as load:
        load.more(20)
        Millstream(scaled.home).ok("restart", "workers")
        load.more(20)
    assert {answer.status for answer in load.answers} == {200}
