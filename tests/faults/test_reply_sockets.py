"""Replies that take the socket of a gateway: whatever befalls either end, each request is answered once, and right."""

from __future__ import annotations

import http.client
import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.reply_links import ReplyLinks
from millstream.services.queue.reply_protocol import SUFFIX
from millstream.services.queue.url import RedisAddress
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.batch import ReplyHeader, ReplyOutput, decode_batch, encode_given_up, encode_reply
from millstream.workers.batches.consumer import Finished
from millstream.workers.batches.lease import Lease
from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.scripted_worker import BEAT_S, ScriptedWorker
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

PATH = "/v2/models/scale/infer"
X = np.array([[3, 4]], np.float32)
LEASE_S = 120  # no lease ends because this machine is slow
DUPLICATES = "millstream_duplicate_replies_total"
REPLIES = "millstream_batch_replies_total"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    path = models.scale(folder / "m.onnx")
    with running_stack(
        folder, models={"scale": path}, settings={"queue_lease_s": LEASE_S, "queue_direct": False}
    ) as stack:
        yield stack


class HoldingWorker(ScriptedWorker):
    """A worker that answers readiness probes through Redis, and holds the leases of all other batches."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        self.held: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        self.finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        super().__init__(*arguments, **fields)

    def _run(self) -> None:
        consumer = self._consumer()
        finished: list[Finished] = []
        while not self._ended.is_set():
            while not self.finished.empty():
                finished.append(self.finished.get())
            consumer.send_wait(finished, 1, BEAT_S)
            leases, _ = consumer.receive_wait()
            finished = [Finished(lease, reply_to(lease), b"") for lease in leases if lease.header.probe]
            for lease in leases:
                if not lease.header.probe:
                    self.held.put(lease)
        with suppress(OSError):
            consumer.close()


def reply_to(lease: Lease, blob: str = "") -> bytes:
    """Return the reply of the model to a batch."""
    y = 2 * np.frombuffer(lease.inline, np.float32).reshape(-1, 2)
    output = ReplyOutput((2,), y.nbytes, None, None)
    header = ReplyHeader(lease.header.name, "w", 0.0, 0.0, 0.0, 0.0, len(y), [len(y)], {}, [output], blob)
    return encode_reply(header, [y.tobytes()])


@contextmanager
def holding(stack: Stack) -> Iterator[HoldingWorker]:
    """Let a worker of the test lease the batches, and no other one."""
    installation = stack.installation
    repository = FolderRepository(stack.home / "repository")
    worker = HoldingWorker(RedisAddress.unix(str(stack.socket)), installation, repository)
    try:
        worker.serve(repository.manifest("scale", 1))
        pid = stack.pids()["cpu-0"]
        [other] = [one["id"] for one in stack.http.get("/admin/v1/workers").json()["workers"] if one["pid"] == pid]
        with sigstopped(pid):
            stack.redis.zrem(InstallationKeys(installation).pool("cpu").idle, other)
            yield worker
    finally:
        worker.close()


@pytest.fixture
def links(stack: Stack) -> Iterator[ReplyLinks[int]]:
    links = ReplyLinks[int](stack.shm_dir, InstallationKeys(stack.installation).pool("cpu"))
    yield links
    links.close()


def send(stack: Stack) -> http.client.HTTPConnection:
    body, headers = v2.request({"x": X}, parameters={"timeout": 100_000_000})
    return stack.send(PATH, body, headers)


def check(connection: http.client.HTTPConnection) -> None:
    """Read the reply and check it."""
    reply = connection.getresponse()
    body = reply.read()
    assert reply.status == 200, body
    np.testing.assert_array_equal(v2.outputs(body, dict(reply.getheaders()))["y"], 2 * X)
    connection.close()


def leased(stack: Stack) -> bool:
    """Return whether a worker leases a batch that is no readiness probe."""
    redis: Any = stack.redis
    for key in redis.scan_iter("ms:*:stream:*"):
        for row in redis.xpending_range(key, "w", "-", "+", 100):
            [(_, fields)] = redis.xrange(key, row["message_id"], row["message_id"])
            if not decode_batch(fields[b"e"])[0].probe:
                return True
    return False


def until_more(stack: Stack, name: str, before: float, **labels: str) -> None:
    wait_until(lambda: stack.metrics().value(name, **labels) > before, 120, f"more {name}")


def test_replies_take_the_socket(stack):
    before = stack.metrics().value(REPLIES, way="socket")
    check(send(stack))
    until_more(stack, REPLIES, before, way="socket")


def test_a_worker_that_is_gone_between_its_reply_and_the_acknowledgement_is_answered_for_once(stack, links):
    duplicates = stack.metrics().value(DUPLICATES)
    with holding(stack) as worker:
        waiting = send(stack)
        lease = worker.held.get()
        wait_until(partial(links.send, lease.header.replies, reply_to(lease), 0))
        check(waiting)
    # The worker left: its lease returned to the queue, and the batch ran again.
    until_more(stack, DUPLICATES, duplicates)
    check(send(stack))


def test_a_reply_that_comes_twice_and_late_is_answered_once(stack, links):
    duplicates = stack.metrics().value(DUPLICATES)
    with holding(stack) as worker:
        waiting = send(stack)
        lease = worker.held.get()
        for _ in range(2):
            wait_until(partial(links.send, lease.header.replies, reply_to(lease), 0))
        check(waiting)
        worker.finished.put(Finished(lease, reply_to(lease), b""))  # and through Redis
        wait_until(lambda: stack.metrics().value(DUPLICATES) >= duplicates + 2)


def test_forged_messages_are_dropped(stack, links):
    with holding(stack) as worker:
        waiting = send(stack)
        lease = worker.held.get()
        good = reply_to(lease)
        for message in (
            b"\x00",
            b"garbage",
            good[:10],
            good[: len(good) // 2],
            encode_given_up(lease.header.name),
            b"\x02" + lease.header.name.encode(),
            reply_to(lease, blob="elsewhere"),
        ):
            wait_until(partial(links.send, lease.header.replies, message, 0))
        worker.finished.put(Finished(lease, good, b""))
        check(waiting)
    wait_until(lambda: stack.logs().count("is no reply") >= 7, 120)
    assert stack.metrics().value("millstream_batches_total", outcome="failed") == 0


def test_a_reply_needs_no_redis(stack):
    """The worker has the batch, and Redis stops: the caller is answered, and the lease acknowledged later."""
    pids = stack.pids()
    for _ in range(50):
        with sigstopped(pids["cpu-0"]):
            waiting = send(stack)
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 1, 120)
            received = leased(stack) and not list(stack.redis.scan_iter("ms:*:inbox:*"))
            with sigstopped(pids["redis"]):
                if received:
                    os.kill(pids["cpu-0"], signal.SIGCONT)
                    check(waiting)
        if received:
            break
        check(waiting)  # the worker was about to ask again: Redis still had the batch
    else:
        raise AssertionError("the worker never had the batch")
    check(send(stack))


def test_a_gateway_is_killed_with_a_reply_in_its_socket(stack, links):
    with holding(stack) as worker:
        waiting = send(stack)
        lease = worker.held.get()
        gateway = stack.pids()["gateway-0"]
        wait_until(partial(links.send, lease.header.replies, b"the first that it reads, which is no reply", 0))
        os.kill(gateway, signal.SIGSTOP)
        wait_until(partial(links.send, lease.header.replies, reply_to(lease), 0))
        worker.finished.put(Finished(lease, b"", b""))
        wait_until(worker.finished.empty)
        os.kill(gateway, signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, OSError)):
            waiting.getresponse()
        waiting.close()
        wait_until(lambda: stack.pids().get("gateway-0", gateway) != gateway, 120)
    stack.reconnect()
    stack.settled("scale", 1)
    check(send(stack))
    sockets = [path.name for path in stack.shm_dir.glob(f"{stack.installation}.*{SUFFIX}")]
    assert [name for name in sockets if f".0-{gateway}-" in name] == [], "it went with its successor's start"


def test_a_removed_socket_costs_no_request(stack):
    """The connected worker goes on; its successor finds no socket and uses the reply list."""
    before = stack.metrics().value(REPLIES, way="redis")
    with constant_load(stack.port, PATH, BODIES, callers=4) as load:
        load.more(20)
        for path in stack.shm_dir.glob(f"{stack.installation}.*{SUFFIX}"):
            path.unlink()
        load.more(20)
        worker = stack.pids()["cpu-0"]
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: stack.pids().get("cpu-0", worker) != worker, 120)
        until_more(stack, REPLIES, before, way="redis")
        load.more(20)
    check_answers(load)
