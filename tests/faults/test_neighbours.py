"""A model whose runs never end does not take the workers from a model that is called beside it."""

from __future__ import annotations

import http.client
import itertools
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from millstream.gateway.scheduling.in_flight import PROVEN_RUNS
from millstream.services.model.manifest import ModelConfig
from millstream.services.queue.keys import InstallationKeys, PoolKeys
from millstream.services.repository.folder import FolderRepository
from millstream.workers.models.usage_log import RUNS_MIN
from tests.faults.test_endless_runs import ENDLESS, answer
from tests.kit import models, v2
from tests.kit.load import Load, constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_model
from tests.kit.wait import wait_until

STEADY = "/v2/models/steady/infer"
Make = Callable[..., Path]
MINUTES_S = 600  # longer than a test may take
ENDED_S = 10


@contextmanager
def neighbours(tmp_path: Path, pools: str, endless: int = 1, make: Make = models.endless) -> Iterator[Stack]:
    """Run a stack with the models slow0, slow1, … whose runs may never end, and `steady`."""
    model = make(tmp_path / "slow.onnx", on=ENDLESS)
    config = ModelConfig(batching=False)
    for number in range(endless):
        publish_model(FolderRepository(tmp_path / "home" / "repository"), f"slow{number}", model, config=config)
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, pools=pools, models=steady) as stack:
        for number in range(endless):
            stack.settled(f"slow{number}", 1)
        yield stack


@contextmanager
def steady_calls(stack: Stack) -> Iterator[Load]:
    """Call the model `steady` until the end of the block: each call is answered."""
    body = v2.request({"x": np.ones((1, 2), np.float32)}, parameters={"timeout": MINUTES_S * 1_000_000})
    with constant_load(stack.port, STEADY, [body], callers=1) as load:
        load.more(5)
        yield load
    assert {reply.status for reply in load.answers} == {200}


def send(stack: Stack, name: str, *x: int, timeout_s: int = MINUTES_S) -> http.client.HTTPConnection:
    body = v2.request({"x": np.array(x, np.int64).reshape(-1, 1)}, parameters={"timeout": timeout_s * 1_000_000})
    return stack.send(f"/v2/models/{name}/infer", *body)


@pytest.mark.parametrize("endless", [1, 3])
def test_runs_without_an_end_leave_a_worker_to_the_neighbour(tmp_path: Path, endless: int) -> None:
    """It is answered all the while, also beside several versions of this kind."""
    with neighbours(tmp_path, "cpu=2", endless) as stack, steady_calls(stack) as load:
        names = [f"slow{number}" for number in range(endless)]
        sent = [send(stack, name, ENDLESS, row, timeout_s=ENDED_S) for row in (1, 2) for name in names]
        wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= len(sent))
        load.more(20)
        assert select.select([connection.sock for connection in sent], [], [], 0)[0] == [], "none has ended yet"
        ends = {504, 503} if endless == 1 else {504, 503, 500}  # beside each other, they wait for each other
        assert {answer(connection)[0] for connection in sent} <= ends


def test_runs_that_became_long_leave_a_worker_to_the_neighbour(tmp_path: Path) -> None:
    """All workers begin them at once, because all runs were short before; no run of this size bounds them."""
    with neighbours(tmp_path, "cpu=2") as stack, steady_calls(stack) as load:
        long = PoolKeys(InstallationKeys(stack.installation), "cpu").prefix + b"long"
        for number in range(PROVEN_RUNS + 2):
            assert answer(send(stack, "slow0", number % 5))[0] == 200
        load.until(lambda: not stack.redis.zcount(long, int(stack.redis.time()[0]) * 1000, "+inf"))
        sent = [send(stack, "slow0", ENDLESS, row, timeout_s=ENDED_S) for row in (1, 2)]
        wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= len(sent))
        load.more(20)
        assert select.select([connection.sock for connection in sent], [], [], 0)[0] == [], "none has ended yet"
        assert {answer(connection)[0] for connection in sent} <= {504, 503}


def test_a_run_far_longer_than_usual_is_ended_while_others_wait(tmp_path: Path) -> None:
    with neighbours(tmp_path, "cpu=1") as stack:
        for number in range(RUNS_MIN):
            assert answer(send(stack, "slow0", number % 5))[0] == 200
            assert answer(send(stack, "slow0", number % 5, 1))[0] == 200
        # The stack called `steady` when it started, and a call right before a run counts as one that waits for it.
        late, numbers = (504, "the deadline passed before the model answered"), itertools.count(1)
        wait_until(lambda: answer(send(stack, "slow0", ENDLESS, next(numbers), timeout_s=4)) == late)
        with steady_calls(stack):
            status, error = answer(send(stack, "slow0", ENDLESS))
            assert status == 500
            assert "far longer than runs of this size usually take, while other models waited" in error
            wait_until(lambda: answer(send(stack, "slow0", 5)) == (200, "5"))  # it is refused for as long as it took


@pytest.mark.parametrize("make", [models.endless, models.unstoppable])
def test_a_run_far_longer_than_its_warm_up_is_ended_while_others_wait_and_none_follows_it(
    tmp_path: Path, make: Make
) -> None:
    """Its version has no history. Calls of it that wait already are refused; the one worker runs none of them.

    Nor does the worker that takes its place after a run that cannot be ended.
    """
    with neighbours(tmp_path, "cpu=1", make=make) as stack, steady_calls(stack) as load:
        sent = [send(stack, "slow0", ENDLESS, number) for number in range(6)]
        answers = [answer(one) for one in sent]
        ended = [error for status, error in answers if status == 500]
        assert len(ended) == 1
        assert "far longer than the warm-up of the version did, while other models waited" in ended[0]
        refused = [error for status, error in answers if status == 503]
        assert len(refused) == len(sent) - 1
        assert all("had to be ended" in error for error in refused)
        load.more(5)
        assert stack.metrics().value("millstream_runs_terminated_total", model="slow0") == 1


def test_a_version_is_refused_for_the_time_that_it_took_from_others(tmp_path: Path) -> None:
    """One run was ended, for which the neighbour waited for seconds. Five that took no time from others do the same."""
    with neighbours(tmp_path, "cpu=1") as stack, steady_calls(stack):
        assert answer(send(stack, "slow0", ENDLESS))[0] == 500
        wait_until(lambda: "had runs that had to be ended, too often" in answer(send(stack, "slow0", 5))[1])
