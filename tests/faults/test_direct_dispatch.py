"""Batches that gateways dispatch to workers directly: whatever befalls either end, each request is answered, and right.

The queue has tests of its own for each of these faults; here no batch is in it when the fault happens.
"""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.reply_links import ReplyLinks
from millstream.services.wire.batch import attach_message, detach_message, return_message
from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

PATH = "/v2/models/scale/infer"
DIRECT = "millstream_batches_direct_total"
IN_FLIGHT = "millstream_requests_in_flight"
REPLIES = "millstream_batch_replies_total"
RECLAIMED = "millstream_batches_reclaimed_total"
LONG_LEASE_S = 120  # no lease ends: what is recovered was recovered for another reason
X = np.array([[3, 4]], np.float32)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    served = {"scale": models.scale(folder / "m.onnx")}
    with running_stack(folder, models=served, settings={"queue_lease_s": LONG_LEASE_S}) as stack:
        yield stack


def call(stack: Stack, x: np.ndarray = X, path: str = PATH) -> http.client.HTTPConnection:
    body, headers = v2.request({"x": x}, parameters=v2.PATIENT)
    return stack.send(path, body, headers)


def check(connection: http.client.HTTPConnection, expected: np.ndarray = 2 * X) -> None:
    reply = connection.getresponse()
    body = reply.read()
    assert reply.status == 200, body
    np.testing.assert_array_equal(v2.outputs(body, dict(reply.getheaders()))["y"], expected)
    connection.close()


def direct(stack: Stack) -> float:
    return stack.metrics().value(DIRECT)


def call_directly(stack: Stack) -> None:
    """Send requests until one was dispatched directly: the worker is attached then."""
    before = direct(stack)

    def more() -> bool:
        check(call(stack))
        return direct(stack) > before

    wait_until(more, 120, "a batch takes no queue")


def hold(stack: Stack, worker: int, requests: int = 1) -> list[http.client.HTTPConnection]:
    """Send requests to a stopped worker, at least the first of them directly. Retry until that is so."""
    before = direct(stack)
    waiting = []
    for _ in range(requests):
        in_flight = stack.metrics().value(IN_FLIGHT)
        waiting.append(call(stack))
        wait_until(lambda: stack.metrics().value(IN_FLIGHT) > in_flight, 120)  # noqa: B023
    assert direct(stack) > before, "the worker was not attached"
    return waiting


def test_batches_of_one_gateway_take_no_queue(stack):
    call_directly(stack)
    before, puts = direct(stack), _puts(stack)
    with constant_load(stack.port, PATH, BODIES, callers=4) as load:
        load.more(200)
    check_answers(load)
    dispatched = direct(stack) - before
    assert dispatched > 20
    assert _puts(stack) - puts < dispatched, "few take the queue"
    wait_until(lambda: stack.metrics().value(REPLIES, way="direct") >= dispatched)


def _puts(stack: Stack) -> int:
    stats: Any = stack.redis.info("commandstats")
    return int(stats.get("cmdstat_xadd", {}).get("calls", 0))


def test_a_worker_that_is_killed_with_batches_that_it_has_not_read(stack):
    call_directly(stack)
    worker, reclaimed = stack.pids()["cpu-0"], stack.metrics().value(RECLAIMED)
    with sigstopped(worker):
        waiting = hold(stack, worker, 3)
        os.kill(worker, signal.SIGKILL)
    for connection in waiting:
        check(connection)
    assert stack.metrics().value(RECLAIMED) > reclaimed
    wait_until(lambda: stack.pids().get("cpu-0", worker) != worker, 120)
    call_directly(stack)


def test_a_gateway_that_is_killed_leaves_a_worker_that_serves_its_successor(stack):
    call_directly(stack)
    worker, gateway = stack.pids()["cpu-0"], stack.pids()["gateway-0"]
    with sigstopped(worker):
        [waiting] = hold(stack, worker)
        os.kill(gateway, signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, OSError)):
            waiting.getresponse()
        waiting.close()
    wait_until(lambda: stack.pids().get("gateway-0", gateway) != gateway, 120)
    stack.reconnect()
    stack.settled("scale", 1)
    call_directly(stack)
    assert stack.pids()["cpu-0"] == worker


def test_direct_batches_need_no_redis(stack):
    call_directly(stack)
    with sigstopped(stack.pids()["redis"]):
        for _ in range(20):
            check(call(stack))
    call_directly(stack)


def test_a_redis_that_loses_its_data_costs_no_request(stack):
    call_directly(stack)
    with constant_load(stack.port, PATH, BODIES, callers=4) as load:
        for _ in range(3):
            load.more(50)
            stack.redis.flushall()
        load.more(100)
    check_answers(load)
    call_directly(stack)


def test_large_replies_of_unknown_size_take_the_queue(stack, tmp_path):
    """What the connection cannot carry is run again by the queue, and what follows takes the queue at once."""
    stack.push("spread", models.spread(tmp_path / "m.onnx"))
    path = "/v2/models/spread/infer"
    x = np.arange(2, dtype=np.float32).reshape(2, 1)
    expected = np.broadcast_to(x, (2, 1 << 16))
    for _ in range(6):
        check(call(stack, x, path), expected)
    call_directly(stack)


def test_a_frozen_worker_loses_what_it_has(tmp_path):
    served = {"scale": models.scale(tmp_path / "m.onnx")}
    with running_stack(tmp_path, pools="cpu=2", models=served, settings={"queue_lease_s": 1.0}) as stack:
        for _ in range(3):
            call_directly(stack)
            for name in ("cpu-0", "cpu-1"):
                with sigstopped(stack.pids()[name]), constant_load(stack.port, PATH, BODIES, callers=6) as load:
                    load.more(60)
                check_answers(load)


def test_gateways_share_a_worker(tmp_path):
    """One is attached, and the other's batches reach the worker all the same; then they change places."""
    served = {"scale": models.scale(tmp_path / "m.onnx")}
    with running_stack(tmp_path, gateways=2, models=served) as stack:
        call_directly(stack)
        with constant_load(stack.port, PATH, BODIES, callers=16) as load:  # busy: batches wait in Redis
            load.more(600)
        check_answers(load)
        call_directly(stack)


def test_a_gateway_that_does_not_read_holds_up_no_other(tmp_path):
    """The worker is attached to a gateway that is frozen, while another one has batches."""
    served = {"scale": models.scale(tmp_path / "m.onnx")}
    body, headers = v2.request({"x": X}, parameters=v2.PATIENT)
    with ExitStack() as ends:
        settings = {"queue_lease_s": LONG_LEASE_S}
        stack = ends.enter_context(running_stack(tmp_path, gateways=2, models=served, settings=settings))
        first, second = (ends.enter_context(stack.gateway(index)) for index in range(2))
        before = direct(stack)

        def is_attached() -> bool:
            assert first.post(PATH, content=body, headers=headers).status_code == 200
            return direct(stack) > before

        wait_until(is_attached, 120, "attached to the first")
        with sigstopped(stack.pids()["gateway-0"]):
            for _ in range(30):
                assert second.post(PATH, content=body, headers=headers).status_code == 200
        for client in (first, second) * 10:
            assert client.post(PATH, content=body, headers=headers).status_code == 200


def test_forged_messages_are_dropped(stack):
    call_directly(stack)
    links = ReplyLinks[int](stack.shm_dir, InstallationKeys(stack.installation).pool("cpu"))
    gateway = _gateway(stack)
    try:
        wait_until(lambda: links.direct(gateway) is not None, 120)
        link = links.direct(gateway)
        assert link is not None
        for message in (
            b"\x03", b"\x03garbage", b"\x04", b"\x05\xff", detach_message(1, ["x"]), return_message("x", 1e9), b"\x07",
            attach_message(1, "cpu", "cpu-9-none"), attach_message(2, "cpu", "another"),
            attach_message(1, "gpu", "cpu-9-none"), return_message("unknown", 0.0), detach_message(7, []),
        ):  # fmt: skip
            link.send(message)
        with constant_load(stack.port, PATH, BODIES, callers=4) as load:
            load.more(50)
        check_answers(load)
    finally:
        links.close()
    call_directly(stack)


def _gateway(stack: Stack) -> str:
    [name] = [path.name for path in stack.shm_dir.glob(f"{stack.installation}.*.replies")]
    return name.removeprefix(f"{stack.installation}.").removesuffix(".replies")


def test_an_endless_run_keeps_no_batch_behind_it(tmp_path):
    """The worker gives back what waits behind the run; the other worker answers it."""
    served = {"scale": models.scale(tmp_path / "m.onnx"), "endless": models.endless(tmp_path / "e.onnx", on=7)}
    with running_stack(tmp_path, pools="cpu=2", models=served) as stack:
        call_directly(stack)
        body, headers = v2.request({"x": np.array([[7]], np.int64)}, parameters={"timeout": 8_000_000})
        stuck = stack.send("/v2/models/endless/infer", body, headers)
        with constant_load(stack.port, PATH, BODIES, callers=6) as load:
            load.more(300)
        check_answers(load)
        reply = stuck.getresponse()
        assert reply.status in {500, 504}, reply.read()
        stuck.close()


def test_versions_are_unloaded_and_replaced_under_direct_load(tmp_path: Path) -> None:
    served = {"scale": models.scale(tmp_path / "m.onnx")}
    with running_stack(tmp_path, models=served) as stack:
        call_directly(stack)
        with constant_load(stack.port, PATH, BODIES, callers=4) as load:
            for version in range(2, 5):
                load.more(40)
                stack.push("scale", tmp_path / "m.onnx", version=version)
            load.more(40)
        check_answers(load)
