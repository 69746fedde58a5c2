"""Redis is paused, killed, cut off, full or replaced under load: what was accepted is answered, and nothing hangs."""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import client
from millstream.services.wire.batch import decode_batch
from tests.kit import models, v2
from tests.kit.load import Load, constant_load
from tests.kit.redis_server import redis_server
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

X = np.array([[1, 2], [3, 4]], np.float32)
BODIES = [
    v2.request({"x": X * i}, binary=bool(i % 2), binary_outputs=bool(i % 2), parameters=v2.PATIENT) for i in range(1, 9)
]
INFER = "/v2/models/steady/infer"
CALLERS = 6
TRIES = 5  # to see a worker between two runs
BACK_S_MAX = 120.0  # until all is well again after a fault, on a machine that is busy with something else
REFUSALS = {429, 503}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("away")
    path = models.scale(folder / "m.onnx")
    with running_stack(folder, gateways=2, pools="cpu=2", models={"steady": path}) as stack:
        yield stack


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    """Two gateways and two workers with `steady`; a test ends when all is well again."""
    yield shared
    back_within(shared, BACK_S_MAX)
    shared.settled("steady", 1)
    assert_quiet(shared)


class Got(NamedTuple):
    """An answer to body `sent` of the list of bodies."""

    sent: int
    status: int
    headers: dict[str, str]
    body: bytes


def answers_of(load: Load) -> list[Got]:
    return [Got(answer.sent, answer.status, answer.headers, answer.body) for answer in load.answers]


def sent_beside(stack: Stack, number: int) -> list[http.client.HTTPConnection]:
    """Requests beside the load, each on a connection of its own; their answers are not read yet."""
    return [stack.send(INFER, *BODIES[i % len(BODIES)]) for i in range(number)]


def answers_to(connections: Sequence[http.client.HTTPConnection]) -> list[Got]:
    """The answers to what `sent_beside` sent. One that does not come is an error."""
    answers = []
    for i, connection in enumerate(connections):
        reply = connection.getresponse()
        answers.append(Got(i % len(BODIES), reply.status, dict(reply.getheaders()), reply.read()))
        connection.close()
    return answers


def check(what: str, answers: Iterable[Got], *, refused_max: float = 0, factor: float = 2.0, x: v2.Array = X) -> int:
    """Each answer is a 200 with the caller's own rows, or a refusal that says when to come back; how many refusals."""
    answers = list(answers)
    refused = [answer for answer in answers if answer.status in REFUSALS and "retry-after" in answer.headers]
    failed = [answer for answer in answers if answer.status != 200 and answer not in refused]
    statuses = Counter(answer.status for answer in answers)
    print(
        f"{what}: {len(answers)} requests, {statuses[200]} answered, {len(refused)} refused, {len(failed)} failed;",
        Counter(orjson.loads(answer.body)["error"] for answer in answers if answer.status != 200).most_common(5),
    )
    assert failed == []
    assert len(refused) <= refused_max, refused[:3]
    for answer in answers:
        if answer.status == 200:
            got = v2.outputs(answer.body, answer.headers)["y"].astype(np.float32)
            np.testing.assert_array_equal(got, x * np.float32((answer.sent + 1) * factor))
    assert statuses[200] > 0 or refused_max >= len(answers)
    return len(refused)


def pass_until(instant: float) -> None:
    """Let the fault last: its length is what is tested."""
    wait_until(lambda: time.monotonic() >= instant)


def is_ready(stack: Stack) -> bool:
    return stack.http.get("/v2/health/ready").status_code == 200


def back_within(stack: Stack, seconds: float) -> None:
    """Wait until every gateway says again that it is ready."""
    for index in range(stack.gateways):
        with stack.gateway(index) as gateway:
            wait_until(lambda: gateway.get("/v2/health/ready").status_code == 200, seconds, "ready")


def put_again(stack: Stack) -> bool:
    """Whether a Redis that is just starting has batches."""
    with suppress(RedisConnectionError):
        return streams(stack) > 0
    return False


@pytest.mark.parametrize("pause_s", [2.5, 12.0], ids=["longer than a lease", "longer than a socket's timeout"])
def test_redis_is_paused(stack: Stack, pause_s: float) -> None:
    refused_before = stack.metrics().value("millstream_requests_refused_total")
    with constant_load(stack.port, INFER, BODIES, CALLERS) as load:
        load.more(100)
        with sigstopped(stack.pids()["redis"]):
            until = time.monotonic() + pause_s
            sent = sent_beside(stack, 30)
            if pause_s > 5:
                # nothing can be answered: it does not say otherwise for long
                wait_until(lambda: not is_ready(stack), what="not ready")
            pass_until(until)
        beside = answers_to(sent)
        load.more(100)
        back_within(stack, BACK_S_MAX)
        load.more(100)
    refused = stack.metrics().value("millstream_requests_refused_total") - refused_before
    counted = check("load", answers_of(load), refused_max=refused)
    counted += check("sent during the pause", beside, refused_max=refused)
    assert counted == refused  # no accepted request is among the refused


def test_redis_is_killed_with_requests_in_the_queue(stack: Stack) -> None:
    beside: list[Got] = []
    ended = sum("redis was ended by SIGKILL: restarting it" in line for line in stack.lines)
    with constant_load(stack.port, INFER, BODIES, CALLERS) as load:
        for _ in range(2):
            load.more(100)
            pids = stack.pids()
            with sigstopped(pids["cpu-0"], pids["cpu-1"]):
                sent = sent_beside(stack, 40)
                wait_until(
                    lambda: stack.metrics().value("millstream_requests_in_flight") >= 40 + CALLERS, what="accepted"
                )
                wait_until(lambda: streams(stack) > 0, what="put")
                os.kill(pids["redis"], signal.SIGKILL)
                wait_until(lambda: stack.pids().get("redis", pids["redis"]) != pids["redis"])  # noqa: B023
                # the new one was empty: what is in it now was put again
                wait_until(lambda: put_again(stack), what="put again")
            beside += answers_to(sent)
        load.more(100)
        stack.settled("steady", 1)
        load.more(100)
    assert sum("redis was ended by SIGKILL: restarting it" in line for line in stack.lines) == ended + 2
    check("load", answers_of(load))
    check("in the queue", beside)


def streams(stack: Stack) -> int:
    """Entries in all streams, without readiness probes: one may have been sent a moment before its worker slept."""
    redis: Any = stack.redis
    entries = [fields[b"e"] for key in redis.scan_iter("ms:*:stream:*") for _, fields in redis.xrange(key)]
    return sum(not decode_batch(entry)[0].probe for entry in entries)


def test_connections_are_cut(stack: Stack) -> None:
    with constant_load(stack.port, INFER, BODIES, CALLERS) as load:
        load.more(50)
        cut_often(stack, load, cuts=10)
    check("load", answers_of(load))


def test_connections_are_cut_while_large_outputs_are_fetched(tmp_path: Path) -> None:
    """Without shared memory large outputs lie in a key of their own, asked for when the reply came: one more to
    lose.
    """
    path = models.identity(tmp_path / "m.onnx", shape=("N", 16384))
    x = np.arange(5 * 16384, dtype=np.float32).reshape(5, 16384)
    bodies = [v2.request({"x": x * i}, parameters=v2.PATIENT) for i in range(1, 5)]
    settings = {"shm_bytes_max": 0}
    with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}, settings=settings) as stack:
        with constant_load(stack.port, INFER, bodies, CALLERS) as load:
            load.more(20)
            cut_often(stack, load, cuts=30)
        check("load", answers_of(load), factor=1.0, x=x)
        # No gateway knows outputs whose reply was lost with a connection: they may stay until they expire, no longer.
        wait_until(lambda: not streams(stack), what="all batches replied to")
        forgotten = list(stack.redis.scan_iter("ms:*:blob:*"))
        print(f"{len(forgotten)} outputs left to expire")
        for key in forgotten:
            assert -1 != stack.redis.pttl(key) <= 60_000
            stack.redis.delete(key)


def cut_often(stack: Stack, load: Load, cuts: int) -> None:
    before = stack.metrics().value("millstream_redis_reconnects_total")
    for _ in range(cuts):
        assert cut(stack) > 0
        load.more(10)
    stack.settled("steady", 1)
    load.more(50)
    assert stack.metrics().value("millstream_redis_reconnects_total") >= before + cuts // 2


def cut(stack: Stack) -> int:
    """End all connections to Redis but ours and those that only listen to news; how many."""
    return int(stack.redis.client_kill_filter(_type="normal"))


def test_replies_to_a_connection_that_is_gone_do_not_stay(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"steady": path}, settings={"queue_direct": False}) as stack:
        with sigstopped(stack.pids()["cpu-0"]):
            sent = sent_beside(stack, 1)
            wait_until(lambda: streams(stack) == 1, what="put")
            cut(stack)
            wait_until(lambda: streams(stack) == 2, what="put again")
        check("put twice", answers_to(sent))
        # the end of the stack finds the reply to what was put first, if no gateway reads it


def test_losing_the_connection_is_not_counted_as_a_death_of_a_worker(tmp_path: Path) -> None:
    """A request is given up when its workers died: not when it was put again and then lost one worker."""
    path = models.slow(tmp_path / "m.onnx", rounds=100_000)
    body, headers = v2.request({"x": np.ones((1, 128), np.float32)}, parameters=v2.PATIENT)
    # nothing is reclaimed for silence while the worker sleeps
    settings = {"queue_lease_s": 120, "queue_direct": False}
    with running_stack(tmp_path, models={"steady": path}, settings=settings) as stack:
        worker = stack.pids()["cpu-0"]
        for _ in range(TRIES):
            with sigstopped(worker):
                connection = stack.send(INFER, body, headers)
                wait_until(lambda: streams(stack) == 1, what="put")
                for number in (2, 3):
                    cut(stack)
                    wait_until(lambda: streams(stack) == number, what="put again")  # noqa: B023
            # the first run is over, and the batches that were put again, or one of them, are in the worker's hands
            wait_until(lambda: streams(stack) < 3 and (leases(stack) > 0 or not streams(stack)), what="leased")
            if streams(stack) == 2:
                break
            wait_until(lambda: not streams(stack), what="all three have run")
            connection.close()
        else:
            raise AssertionError("the runs were over before they were seen")
        os.kill(worker, signal.SIGKILL)
        reply = connection.getresponse()
        print(f"1 request, put 3 times, 1 worker killed: {reply.status} {reply.read()[:100]!r}")
        connection.close()
        assert reply.status == 200


def leases(stack: Stack) -> int:
    """Entries that workers have."""
    return sum(int(stack.redis.xpending(key, "w")["pending"]) for key in stack.redis.scan_iter("ms:*:stream:*"))


def test_metrics_are_there_while_redis_is_paused(stack: Stack) -> None:
    wait_until(lambda: stack.metrics().value("millstream_instances_ready") == 2)
    with sigstopped(stack.pids()["redis"]):
        page = stack.metrics()
        assert page.value("millstream_instances_ready") == 2


def test_redis_is_out_of_memory(stack: Stack) -> None:
    with constant_load(stack.port, INFER, BODIES, callers=4) as load:
        load.more(100)
        lines, began = stack.logs().count("\n"), time.monotonic()
        stack.redis.config_set("maxmemory", "1mb")
        with pytest.raises(OutOfMemoryError):
            stack.redis.set("ms:more", "than fits")
        # it lasts until the workers' records, which cannot be written any more, have expired
        wait_until(lambda: not list(stack.redis.scan_iter("ms:*:record:*")), what="records gone")
        wait_until(lambda: not is_ready(stack), what="not ready")
        sent = sent_beside(stack, 10)
        load.until(lambda: any(answer.status == 503 for answer in load.answers))
        during = len(load.answers)
        said = (stack.logs().count("\n") - lines) / (time.monotonic() - began)
        stack.redis.config_set("maxmemory", "0")
        began = time.monotonic()
        beside = answers_to(sent)
        seen = len(load.answers) + 4
        load.until(lambda: len(load.answers) >= seen + 50 and all_right(load, 50), BACK_S_MAX)
        back_within(stack, BACK_S_MAX)
        print(f"after {time.monotonic() - began:.1f} s all is well again")
        after = len(load.answers)
        stack.settled("steady", 1)
        load.more(100)
    answers = answers_of(load)
    print(f"{said:.1f} lines a second in the logs while out of memory")
    assert said < 50  # who tries again without a pause says thousands
    check("load, out of memory", answers[:during], refused_max=during)
    check("sent out of memory", beside, refused_max=len(beside))
    check("load, until all is well", answers[during:after], refused_max=after - during)
    check("load, afterwards", answers[after:])


def all_right(load: Load, last: int) -> bool:
    return all(answer.status == 200 for answer in load.answers[-last:])


def test_an_external_redis_is_replaced_at_its_address(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    folder = tmp_path / "redis"
    folder.mkdir()
    with ExitStack() as servers:
        first = servers.enter_context(ExitStack())
        address = first.enter_context(redis_server(choose_binary(), folder))
        settings = {"redis_url": address.url}
        with running_stack(tmp_path, gateways=2, pools="cpu=2", models={"steady": path}, settings=settings) as stack:
            stack.redis = client(address)
            assert "redis" not in stack.pids()
            with constant_load(stack.port, INFER, BODIES, CALLERS) as load:
                load.more(100)
                first.close()
                assert not Path(str(address.path)).exists()
                wait_until(lambda: not is_ready(stack), what="not ready")
                sent = sent_beside(stack, 30)
                seen = len(load.answers)
                fresh = servers.enter_context(redis_server(choose_binary(), folder))
                assert fresh == address
                beside = answers_to(sent)
                load.more(100)
                stack.settled("steady", 1)
                load.more(100)
                assert len(load.answers) > seen
            check("load", answers_of(load))
            check("sent without Redis", beside)


def test_a_stop_ends_although_redis_is_frozen(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"steady": path}, settings={"drain_s": 5}) as stack:
        redis = stack.pids()["redis"]
        os.kill(redis, signal.SIGSTOP)  # it is killed in the end
        assert stack.stop() == 0
