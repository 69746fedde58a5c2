"""Chooses the way of each reply: straight to a gateway on this host, or on another one, or through Redis.

reply ─> ReplyLinks, now ─> acknowledged by the next call of the queue      else: sent and acknowledged in one script
              to another host ─> receipt ─> acknowledged by the next call of the queue

The reply is sent before its lease is acknowledged: a worker that dies in between leaves a lease, whose batch runs again
and is answered a second time, which the gateway drops. The other order would lose the answer. What was sent to another
host may be lost with either host, so its lease is acknowledged after the gateway's receipt.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.services.model.signature import Signature
from millstream.services.queue.reply_links import ReplyLinks, Sent
from millstream.services.wire.batch import encode_given_up
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.direct_work import DirectWork
from millstream.workers.batches.lease import Lease, ReplyWriter
from millstream.workers.batches.open_streams import OpenStreams
from millstream.workers.batches.runner import RunResult
from millstream.workers.metrics import WorkerMetrics

_NO_INPUTS = memoryview(b"")


class ReplySender:
    """Sends what may be sent before the lease is acknowledged.

    Redis does not check the lease of a reply that takes a socket. So sockets are used only while a second run of the
    batch could do no harm: while the lease is surely valid, for the first attempt, and for a batch without shared
    memory, which the gateway reuses as soon as it has the reply. Inputs in a blob are no hindrance: they are deleted
    with the acknowledgement.
    """

    def __init__(
        self,
        writer: ReplyWriter,
        links: ReplyLinks[Lease],
        lease_valid: Callable[[float], bool],
        direct: DirectWork,
        streams: OpenStreams,
    ) -> None:
        self.writer = writer
        self._links = links
        self._lease_valid = lease_valid
        self.direct = direct
        self.streams = streams
        # Since the last `count`.
        self.redis_bytes = 0
        self.by_redis = 0
        self.by_socket = 0
        self.by_tcp = 0  # counted with the receipt: without one, a reply goes through Redis
        self.by_direct = 0  # over the connection over which the batch came

    def finish(self, result: RunResult, signature: Signature, *, at_once: bool = True) -> Finished | None:
        """Send the reply of a run if that is possible now; return what is left for Redis.

        `at_once` False: all of it is, and Redis takes it only from the worker that owns the lease. Returns None for a
        batch that was dispatched directly: Redis does not know it; and for a reply of which `settled` tells.
        """
        lease = result.lease
        reply, blob = self.writer.write(lease, signature, result.outputs, result.cost)
        lease.inline = _NO_INPUTS  # a lease is kept until its receipt or acknowledgement, which need no inputs
        if lease.link is not None:
            self.by_direct += 1
            self.direct.answer(lease, reply, blob)
            return None
        self.direct.served(lease)
        if at_once and not blob and self._allowed(lease):
            sent = self._links.send(lease.header.replies, reply, lease)
            if sent is Sent.DELIVERED:
                self.by_socket += 1
                return Finished(lease, b"", b"")
            if sent is Sent.KEPT:
                return None
        return self._through_redis(lease, reply, blob)

    def _through_redis(self, lease: Lease, reply: bytes, blob: bytes) -> Finished:
        self.by_redis += 1
        self.redis_bytes += len(reply) + len(blob)
        return Finished(lease, reply, blob)

    def settled(self, wait_s: float = 0.0) -> list[Finished]:
        """Return what is left for Redis of replies to gateways on other hosts; wait up to `wait_s` for receipts."""
        if not self._links.waiting:
            return []
        delivered, undelivered = self._links.settled(wait_s)
        self.by_tcp += len(delivered)
        left = [Finished(lease, b"", b"") for lease in delivered]
        return left + [self._through_redis(lease, reply, b"") for lease, reply in undelivered]

    @property
    def waiting(self) -> bool:
        """Whether a receipt is missing."""
        return self._links.waiting

    def unsettled(self, older_s: float = 0.0) -> list[Finished]:
        """Return the replies without a receipt that were sent at least `older_s` seconds ago, for Redis.

        May be called in any thread. They stay: `settled` returns them, too.
        """
        return [Finished(lease, reply, b"") for lease, reply in self._links.unsettled(older_s)]

    def give_up_links(self) -> None:
        """Close the connections; `settled` then returns all that has no receipt."""
        self._links.close()

    def look_up(self, consumer: Consumer) -> None:
        """Look up the addresses of gateways that replies are for. Called in another thread."""
        for gateway in [*self._links.wanted]:
            self._links.found(gateway, consumer.reply_address(gateway))

    def count(self, metrics: WorkerMetrics) -> None:
        """Count what was written and sent since the last call."""
        metrics.sent(
            self.redis_bytes,
            self.writer.segment_bytes,
            self.writer.too_large,
            redis=self.by_redis,
            socket=self.by_socket,
            tcp=self.by_tcp,
            direct=self.by_direct,
        )
        self.redis_bytes = self.by_redis = self.by_socket = self.by_tcp = self.by_direct = 0
        self.writer.segment_bytes = self.writer.too_large = 0

    def give_up(self, lease: Lease) -> Finished | None:
        """Have the requests of a lease tried alone. Returns what `finish` returns."""
        message = encode_given_up(lease.header.name)
        if lease.link is None:
            return Finished(lease, message, b"")
        self.direct.answer(lease, message, b"")
        return None

    def _allowed(self, lease: Lease) -> bool:
        header = lease.header
        if lease.attempt > 1 or not self._lease_valid(lease.leased_at):
            return False
        for tensor in header.inputs:
            if tensor.shm is not None:
                return False
        return not any(header.output_slots)
