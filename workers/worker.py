"""Lease -> merge -> run -> split -> reply, acknowledge and lease again, in one round trip.

A busy worker asks for its next batch before it runs the current one, and reads the answer after the run. An idle worker
blocks on its inbox. The batch that wakes it was the only one, so the worker does not ask for another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.services.process.waits import Backoff
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.reply_links import RECEIPT_S_MAX
from millstream.services.wire.batch import AGAIN, ENDLESS
from millstream.workers.backends.base import InstanceEnded, Terminated
from millstream.workers.batches.consumer import ATTACHED, Consumer, Finished
from millstream.workers.batches.direct_work import AGAIN_S
from millstream.workers.batches.lease import Lease, RunCost
from millstream.workers.batches.live_check import IDLE_WAIT_S, LiveCheck
from millstream.workers.batches.reply_sender import ReplySender
from millstream.workers.batches.runner import OnRun, OutOfMemoryPolicy, RunResult, merge, run
from millstream.workers.batches.watchdog import Guarded, LoopState, RunTime
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from millstream.workers.models.usage_log import SIZES_MAX

log = logging.getLogger("millstream.worker")

ENTRIES_WANTED = 4  # entries that one request for work may return; those that fit are merged
INBOX_WAIT_S = 0.5  # an idle worker checks at this interval whether it should stop
#: The next lease is taken before a run only if the run is expected to be shorter than this. During the run no other
#: worker can take that batch, and no more urgent batch can overtake it.
AHEAD_RUN_S_MAX = 0.1
SHARED_AHEAD_RUN_S_MAX = 0.001  # the same limit while several lanes are active
SHARED_S = 1.0  # how long after a change of lanes several lanes count as active
#: An idle worker waits this long for receipts of other hosts: it acknowledges with the call that waits for work.
RECEIPT_WAIT_S = 0.001
UNSETTLED_WAIT_S = 0.05  # longest wait for work while a receipt is missing
REDIS_LOOK_S = 0.001  # between two looks for an answer of Redis while batches come directly
LOST_LOOK_S, LOST_WAIT_S_MAX = 0.002, 0.1  # for the lane of an instance that was lost to be released
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0
_NO_SIGNATURE = Signature(inputs=(), outputs=(), batching=False)
#: codes of failures of runs that the record of an instance lists: what the model did, not who called it
_NOTED = frozenset({Code.MODEL, Code.MEMORY, Code.INTERNAL, ENDLESS})


class Worker:
    """The main loop of a worker process.

    Args:
        connect: opens a consumer; it is called again after a lost connection.
    """

    def __init__(
        self,
        connect: Callable[[], Consumer],
        models: LoadedModels,
        replies: ReplySender,
        metrics: WorkerMetrics,
        clock: RedisClock,
        live_check: LiveCheck,
        state: LoopState,
    ) -> None:
        self._connect = connect
        self._models = models
        self._segments = replies.writer.segments
        self._replies = replies
        self._direct = replies.direct
        self._metrics = metrics
        self._clock = clock
        self._live_check = live_check
        self.streams = replies.streams
        self._memory = OutOfMemoryPolicy(models, metrics)
        self.state = state
        self._stopping = threading.Event()
        self._leased: list[Lease] = []  # not run yet
        self._done: list[Finished] = []  # not sent yet
        self._to_count: list[tuple[Guarded, float, int, bool]] = []  # run, seconds, rows, whether it was one run
        self._run_time = RunTime()
        self._refused: dict[str, float] = {}  # lanes whose batches are refused after a run was ended, until (monotonic)
        self._ending = threading.Lock()  # held where a run ends, and while what waits behind it is returned
        self._client_id = 0  # of the last connection
        self._lane = ""  # of the last run
        self._lane_changed = float("-inf")  # when a run last had another lane than the run before (monotonic)

    def stop(self) -> None:
        """Run and answer what is leased, and lease no more; `serve` then returns."""
        self._stopping.set()

    def serve(self) -> None:
        """Serve until `stop`, through lost connections to Redis."""
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, alive_s_reset=BACKOFF_S_MAX)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                with contextlib.closing(self._connect()) as consumer:
                    if self._client_id:
                        log.info("connected to Redis again")
                        consumer.kill_connection(self._client_id)
                    self._client_id = consumer.client_id
                    # Entries that were leased to this worker, but were lost with its last connection.
                    unsent = [finished.lease for finished in (*self._done, *self._replies.unsettled())]
                    known = [*self._leased, *unsent, *self.streams.leases()]
                    self._leased += consumer.recover(known)
                    self._loop(consumer)
                    self._drain(consumer)
            except Failure as failure:
                self._direct.detach(self._leased)
                log.warning("%s; connecting again", failure.message)
                # Also after a connection succeeded: Redis may be out of memory, still loading, …
                self._stopping.wait(backoff.after_death(time.monotonic() - began))

    def _loop(self, consumer: Consumer) -> None:
        leased = self._leased
        ahead = False  # whether to ask for the next batch before a run
        while not self._stopping.is_set():
            if not leased:
                leases, ahead = self._wait(consumer)
                self._done = []
                if ahead:  # batches waited in Redis, which shares the workers between gateways and lanes
                    self._direct.detach((), pause_s=AGAIN_S)
                if not leases:
                    self._segments.forget_removed()
                    if self._live_check.sample is not None:
                        self._live_check.step()
                    continue
                leased += leases
            if self._live_check.sample is not None and self._live_check.overdue():
                self._reply_before_run(consumer)
                self._live_check.step()
            group = self._next_group()
            if group[0].isolated:
                self._run_isolated(consumer, group)
            elif ahead and self._is_short(group):
                self._run_ahead(consumer, group)
            else:
                self._run_long(consumer, group)

    def _wait(self, consumer: Consumer) -> tuple[list[Lease], bool]:
        """Wait for batches in Redis, and run those that come directly meanwhile. Returns as `receive_wait` does."""
        direct = self._direct
        attached = consumer.pollable and direct.attach()
        self.state.waiting = True
        self._done += self._replies.settled(RECEIPT_WAIT_S)
        wait_s = UNSETTLED_WAIT_S if self._replies.waiting else INBOX_WAIT_S
        if self._live_check.sample is not None:
            wait_s = IDLE_WAIT_S
        # Workers with fewer batches are served first, and each stream is one.
        leased = ATTACHED if attached else min(len(self.streams), ATTACHED - 1)
        consumer.send_wait(self._done, ENTRIES_WANTED, wait_s, leased, self._run_time.take())
        self._count()
        if attached:
            found = self._serve_direct(consumer)
            if found is not None:
                self.state.waiting = False
                return found
        answer = consumer.receive_wait()
        self.state.waiting = False
        return answer

    def _serve_direct(self, consumer: Consumer) -> tuple[list[Lease], bool] | None:
        """Run what comes directly until Redis answers; None: the worker stops, or is no longer attached."""
        direct, redis_fd = self._direct, consumer.fileno()
        poller = direct.poller(redis_fd)
        looked_at = time.monotonic()
        while direct.attached and not self._stopping.is_set():
            leases, answered = direct.wait(poller, redis_fd)
            if leases:
                self.state.waiting = False
                self._run_direct(leases)
                self.state.waiting = True
            now = time.monotonic()
            if answered or now > looked_at + REDIS_LOOK_S:
                looked_at = now
                found = consumer.try_receive_wait()
                if found is not None:
                    return found
        return None

    def _run_direct(self, leases: list[Lease]) -> None:
        """Run batches that came directly; their replies are sent at once."""
        self._leased += leases
        while self._leased:
            self._execute(self._next_group())
            self._count()
            if self._live_check.sample is not None and self._live_check.overdue():
                self._live_check.step()

    def detach_behind(self, guarded: Guarded) -> None:
        """Let the gateway put the batches into the queue that wait behind a long run. Called in another thread."""
        with self._ending:  # else the main loop might go on to one of them meanwhile
            if not guarded.over:
                guarded.detached = True
                self._direct.detach(guarded.group)

    def detach_all(self) -> None:
        """Let the gateway put all batches into the queue, those that run, too. Called in another thread."""
        self._direct.detach((), writing=True)

    def _is_short(self, group: list[Lease]) -> bool:
        """Return whether the run is expected to be short enough for leasing the next batch before it."""
        lane, now = group[0].lane, time.monotonic()
        if lane != self._lane and not group[0].header.probe:
            self._lane, self._lane_changed = lane, now
        model = self._models.get(lane)
        run_s = model.run_s(sum([lease.rows for lease in group])) if model is not None else 0.0
        return run_s < (SHARED_AHEAD_RUN_S_MAX if now < self._lane_changed + SHARED_S else AHEAD_RUN_S_MAX)

    def _run_isolated(self, consumer: Consumer, group: list[Lease]) -> None:
        """Run a batch that a worker died with; all other replies are sent first, so that a crash loses none."""
        try:
            self._reply(consumer)
            consumer.run_alone(group[0])
        except Failure:
            self._leased += group
            raise
        self._done = self._execute(group)
        consumer.ran_alone()

    def _run_ahead(self, consumer: Consumer, group: list[Lease]) -> None:
        """Send the replies of the last batch and ask for the next lease before this batch runs."""
        self._done += self._replies.settled()
        self._run_beside_redis(consumer, group, 1, ENTRIES_WANTED)

    def _run_long(self, consumer: Consumer, group: list[Lease]) -> None:
        """Send the finished replies before a batch runs that may be long, and ask for the next lease after it."""
        self._done += self._replies.settled()
        if self._done:
            self._run_beside_redis(consumer, group, 0, 0)
        else:
            self._done = self._execute(group)
        if self._leased:
            self._reply_before_run(consumer)

    def _run_beside_redis(self, consumer: Consumer, group: list[Lease], leased: int, wanted: int) -> None:
        """Send the finished replies, and run a batch while Redis works; `leased` and `wanted` as in `send_next`."""
        sent = self._done
        try:
            consumer.send_next(sent, leased, wanted, self._run_time.take())
        finally:
            # Also without Redis: leased batches run, and their replies are kept until there is a connection.
            self._count()
            finished = self._execute(group)
            self._done = sent + finished
        self._leased += consumer.receive_next()
        self._done = finished

    def _reply_before_run(self, consumer: Consumer) -> None:
        """Send the finished replies, if there are any: they do not wait for a run."""
        self._done += self._replies.settled()
        if self._done:
            self._reply(consumer)

    def _reply(self, consumer: Consumer) -> None:
        """Send the finished replies and lease nothing."""
        self._done += self._replies.settled()
        consumer.send_next(self._done, 0, 0, self._run_time.take())
        consumer.receive_next()
        self._done = []

    def _count(self) -> None:
        """Count the last runs. Called after the replies were sent, while Redis works."""
        for guarded, seconds, rows, whole in self._to_count:
            model = guarded.model
            self._metrics.ran(model, seconds, rows)
            model.calls.busy_s += seconds
            model.calls.batches[min((rows - 1).bit_length() if rows else 0, SIZES_MAX)] += 1
            if whole and not guarded.group[0].header.probe:
                model.calls.history.add(guarded.input_bytes, seconds)
            if whole and model.exploration is not None:
                rows_now = model.exploration.ran(rows, seconds, model.rows_fitting)
                if rows_now is not None and rows_now != model.rows_efficient:
                    self._models.learn(model.manifest.content_id, model.exploration, rows_now)
            model.calls.runs += 1  # last: a record is made again for runs that it does not know
        self._to_count.clear()
        self._replies.count(self._metrics)

    def _next_group(self) -> list[Lease]:
        """Remove from the leased batches, and return, those that run together next."""
        model = self._models.get(self._leased[0].lane)
        if model is None or model.manifest.config.rows_preferred:  # the gateway already made batches of these sizes
            return merge(self._leased, 1)
        return merge(self._leased, model.rows_merged_max)

    def _execute(self, group: list[Lease]) -> list[Finished]:
        model = self._models.get(group[0].lane)
        if model is None:
            return _left([self._refuse(lease, "the version is no longer loaded in this worker") for lease in group])
        if self._refused and (why := self._why_refuse(group[0])):
            return _left([self._refuse(lease, why) for lease in group])
        if model.lost:
            return self._hand_back(group, model.lost)
        if group[0].header.window and model.manifest.streams:
            return self.streams.open(group, model)
        return self._run(group, model)

    def _run(self, group: list[Lease], model: LoadedModel) -> list[Finished]:
        shared = len(group) > 1 or len(group[0].header.rows) > 1
        sampled = (shared or model.variant) and self._live_check.due(group[0].lane, model)
        on_run: OnRun | None = partial(self._live_check.keep, model) if sampled else None
        guarded = self.state.arm(group, model)
        if self.state.forwards:
            _limit_run(group, model, self._clock.now_ms())
        if not group[0].header.probe:
            self.state.runs += 1
            model.calls.add(guarded.began)
        try:
            runs = run(group, model, self._segments, self._clock, self._memory, guarded, on_run)
        except Terminated as terminated:
            return self._answer_terminated(guarded, terminated)
        finally:
            with self._ending:
                guarded.over = True
            if guarded.gave_back or guarded.detached:
                self._forget_leased(direct_only=not guarded.gave_back)  # others run them
            self.state.disarm()
        if runs[0].execution_s:
            rows = runs[0].cost.rows
            # A run that was halved, or bisected after a failure, does not tell how long one run of all rows takes.
            whole = any(result.cost.runs == [rows] for result in runs)
            self._to_count.append((guarded, runs[0].execution_s, rows, whole))
        signature = model.manifest.signature
        finished = _left([self._finish(result, signature) for result in runs])
        if runs[0].execution_s:
            self._run_time.add(guarded, runs[0].execution_s)
        return finished

    def _forget_leased(self, *, direct_only: bool) -> None:
        for lease in self._leased:
            if lease.gate is not None:
                lease.gate.leave()
        self._leased[:] = [lease for lease in self._leased if direct_only and lease.link is None]

    def _answer_terminated(self, guarded: Guarded, terminated: Terminated | None = None) -> list[Finished]:
        """Return the replies for a terminated run: several requests are to be tried alone, a single one fails."""
        if isinstance(terminated, InstanceEnded):
            guarded.instance_ended(terminated.message, self._clock.now_ms())
        group = guarded.group
        model = self._models.get(group[0].lane)
        if model is not None:
            self._metrics.terminated(model)
        seconds = time.monotonic() - guarded.began
        log.warning("a run of %s was terminated after %.3g s", group[0].lane, seconds)
        self._run_time.add(guarded, seconds)
        if guarded.lost_s > 0:
            self._refused[group[0].lane] = time.monotonic() + guarded.lost_s
        if guarded.error is None or not (guarded.alone or guarded.error[0] == AGAIN):
            return _left([self._replies.give_up(lease) for lease in group])
        code, message = guarded.error
        for lease in group:
            for position in list(lease.live_requests):
                endless = guarded.suspicious and code not in {Code.CANCELLED, AGAIN}
                lease.fail(position, ENDLESS if endless else code, message)
        cost = RunCost(self._clock.now_ms() - seconds * 1000, 0.0, seconds, 0.0, 0, [])
        return _left([self._fail(lease, cost) for lease in group])

    def final_replies(self, guarded: Guarded) -> list[Finished]:
        """Return all unsent replies, before the process ends because a run cannot be terminated.

        Called from another thread: the main loop is inside that run.
        """
        return [*self._done, *self._replies.unsettled(), *self._answer_terminated(guarded)]

    def unsettled(self, older_s: float = 0.0) -> list[Finished]:
        """Return the replies that are on their way to another host, as ReplySender does. Called in another thread."""
        return self._replies.unsettled(older_s)

    def _why_refuse(self, lease: Lease) -> str:
        """Return why a batch is refused, "" if it is not: a run of its version was ended that took time from others.

        For as long as it took. The circuit breaker refuses the version, too, once its gateways have heard of it.
        """
        left_s = self._refused.get(lease.lane, 0.0) - time.monotonic()
        if left_s <= 0:
            self._refused.pop(lease.lane, None)
            return ""
        return (
            ""
            if lease.header.probe
            else (f"a run of the version had to be ended, for which others waited: it is refused for {left_s:.1f} s")
        )

    def _hand_back(self, group: Sequence[Lease], why: str) -> list[Finished]:
        """Have the requests put again that came for a lost instance, once the worker holds its lane no longer."""
        self._models.lost.set()
        until = time.monotonic() + LOST_WAIT_S_MAX
        while self._models.get(group[0].lane) is not None and time.monotonic() < until:
            time.sleep(LOST_LOOK_S)
        return _left([self._refuse(lease, why, AGAIN) for lease in group])

    def _refuse(self, lease: Lease, why: str, code: str = Code.UNAVAILABLE) -> Finished | None:
        for position in list(lease.live_requests):
            lease.fail(position, code, why)
        cost = RunCost(self._clock.now_ms(), 0.0, 0.0, 0.0, 0, [])
        return self._fail(lease, cost)

    def _fail(self, lease: Lease, cost: RunCost) -> Finished | None:
        return self._finish(RunResult(lease, None, 0.0, cost), _NO_SIGNATURE, at_once=False)

    def _finish(self, result: RunResult, signature: Signature, *, at_once: bool = True) -> Finished | None:
        for code, message in result.lease.failures.values():
            if code in _NOTED:
                self._models.errors.add(result.lease.lane, message)
        return self._replies.finish(result, signature, at_once=at_once)

    def _drain(self, consumer: Consumer) -> None:
        """Leave the set of idle workers, so that no further entry is delivered; then run what is leased."""
        self._direct.detach(self._leased)
        self._reply(consumer)
        self._leased += consumer.take_inbox()
        while self._leased:
            consumer.send_next(self._execute(self._next_group()), 0, 0)
            consumer.receive_next()
        self.streams.settle()
        self._done += self._replies.settled(RECEIPT_S_MAX)
        self._replies.give_up_links()
        self._reply(consumer)
        self._count()


def _left(finished: Sequence[Finished | None]) -> list[Finished]:
    """Return what is left for Redis."""
    return [one for one in finished if one is not None]


def _limit_run(group: Sequence[Lease], model: LoadedModel, now_ms: float) -> None:
    """Tell an instance that forwards its runs when the last caller of the next one stops waiting."""
    forwarding: Any = model.instance
    if forwarding is not None:
        probe = group[0].header.probe  # it has no caller who stops waiting
        latest_ms = max(max(lease.header.deadlines_ms) for lease in group)
        forwarding.limit(float("inf") if probe else (latest_ms - now_ms) / 1000)
