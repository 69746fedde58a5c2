"""Sentinels make a replica the master under load: the old one was killed, froze, or was asked to step down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from redis.exceptions import RedisError

from millstream.services.queue.url import client
from tests.kit import models, v2
from tests.kit.load import Load, constant_load
from tests.kit.sentinel import PASSWORD, SENTINEL_PASSWORD, Server, Watched, watched_redis
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

X = np.array([[1, 2], [3, 4]], np.float32)
BODIES = [v2.request({"x": X * i}, binary=bool(i % 2), parameters=v2.PATIENT) for i in range(1, 9)]
INFER = "/v2/models/steady/infer"
CALLERS = 6
ALONG = 50  # answers after a fault that show that it is over


@contextmanager
def watched_stack(tmp_path: Path, gateways: int = 2, workers: int = 2) -> Iterator[tuple[Stack, Watched]]:
    path = models.scale(tmp_path / "m.onnx")
    with watched_redis(tmp_path / "redis") as watched:
        settings = {"redis_url": watched.address.url}
        pools = f"cpu={workers}"
        with running_stack(
            tmp_path, gateways=gateways, pools=pools, models={"steady": path}, settings=settings
        ) as stack:
            stack.redis = client(watched.address)
            yield stack, watched
            said = "\n".join([*stack.lines, stack.logs()])
            for secret in (PASSWORD, SENTINEL_PASSWORD):
                assert secret not in said


def goes_on(what: str, stack: Stack, load: Load, watched: Watched, began: float) -> None:
    """Wait until callers are answered as before, every gateway is ready and all is done through the new master.

    On a busy machine that may be another one soon: sentinels replace a master that has to wait for a second.
    """
    load.more(ALONG)
    print(f"{what}: answers again {time.monotonic() - began:.1f} s after it began")
    stack.settled("steady", 1)
    for index in range(stack.gateways):
        with stack.gateway(index) as gateway:
            wait_until(lambda: gateway.get("/v2/health/ready").status_code == 200, what="ready")

    def answers_come_through_the_master() -> bool:
        master = watched.master
        before = scripts(master)
        load.more(ALONG)
        return scripts(master) > before

    wait_until(answers_come_through_the_master)


def scripts(server: Server) -> int:
    """Scripts that a server ran."""
    with suppress(RedisError):  # it is away
        return int(server.redis.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])
    return 0


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
            goes_on("killed", stack, load, watched, began)

            first.start()
            watched.follows(first)
            load.more(ALONG)

            began = time.monotonic()
            assert watched.step_down(second) is first
            watched.follows(second)  # it lives on, and takes no writes
            goes_on("stepped down", stack, load, watched, began)
        check(load)


def test_the_master_freezes_and_thaws_as_a_replica(tmp_path: Path) -> None:
    """No connection ends: its users must notice by themselves that no reply comes any more."""
    with watched_stack(tmp_path) as (stack, watched):
        with constant_load(stack.port, INFER, BODIES, CALLERS) as load:
            load.more(ALONG)
            first, began = watched.master, time.monotonic()
            with sigstopped(first.pid):
                watched.took_over(first)
                goes_on("frozen", stack, load, watched, began)
            watched.follows(first)
            load.more(ALONG)
        check(load)


def test_a_worker_that_needs_no_queue_notices_that_the_master_froze(tmp_path: Path) -> None:
    """Its batches come directly and go on; what comes through the new master must reach it, too."""
    with watched_stack(tmp_path, gateways=1, workers=1) as (stack, watched):
        with constant_load(stack.port, INFER, BODIES, callers=1) as load:
            wait_until(lambda: attached(stack, load), what="a batch takes no queue")
            first = watched.master
            with sigstopped(first.pid):
                frozen = attached(stack, load)
                watched.took_over(first)
                wait_until(lambda: (worker_of(stack), "blmpop") in connections(watched.master), what="waits for work")
                load.more(ALONG)
            assert frozen, "it took batches of its gateway when the master froze"
        check(load)


def attached(stack: Stack, load: Load) -> bool:
    """Return whether batches take no queue now."""
    before = stack.metrics().value("millstream_batches_direct_total")
    load.more(5)
    return stack.metrics().value("millstream_batches_direct_total") > before


def worker_of(stack: Stack) -> str:
    [worker] = stack.http.get("/admin/v1/workers").json()["workers"]
    return str(worker["id"])


def connections(server: Server) -> set[tuple[str, str]]:
    """Return name and last command of the connections of a server."""
    with suppress(RedisError):  # it is not a master yet
        return {(client["name"], client["cmd"]) for client in server.redis.client_list()}
    return set()
