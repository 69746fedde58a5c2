"""Which replies may be sent before their lease is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.queue.reply_links import Sent
from millstream.services.wire.batch import BatchHeader, BatchInput, ShmSlice, decode_reply, encode_batch
from millstream.workers.batches.consumer import Finished
from millstream.workers.batches.lease import Lease, ReplyWriter, RunCost
from millstream.workers.batches.reply_sender import ReplySender
from millstream.workers.batches.runner import RunResult

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
    batching=True,
)
COST = RunCost(0.0, 0.0, 0.0, 0.0, 1, [1])
SLICE = ShmSlice("s", 0, 8)


@dataclass
class Links:
    """Takes replies while `open`, and keeps those of a gateway on another host, `remote`, until it is asked."""

    open: bool = True
    remote: bool = False
    sent: list[tuple[bytes, bytes]] = field(default_factory=list)
    kept: list[tuple[Lease, bytes]] = field(default_factory=list)

    def send(self, replies: bytes, message: bytes, token: Lease) -> Sent | None:
        if not self.open:
            return None
        if self.remote:
            self.kept.append((token, message))
            return Sent.KEPT
        self.sent.append((replies, message))
        return Sent.DELIVERED

    @property
    def waiting(self) -> bool:
        return bool(self.kept)

    def unsettled(self, older_s: float) -> list[tuple[Lease, bytes]]:
        return self.kept

    def settled(self, wait_s: float) -> tuple[list[Lease], list[tuple[Lease, bytes]]]:
        """The first was delivered, the others were not."""
        first, *others = self.kept
        self.kept = []
        return [first[0]], others


class Direct:
    """No batch comes directly."""

    def served(self, lease: Lease) -> None: ...


def lease_of(attempt: int = 1, shm: ShmSlice | None = None, slot: ShmSlice | None = None, blob: str = "") -> Lease:
    header = BatchHeader("b1", b"list", 0.0, [1], [1e15], [BatchInput((2,), 8, None, shm)], [slot], blob)
    return Lease("lane", b"1-1", encode_batch(header, [] if shm or blob else [bytes(8)]), attempt, leased_at=5.0)


def sender_of(links: Links, *, valid: bool = True, inline_bytes_max: int = 1 << 20) -> ReplySender:
    segments: Any = None
    writer = ReplyWriter("w", segments, inline_bytes_max, 1 << 20, lambda _: False)
    direct: Any = Direct()
    streams: Any = None  # these replies are whole
    return ReplySender(writer, links, lambda leased_at: valid and leased_at == 5.0, direct, streams)  # type: ignore[arg-type]


def result_of(lease: Lease) -> RunResult:
    return RunResult(lease, [np.ones((1, 2), np.float32)], 0.1, COST)


def finish(sender: ReplySender, lease: Lease, *, at_once: bool = True) -> Finished:
    """Return what is left for Redis."""
    finished = sender.finish(result_of(lease), SIGNATURE, at_once=at_once)
    assert finished is not None
    return finished


def test_a_reply_that_was_sent_is_not_sent_again_with_the_acknowledgement():
    links = Links()
    sender = sender_of(links)
    finished = finish(sender, lease_of())
    [(replies, message)] = links.sent
    decoded = decode_reply(message)
    assert not isinstance(decoded, str)
    assert (replies, decoded[0].name, bytes(decoded[1])) == (b"list", "b1", np.ones(2, np.float32).tobytes())
    assert (finished.reply, finished.blob) == (b"", b"")
    assert (sender.by_socket, sender.by_redis, sender.redis_bytes) == (1, 0, 0)


@pytest.mark.parametrize(
    ("lease", "options"),
    [
        (lease_of(attempt=2), {}),
        (lease_of(shm=SLICE), {}),
        (lease_of(slot=SLICE), {}),
        (lease_of(), {"valid": False}),
        (lease_of(), {"inline_bytes_max": 4}),
    ],
    ids=["second attempt", "input in shared memory", "output in shared memory", "lease may be over", "large outputs"],
)
def test_redis_decides_about_a_reply_that_could_do_harm(lease, options):
    links = Links()
    sender = sender_of(links, **options)
    finished = finish(sender, lease)
    assert links.sent == []
    assert (sender.by_socket, sender.by_redis) == (0, 1)
    assert sender.redis_bytes == len(finished.reply) + len(finished.blob) > 8


@pytest.mark.parametrize("blob", ["", "b1"], ids=["in the entry", "in a blob"])
def test_inputs_in_redis_are_no_hindrance_and_are_released_once_the_reply_is_kept(blob):
    links = Links(remote=True)
    lease = lease_of(blob=blob)
    lease.inline = memoryview(bytes(8))
    assert sender_of(links).finish(result_of(lease), SIGNATURE) is None
    assert [kept for kept, _ in links.kept] == [lease]
    assert lease.inline.nbytes == 0


def test_errors_of_the_worker_itself_and_replies_without_a_way_go_through_redis():
    links = Links()
    sender = sender_of(links)
    assert finish(sender, lease_of(), at_once=False).reply
    links.open = False
    assert finish(sender, lease_of()).reply
    assert (links.sent, sender.by_redis) == ([], 2)


def test_the_lease_of_a_reply_to_another_host_is_acknowledged_after_its_receipt():
    sender = sender_of(Links(remote=True))
    assert sender.settled() == []
    first, second = lease_of(), lease_of()
    for lease in (first, second):
        assert sender.finish(result_of(lease), SIGNATURE) is None
    assert (sender.by_tcp, sender.by_redis, sender.waiting) == (0, 0, True)
    assert [finished.lease for finished in sender.unsettled()] == [first, second]
    delivered, undelivered = sender.settled()
    assert delivered == Finished(first, b"", b"")
    assert (undelivered.lease, undelivered.blob) == (second, b"")
    assert not isinstance(decode_reply(undelivered.reply), str)
    assert (sender.by_tcp, sender.by_redis) == (1, 1), "each counts once, by the way by which it arrived"
    assert sender.redis_bytes == len(undelivered.reply)
