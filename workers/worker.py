"""worker: lease -> merge -> run -> split -> reply, acknowledge and lease again, in one round trip.

A busy worker asks for its next batch before it runs the one in hand, and reads the answer afterwards. An idle worker
blocks on its inbox; the batch that wakes it was alone, so nothing is asked for beside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from millstream.services.crashes.run_marks import RunMark
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.services.process.backoff import Backoff
from millstream.services.queue.clock import RedisClock
from millstream.services.segments.segment import Segments
from millstream.services.wire.batch import encode_given_up
from millstream.workers.backends.base import Terminated
from millstream.workers.consumer import Consumer, Finished
from millstream.workers.lease import Lease, ReplyWriter, RunCost
from millstream.workers.live_check import LiveCheck
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.out_of_memory import OutOfMemoryPolicy
from millstream.workers.runner import RunResult, merge, run
from millstream.workers.watchdog import Guarded, Watchdog

log = logging.getLogger("millstream.worker")

ENTRIES_WANTED = 4  # entries that one request for work may bring: merged as far as they fit
INBOX_WAIT_S = 0.5  # how often an idle worker looks whether it should stop
#: The next lease is taken before a run only if the run is over soon: until then no other worker can have that batch, and
#: nothing more urgent can come before it. While several lanes are served, also a run of more than LONG_RUN_S is too long.
AHEAD_RUN_S_MAX = 0.1
LONG_RUN_S = 0.001
SHARED_S = 1.0  # for so long after a run of another lane several are served
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0
_NO_SIGNATURE = Signature(inputs=(), outputs=(), batching=False)


class Worker:
    """The main loop. `connect` opens the exchange; it is called again when the connection was lost."""

    def __init__(
        self,
        connect: Callable[[], Consumer],
        held: LoadedModels,
        segments: Segments,
        replies: ReplyWriter,
        tallies: WorkerMetrics,
        clock: RedisClock,
        live: LiveCheck,
        watchdog: Watchdog,
        mark: RunMark | None = None,
    ) -> None:
        """`mark`: where it is noted what runs, for whoever comes after this process; None: nobody could."""
        self._connect = connect
        self._held = held
        self._segments = segments
        self._replies = replies
        self._tallies = tallies
        self._clock = clock
        self._live = live
        self._memory = OutOfMemoryPolicy(held, tallies)
        self._watchdog = watchdog
        self._mark = mark
        self._stopping = threading.Event()
        self.waiting = False  # for work
        self.runs = 0  # but for those of canaries
        self._in_hand: list[Lease] = []
        self._done: list[Finished] = []
        self._ran: list[tuple[LoadedModel, float, int, bool]] = []
        self._client_id = 0  # of the last connection
        self._lane = ""  # that ran last
        self._changed = float("-inf")  # when it was another one before

    def stop(self) -> None:
        """Finish what is in hand, reply, take no more; `serve` then returns."""
        self._stopping.set()

    def serve(self) -> None:
        """Run until `stop`. Redis may come and go meanwhile."""
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, alive_s_reset=BACKOFF_S_MAX)
        while not self._stopping.is_set():
            try:
                consumer = self._connect()
            except Failure as failure:
                log.warning("%s; trying again", failure.message)
                self._stopping.wait(backoff.after_death())
                continue
            began = time.monotonic()
            try:
                if self._client_id:
                    consumer.end(self._client_id)
                self._client_id = consumer.client_id
                # What was leased to this worker when its last connection went, but never reached it.
                known = [*self._in_hand, *(finished.lease for finished in self._done)]
                self._in_hand += consumer.recover(known)
                self._loop(consumer)
                self._drain(consumer)
            except Failure as failure:
                log.warning("%s; connecting again", failure.message)
                # Also after it was connected: Redis may be out of memory, still loading, …
                self._stopping.wait(backoff.after_death(time.monotonic() - began))
            finally:
                consumer.close()

    def _loop(self, consumer: Consumer) -> None:
        in_hand = self._in_hand
        ahead = False  # whether the next batch was asked for during the last run
        while not self._stopping.is_set():
            if not in_hand:
                self.waiting = True
                consumer.send_wait(self._done, ENTRIES_WANTED, self._live.wait_s(INBOX_WAIT_S))
                self._count()
                leases, ahead = consumer.receive_wait()
                self.waiting = False
                self._done = []
                if not leases:
                    self._segments.forget_removed()
                    self._live.step()
                    continue
                in_hand += leases
            if self._live.overdue:
                self._live.step()
            group = self._take()
            if group[0].suspect:
                self._run_alone(consumer, group)
            elif ahead and self._over_soon(group):
                self._run_ahead(consumer, group)
            else:
                self._done += self._execute(group)
                if in_hand:  # nobody waits for a run that is not his
                    self._reply(consumer)

    def _over_soon(self, group: list[Lease]) -> bool:
        lane, now = group[0].lane, time.monotonic()
        if lane != self._lane and not group[0].header.canary:
            self._lane, self._changed = lane, now
        holding = self._held.get(lane)
        run_s = holding.run_s(sum([lease.rows for lease in group])) if holding is not None else 0.0
        return run_s < (LONG_RUN_S if now < self._changed + SHARED_S else AHEAD_RUN_S_MAX)

    def _run_alone(self, consumer: Consumer, group: list[Lease]) -> None:
        """A batch that a worker died with: all else is done before it runs, so that nothing else dies with this one."""
        try:
            self._reply(consumer)
            consumer.run_alone(group[0])
        except Failure:
            self._in_hand += group
            raise
        self._done = self._execute(group)
        consumer.ran_alone()

    def _run_ahead(self, consumer: Consumer, group: list[Lease]) -> None:
        """The replies of the last batch leave, and the next lease is asked for, before this one runs."""
        on_their_way = self._done
        try:
            consumer.send_next(on_their_way, 1, ENTRIES_WANTED)
        finally:
            # Also when Redis is gone: what is leased is run and its reply kept until a connection takes it.
            self._count()
            finished = self._execute(group)
            self._done = on_their_way + finished
        self._in_hand += consumer.receive_next()
        self._done = finished

    def _reply(self, consumer: Consumer) -> None:
        """Send what is done and ask for nothing."""
        consumer.send_next(self._done, 0, 0)
        consumer.receive_next()
        self._done = []

    def _count(self) -> None:
        """Count what ran: after the replies are on their way, while Redis works."""
        for holding, seconds, rows, whole in self._ran:
            self._tallies.ran(holding, seconds, rows)
            if whole and holding.exploration is not None:
                rows_now = holding.exploration.ran(rows, seconds, holding.rows_fitting)
                if rows_now is not None and rows_now != holding.rows_efficient:
                    self._held.learn(holding.manifest.content_id, holding.exploration, rows_now)
        self._ran.clear()
        self._tallies.sent(self._replies)

    def _take(self) -> list[Lease]:
        holding = self._held.get(self._in_hand[0].lane)
        if holding is None or holding.manifest.config.rows_preferred:  # the gateway has cut them to size
            return merge(self._in_hand, 1)
        return merge(self._in_hand, holding.rows_merged_max)

    def _execute(self, group: list[Lease]) -> list[Finished]:
        holding = self._held.get(group[0].lane)
        if holding is None:
            return [self._refuse(lease) for lease in group]
        if not group[0].header.canary:
            self.runs += 1
        lane, memory = group[0].lane, self._memory
        shared = len(group) > 1 or len(group[0].header.rows) > 1
        keep = partial(self._live.keep, holding) if shared and self._live.due(lane, holding) else None
        if self._mark is not None:
            self._mark.begin(group[0].lane, [lease.header.name for lease in group])
        guarded = self._watchdog.arm(group, holding)
        try:
            runs = run(
                group,
                holding,
                self._segments,
                self._clock,
                partial(memory.failed, lane),
                partial(memory.halves_ran, lane),
                guarded,
                keep,
            )
        except Terminated:
            return self._overdue(guarded)
        finally:
            if guarded.gave_back:
                self._in_hand.clear()  # others run it
            self._watchdog.disarm()
            if self._mark is not None:
                self._mark.end()
        if runs[0].execution_s:
            rows = runs[0].cost.rows
            # What was halved, or failed for some, took other runs than one of all rows.
            whole = any(result.cost.runs == [rows] for result in runs)
            self._ran.append((holding, runs[0].execution_s, rows, whole))
        signature = holding.manifest.signature
        return [self._finish(result, signature) for result in runs]

    def _overdue(self, guarded: Guarded) -> list[Finished]:
        """What becomes of a run whose time was over. Several requests are tried alone, one gets an error."""
        group = guarded.group
        holding = self._held.get(group[0].lane)
        if holding is not None:
            self._tallies.terminated(holding)
        log.warning("a run of %s was ended after %.3g s", group[0].lane, time.monotonic() - guarded.began)
        if not guarded.alone:
            return [Finished(lease, encode_given_up(lease.header.name), b"") for lease in group]
        code, message = guarded.error()
        for lease in group:
            for position in list(lease.alive):
                lease.fail(position, code, message)
        cost = RunCost(self._clock.now_ms(), 0.0, 0.0, 0.0, 0, [])
        return [self._finish(RunResult(lease, None, 0.0, cost), _NO_SIGNATURE) for lease in group]

    def abandoned(self, guarded: Guarded) -> list[Finished]:
        """The process is about to end in the middle of a run that cannot be ended: all that it has to say.

        For another thread: the main loop is inside that run.
        """
        return [*self._done, *self._overdue(guarded)]

    def _finish(self, result: RunResult, signature: Signature) -> Finished:
        reply, blob = self._replies.write(result.lease, signature, result.outputs, result.cost)
        return Finished(result.lease, reply, blob)

    def _refuse(self, lease: Lease) -> Finished:
        for position in list(lease.alive):
            lease.fail(position, Code.UNAVAILABLE, "the version is not loaded in this worker any more")
        cost = RunCost(self._clock.now_ms(), 0.0, 0.0, 0.0, 0, [])
        return self._finish(RunResult(lease, None, 0.0, cost), _NO_SIGNATURE)

    def _drain(self, consumer: Consumer) -> None:
        """Leave the idle ones first, so that no entry comes any more; then run what is here."""
        self._reply(consumer)
        self._in_hand += consumer.leftovers()
        while self._in_hand:
            consumer.send_next(self._execute(self._take()), 0, 0)
            consumer.receive_next()
