"""Sentinels make a replica the master under load: the old one was killed, froze, or was asked to step down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from millstream.services.queue.url import client
from tests.kit import models, v2
from tests.kit.load import Load, constant_load
from tests.kit.sentinel import PASSWORD, SENTINEL_PASSWORD, Server, Watched, watched_redis
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

X = np.array([[1, 2], [3, 4]], np.float32)
TIMEOUT = {"timeout": 50_000_000}  # microseconds: a request is accepted, and there is time for a failover
BODIES = [v2.request({"x": X * i}, binary=bool(i % 2), parameters=TIMEOUT) for i in range(1, 9)]
INFER = "/v2/models/steady/infer"
CALLERS = 6
ALONG = 50  # answers after a fault that show that it is over


@contextmanager
def watched_stack(tmp_path: Path) -> Iterator[tuple[Stack, Watched]]:
    path = models.scale(tmp_path / "m.onnx")
    with watched_redis(tmp_path / "redis") as watched:
        settings = {"redis_url": watched.address.url}
        with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}, settings=settings) as stack:
            stack.redis = client(watched.address)
            yield stack, watched
            said = "\n".join([*stack.lines, stack.logs()])
            for secret in (PASSWORD, SENTINEL_PASSWORD):
                assert secret not in said


def goes_on(what: str, stack: Stack, load: Load, master: Server, began: float) -> None:
    """Wait until callers are answered as before, every gateway is ready and all is done through the new master."""
    load.more(ALONG)
    print(f"{what}: answers again {time.monotonic() - began:.1f} s after it began")
    stack.settled("steady", 1)
    for index in range(stack.gateways):
        with stack.gateway(index) as gateway:
            wait_until(lambda: gateway.get("/v2/health/ready").status_code == 200, what="ready")
    done = master.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    load.more(ALONG)
    assert master.redis.info("commandstats")["cmdstat_evalsha"]["calls"] > done


def check(load: Load) -> None:
    """Every request was accepted, and answered with the caller's own rows."""
    statuses = Counter(answer.status for answer in load.answers)
    print(
        f"{len(load.answers)} requests, {statuses[200]} answered, {len(load.answers) - statuses[200]} failed or refused"
    )
    assert set(statuses) == {200}, [answer for answer in load.answers if answer.status != 200][:3]
    for answer in load.answers:
        got = v2.outputs(answer.body, answer.headers)["y"].astype(np.float32)
        np.testing.assert_array_equal(got, X * np.float32((answer.sent + 1) * 2))


def test_the_master_is_killed_and_the_next_one_asked_to_step_down(tmp_path: Path) -> None:
    with watched_stack(tmp_path) as (stack, watched):
        with constant_load(stack.port, INFER, BODIES, CALLERS) as load:
            load.more(ALONG)
            watched.sentinels[0].kill()  # the sentinel that every process asks first does not answer
            first, began = watched.master, time.monotonic()
            first.kill()
            second = watched.took_over(first)
            print(f"the sentinels took {time.monotonic() - began:.1f} s for another master")
            goes_on("killed", stack, load, second, began)

            first.start()
            watched.follows(first)
            load.more(ALONG)

            began = time.monotonic()
            assert watched.step_down(second) is first
            watched.follows(second)  # it lives on, and takes no writes
            goes_on("stepped down", stack, load, first, began)
        check(load)


def test_the_master_freezes_and_thaws_as_a_replica(tmp_path: Path) -> None:
    """No connection ends: its users must notice by themselves that no reply comes any more."""
    with watched_stack(tmp_path) as (stack, watched):
        with constant_load(stack.port, INFER, BODIES, CALLERS) as load:
            load.more(ALONG)
            first, began = watched.master, time.monotonic()
            with sigstopped(first.pid):
                second = watched.took_over(first)
                goes_on("frozen", stack, load, second, began)
            watched.follows(first)
            load.more(ALONG)
        check(load)
