"""The idle workers on this host that take batches directly, and which of them gets the next one.

worker ─(attach, detach: direct_dispatch.py)─> AttachedWorkers <─ send: at most its depth of short batches
"""

from __future__ import annotations

import socket

from millstream.gateway.scheduling.lane_state import AttachedWorker, InFlightBatch
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import Counter, MetricsRegistry
from millstream.services.queue.reply_socket import MESSAGE_BYTES_MAX
from millstream.services.queue.sharing import LONG_S
from millstream.services.wire.batch import batch_head

#: Longer runs take the queue. A batch that another gateway puts meanwhile waits for the run in the worker's inbox.
RUN_S_MAX = 0.02
#: After a batch with a longer run, in which all batches of its lane take the queue: a short one would overtake it.
LONG_PAUSE_S = 1.0
HEADS_MAX = 4096  # lanes whose message heads a worker's record keeps; beyond that they are made again


class AttachedWorkers:
    """The attached workers of one gateway, by pool and id. `registry` counts the batches."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._by_pool: dict[str, dict[str, AttachedWorker]] = {}
        self._counters: dict[str, Counter] = {}

    def add(self, worker: AttachedWorker, term: int) -> None:
        """Let a worker take batches. `term`: its number for this attachment, which its messages name."""
        worker.term, worker.attached, worker.heads = term, True, {}
        self._by_pool.setdefault(worker.pool, {})[worker.worker] = worker

    def discard(self, worker: AttachedWorker) -> None:
        """Let a worker take no more batches."""
        worker.attached = False
        workers = self._by_pool.get(worker.pool, {})
        if workers.get(worker.worker) is worker:
            del workers[worker.worker]

    def send(self, batch: InFlightBatch, entry: bytes, depth: int) -> bool:
        """Send a batch to an attached worker that serves its lane; False: it must take the queue.

        Args:
            batch: registered as in flight.
            entry: the encoded batch.
            depth: batches that an instance of the lane may have at a time.
        """
        lane = batch.lane
        if batch.run_s >= RUN_S_MAX:
            lane.direct_from = batch.put_at + LONG_PAUSE_S
            return False
        if not batch.run_s or lane.direct_from > batch.put_at:
            return False
        worker = self._choose(batch, depth)
        if worker is None:
            return False
        head = worker.heads.get(lane.content_id)
        if head is None:
            if len(worker.heads) >= HEADS_MAX:
                worker.heads.clear()
            head = worker.heads[lane.content_id] = batch_head(worker.term, lane.content_id)
        if len(head) + len(entry) > MESSAGE_BYTES_MAX:
            return False
        try:
            worker.link.send(head + entry, socket.MSG_NOSIGNAL)
        except OSError:  # it does not read, or is gone: then the event loop reports the end of the connection
            return False
        worker.outstanding[batch.name] = batch
        batch.direct = worker
        counter = self._counters.get(lane.pool)
        if counter is None:
            counter = self._counters[lane.pool] = self._registry.counter(catalogue.BATCHES_DIRECT, lane.pool)
        counter.add()
        return True

    def _choose(self, batch: InFlightBatch, depth: int) -> AttachedWorker | None:
        """Return the worker with the fewest batches, if it has none, or if no instance is elsewhere.

        A worker that is inside a long run, as the age of its oldest batch shows, gets no more.
        """
        lane = batch.lane
        attached = self._by_pool.get(lane.pool)
        if not attached:
            return None
        best, least, serving = None, depth, 0
        for name in lane.local_workers:
            worker = attached.get(name)
            if worker is None:
                continue
            count = len(worker.outstanding)
            if not count:
                return worker
            serving += 1
            oldest = next(iter(worker.outstanding.values()))
            if count < least and batch.put_at < oldest.put_at + LONG_S:
                best, least = worker, count
        # An instance that is not attached may be idle: Redis knows.
        return best if serving == lane.instances else None
