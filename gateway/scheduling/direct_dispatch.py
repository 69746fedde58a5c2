"""Sends batches to idle workers on this host directly, and takes them back when these detach, return one, or die.

worker ─> attach ─> send: at most its depth of short batches ─> reply, over the same connection
worker ─> detach: batches that it did not take are put into the queue          connection lost: all of them are
An attached worker is idle for Redis, too, so any gateway's batch still reaches it at once. What must wait for a worker
waits in the queue: there lanes and gateways share the workers fairly, and a worker that finds it not empty detaches.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from millstream.gateway.scheduling.lane_state import AttachedWorker, InFlightBatch
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import Counter, MetricsRegistry
from millstream.services.queue.death_notices import Death
from millstream.services.queue.reply_protocol import MESSAGE_BYTES_MAX
from millstream.services.queue.sharing import LONG_S
from millstream.services.wire.batch import Attach, Detach, Return, batch_head, read_control
from millstream.services.wire.worker_id import pool_of

log = logging.getLogger("millstream.direct")

#: Longer runs take the queue. A batch that another gateway puts meanwhile waits for the run in the worker's inbox.
RUN_S_MAX = 0.02
#: After a batch with a longer run, in which all batches of its lane take the queue: a short one would overtake it.
LONG_PAUSE_S = 1.0
HEADS_MAX = 4096  # lanes whose message heads a worker's record keeps; beyond that they are made again
#: After a connection was lost, the time until the worker's death is announced with the batches that it was running.
NOTICE_S = 1.0


class DirectDispatch:
    """The connections of one gateway to workers that take batches directly. Call it only in the event loop.

    `is_alive`: asks Redis which of some workers of a pool sent a heartbeat within some seconds.
    """

    def __init__(
        self,
        registry: MetricsRegistry,
        lanes: LaneTable,
        is_alive: Callable[[str, Collection[str], float], Awaitable[set[str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._lanes = lanes
        self._is_alive = is_alive
        self._clock = clock
        self._by_link: dict[socket.socket, AttachedWorker] = {}
        self._by_pool: dict[str, dict[str, AttachedWorker]] = {}  # those that take batches, by id
        self._counters: dict[str, Counter] = {}
        self._orphans: dict[str, list[InFlightBatch]] = {}  # batches of lost connections, by worker
        self._silent: set[str] = set()  # workers that Redis did not know at the last check
        self._tasks: set[asyncio.Task[None]] = set()

    # Batches to workers out.

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

    # Messages of workers in.

    def message(self, link: socket.socket, data: bytes) -> None:
        """Handle a message of a worker. Raises ValueError."""
        message = read_control(data)
        if isinstance(message, Attach):
            self._attach(link, message)
        elif (worker := self._by_link.get(link)) is None:
            raise ValueError("a message of a worker that is not attached")
        elif isinstance(message, Detach):
            self._detach(worker, message)
        else:
            self._take_back(worker, message)

    def _attach(self, link: socket.socket, message: Attach) -> None:
        worker = self._by_link.get(link)
        if worker is None:
            worker = self._by_link[link] = AttachedWorker(link, message.pool, message.worker)
        elif (worker.pool, worker.worker) != (message.pool, message.worker):
            raise ValueError(f"worker {worker.worker} attaches as {message.worker}")
        worker.term, worker.attached, worker.heads = message.term, True, {}
        self._by_pool.setdefault(worker.pool, {})[worker.worker] = worker

    def _discard(self, worker: AttachedWorker) -> None:
        """Let a worker take no more batches."""
        worker.attached = False
        workers = self._by_pool.get(worker.pool, {})
        if workers.get(worker.worker) is worker:
            del workers[worker.worker]

    def _detach(self, worker: AttachedWorker, message: Detach) -> None:
        if not worker.attached:
            return
        self._discard(worker)
        taken = set(message.taken)
        for batch in [one for one in worker.outstanding.values() if one.name not in taken]:
            self._put_again(batch, untouched=not message.writing)

    def _take_back(self, worker: AttachedWorker, message: Return) -> None:
        batch = worker.outstanding.get(message.name)
        if batch is not None:
            batch.lane.direct_from = self._clock() + message.pause_s
            self._put_again(batch)

    def closed(self, link: socket.socket) -> None:
        """Recover the batches of a worker whose connection ended: it died, or it gave the connection up."""
        worker = self._by_link.pop(link, None)
        if worker is None:
            return
        self._discard(worker)
        batches = [*worker.outstanding.values()]
        for batch in batches:
            batch.direct = None
        worker.outstanding.clear()
        if batches:
            self._orphans.setdefault(worker.worker, []).extend(batches)
            task = asyncio.get_running_loop().create_task(self._settle(worker.pool, worker.worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # Workers that are gone.

    async def _settle(self, pool: str, worker: str) -> None:
        """Recover a worker's batches without a notice of its death: one that sent a heartbeat since has not died."""
        await asyncio.sleep(NOTICE_S)
        if worker in self._orphans:
            alive = await self._is_alive(pool, (worker,), NOTICE_S)
            self._recover(pool, worker, () if worker in alive else None)

    def died(self, death: Death) -> None:
        """Recover the batches of a worker whose death was announced. Those that it was running are suspect."""
        for one in [one for one in self._by_link.values() if one.worker == death.worker and one.outstanding]:
            self._end(one)
        self._recover(pool_of(death.worker), death.worker, death.batches)

    def _recover(self, pool: str, worker: str, ran: Collection[str] | None) -> None:
        """Recover the batches of a lost connection. `ran`: those that the worker died with; None: it may be any."""
        batches = [batch for batch in self._orphans.pop(worker, ()) if self._lanes.pending.get(batch.name) is batch]
        suspects = [batch for batch in batches if ran is None or batch.name in ran]
        if batches:
            log.warning(
                "pool %s: worker %s is gone; %d batches put again, %d to be tried alone",
                pool,
                worker,
                len(batches) - len(suspects),
                len(suspects),
            )
            self._registry.counter(catalogue.BATCHES_RECLAIMED, pool).add(len(batches))
        for batch in batches:
            recovery = self._lanes.of(batch.lane).recovery
            if batch in suspects:
                recovery.give_up(batch)
            else:
                recovery.put_again(batch)

    async def check(self, pool: str, lease_s: float) -> None:
        """Take back the batches of workers that Redis has not known for two checks: they are frozen."""
        before = self._clock() - lease_s
        late = [
            worker
            for worker in self._by_link.values()
            if worker.pool == pool and any(batch.put_at < before for batch in worker.outstanding.values())
        ]
        if not late:
            return
        alive = await self._is_alive(pool, [worker.worker for worker in late], math.inf)
        for worker in late:
            if worker.worker in alive:
                self._silent.discard(worker.worker)
            elif worker.worker not in self._silent:
                self._silent.add(worker.worker)
            else:
                self._silent.discard(worker.worker)
                self._lose(worker)

    def _lose(self, worker: AttachedWorker) -> None:
        log.warning("worker %s does not answer: its %d batches are put again", worker.worker, len(worker.outstanding))
        batches = [*worker.outstanding.values()]
        for batch in batches:
            batch.direct = None
        worker.outstanding.clear()
        self._end(worker)
        self._registry.counter(catalogue.BATCHES_RECLAIMED, worker.pool).add(len(batches))
        for batch in batches:
            self._lanes.of(batch.lane).recovery.put_again(batch, attempt=batch.attempt + 1)

    def _end(self, worker: AttachedWorker) -> None:
        """End a connection: what the worker sent and is not read yet is lost. The listener closes its socket."""
        self.closed(worker.link)
        with suppress(OSError):
            worker.link.shutdown(socket.SHUT_RDWR)
            while worker.link.recv(1):
                pass

    def _put_again(self, batch: InFlightBatch, *, untouched: bool = True) -> None:
        """Put a batch into the queue that its worker has returned, or will not read, or, not `untouched`, answer."""
        if batch.direct is not None:
            batch.direct.outstanding.pop(batch.name, None)
            batch.direct = None
        self._lanes.of(batch.lane).recovery.put_again(batch, untouched=untouched)

    async def stop(self) -> None:
        """Stop waiting for notices."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
