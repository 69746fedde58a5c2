"""A worker's main loop on a real queue: a finished request does not wait for a run of another one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.waits import Spin
from millstream.services.queue.reply_links import ReplyLinks
from millstream.services.queue.reply_protocol import HELLO, NONCE_BYTES, ReplyAddress, gateway_proof
from millstream.services.segments.segment import Segments
from millstream.services.wire.batch import BatchHeader, BatchInput, decode_reply, encode_batch
from millstream.workers.backends.base import Array
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.direct_work import DirectWork
from millstream.workers.batches.lease import Lease, ReplyWriter
from millstream.workers.batches.live_check import LiveCheck
from millstream.workers.batches.open_streams import OpenStreams
from millstream.workers.batches.reply_sender import ReplySender
from millstream.workers.batches.watchdog import LoopState
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import LoadedModels
from millstream.workers.run_reports import OverdueReplies
from millstream.workers.worker import Worker
from tests.kit.pool import Pool
from tests.kit.wait import wait_until
from tests.unit.test_runner import holding, signature

GATEWAY = "0-7-ab"
LIST = f"{GATEWAY}-1"
TIMEOUT_S = 120


class Instance:
    """Returns its input; runs end while `may_end` is set."""

    size_bytes = 0
    lost = ""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self.began.set()
        assert self.may_end.wait(TIMEOUT_S)
        return [inputs["x0"]]

    def terminate(self) -> None: ...


@dataclass
class MainLoop:
    """A main loop in a thread. The lanes are `quick` and `slow`; runs of `slow` are known to take 5 s."""

    pool: Pool
    quick: str
    slow: str
    quick_instance: Instance
    slow_instance: Instance
    links: ReplyLinks[Lease]
    overdue: OverdueReplies
    thread: threading.Thread

    def put(self, lane: str, name: str, deadline_ms: float = 1e15) -> None:
        replies = self.pool.keys.replies(LIST)
        header = BatchHeader(name, replies, 0.0, [1], [deadline_ms], [BatchInput((1,), 4, None, None)], [None], "")
        entry = encode_batch(header, [np.ones(1, np.float32).tobytes()])
        self.pool.put(lane, name, gateway=LIST, entry=entry, deadline_ms=deadline_ms)

    def replies(self) -> list[str]:
        """Remove the replies in the gateway's list; return the names of their batches."""
        decoded = [decode_reply(data) for data in self.pool.replies(LIST)]
        return [one if isinstance(one, str) else one[0].name for one in decoded]


@pytest.fixture
def main_loop(pool: Pool, tmp_path: Path) -> Iterator[MainLoop]:
    models = LoadedModels()
    lanes = []
    instances = [Instance(), Instance()]
    for instance, digest, run_s in zip(instances, ("1" * 64, "2" * 64), (1e-4, 5.0), strict=True):
        model = holding(instance, signature())  # type: ignore[arg-type]
        manifest = model.manifest.model_copy(update={"digest": digest})
        models.set(replace(model, manifest=manifest, measured={64: run_s}))
        lanes.append(manifest.content_id)
    pool.join("w", *lanes)

    def connect() -> Consumer:
        return Consumer(pool.address, pool.keys, "w", pool.clock)

    links = ReplyLinks[Lease](tmp_path, pool.keys)
    segments = Segments(tmp_path)
    writer = ReplyWriter("w", segments, 1 << 20, 1 << 20, lambda _: True)
    direct = DirectWork(links, pool.keys, "w", models, pool.clock, Spin(0), on=False)
    streams = OpenStreams(connect, pool.keys, tmp_path, "w", segments, pool.clock)
    replies = ReplySender(writer, links, lambda _: True, direct, streams)
    registry = MetricsRegistry(None, "w")
    check = LiveCheck(0, models, lambda *_: [], lambda *_: None)
    metrics = WorkerMetrics(registry, "cpu", "w", "cpu")
    worker = Worker(connect, models, replies, metrics, pool.clock, check, LoopState())
    thread = threading.Thread(target=worker.serve)
    overdue = OverdueReplies(connect, worker)
    yield MainLoop(pool, lanes[0], lanes[1], instances[0], instances[1], links, overdue, thread)
    for instance in instances:
        instance.may_end.set()
    worker.stop()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert pool.check().entries == []
    registry.close()


@contextmanager
def silent_gateway() -> Iterator[ReplyAddress]:
    """A reply port that takes a login, and sends no receipts."""
    secret, nonce = bytes(32), bytes(NONCE_BYTES)
    links: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                link, _ = server.accept()
                links.append(link)
                link.sendall(HELLO + nonce)
                link.sendall(gateway_proof(secret, nonce, link.recv(1000)[:NONCE_BYTES]))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept)
        thread.start()
        yield ReplyAddress("127.0.0.1", server.getsockname()[1], secret)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for link in links:
        link.close()


def test_a_finished_request_does_not_wait_for_a_long_run_that_was_leased_before_it_ended(main_loop):
    main_loop.slow_instance.may_end.clear()
    main_loop.put(main_loop.quick, "quick", deadline_ms=1e14)  # the more urgent one, so that it is first
    main_loop.put(main_loop.slow, "slow")
    main_loop.thread.start()
    assert main_loop.slow_instance.began.wait(TIMEOUT_S)
    assert wait_until(main_loop.replies) == ["quick"]
    main_loop.slow_instance.may_end.set()
    wait_until(lambda: main_loop.replies() == ["slow"])


def test_a_long_run_does_not_wait_for_a_redis_that_does_not_answer(main_loop):
    pool = main_loop.pool
    main_loop.quick_instance.may_end.clear()
    main_loop.put(main_loop.quick, "quick", deadline_ms=1e14)
    main_loop.put(main_loop.slow, "slow")
    main_loop.thread.start()
    assert main_loop.quick_instance.began.wait(TIMEOUT_S)
    wait_until(lambda: "slow" in pool.check().leased("w"))
    pool.redis.client_pause(1000 * TIMEOUT_S, all=False)  # scripts that write wait
    try:
        main_loop.quick_instance.may_end.set()
        assert main_loop.slow_instance.began.wait(5)
    finally:
        pool.redis.client_unpause()
    wait_until(lambda: not pool.check().entries)
    assert main_loop.replies() == ["quick", "slow"]


def test_a_reply_without_a_receipt_does_not_wait_for_a_long_run(main_loop: MainLoop):
    """And it is sent once, although the main loop sends it again after the run."""
    pool = main_loop.pool
    main_loop.thread.start()
    with silent_gateway() as address:
        sent = 0

        def kept() -> list[tuple[Lease, bytes]]:
            nonlocal sent
            for gateway in [*main_loop.links.wanted]:
                main_loop.links.found(gateway, address.encode())
            main_loop.put(main_loop.quick, f"quick-{sent}")
            sent += 1
            wait_until(lambda: main_loop.replies() or main_loop.links.unsettled())
            return main_loop.links.unsettled()

        main_loop.slow_instance.may_end.clear()
        [(lease, _)] = wait_until(kept, what="a reply was sent to the reply port")
        main_loop.put(main_loop.slow, "slow")
        assert main_loop.slow_instance.began.wait(TIMEOUT_S)
        assert main_loop.links.unsettled(), "the run began before the reply was late"

        def replies() -> list[str]:
            main_loop.overdue.look()
            return main_loop.replies()

        assert wait_until(replies, what="the watchdog sends it") == [lease.header.name]
        assert pool.check().leased("w") == ["slow"]
        main_loop.slow_instance.may_end.set()
        wait_until(lambda: not main_loop.links.waiting and not pool.check().entries)
        assert main_loop.replies() == ["slow"]


def test_a_reply_beside_the_main_loop_is_sent_once_and_leaves_an_idle_worker_idle(pool):
    pool.join("w", "m")
    pool.put("m", "b1")
    [lease] = pool.next("w")
    assert pool.next("w", leased=1) == []
    finished = Finished(lease, b"b1 1 w", b"")
    with closing(Consumer(pool.address, pool.keys, "w", pool.clock)) as other:
        for _ in range(2):
            other.reply_beside_main_loop([finished])
    assert "w" in pool.check().idle
    assert pool.next("w", lease) == []
    assert pool.replies() == [b"b1 1 w"]
    assert pool.check().entries == []
