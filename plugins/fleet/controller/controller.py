"""One round after the other, while this process leads.

workers' records, repository ─> Survey.take ─> plan ─> InFlight.admits ─> orders:<worker>
                                                      InFlight.settle <─ the records of the next rounds

A round begins at each event (a worker came or died, a model changed), and at least every TICK_S. After it there is a
pause, of PAUSE_S while orders are carried out or a worker stops; else it is so long that rounds take ROUND_SHARE of a
core at most. Without Redis, or without the lead, nothing happens: gateways and workers go on as they are.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from millstream.plugins.fleet.controller.in_flight import Given, InFlight, Outcome, Settled
from millstream.plugins.fleet.controller.leadership import Leadership
from millstream.plugins.fleet.controller.metrics import ControllerMetrics
from millstream.plugins.fleet.controller.survey import Findings, Survey
from millstream.plugins.fleet.planned import Plan, PlannedOrder
from millstream.plugins.fleet.planner import plan
from millstream.services.errors import Code, Failure
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.logs import about
from millstream.services.process.waits import with_jitter
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.leader_lock import Delivery, LeaderLock
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.stored_models import StoredModels
from millstream.services.wire.orders import Order
from millstream.services.wire.records import WorkerRecord

log = logging.getLogger("millstream.controller")

TICK_S = 2.0  # longest time between two rounds
PAUSE_S = 0.2  # shortest
ROUND_SHARE = 0.01  # of a core that rounds take at most while there is nothing to do, as far as TICK_S allows
RETRY_S = 1.0  # before the events are read again after a lost connection
#: A file system that takes longer to answer is stuck: another controller leads until it answers.
READ_S_MAX = 60.0
#: A step of the Redis clock is at least this large; smaller ones change no decision, and drift takes hours for it.
STEP_S_MIN = 1.0
#: After a step, the time in which workers publish their instants anew: their record is read after two heartbeats.
SETTLE_S = 3.0


class Controller:
    """Gives orders while this process leads.

    Args:
        leadership: says whether it leads.
        lock: hands orders to workers.
        cluster_state: reads the records of workers, and events.
        repository: holds the models.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        leadership: Leadership,
        lock: LeaderLock,
        cluster_state: ClusterState,
        repository: FolderRepository,
        metrics: ControllerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leadership = leadership
        self._lock = lock
        self._cluster_state = cluster_state
        self._repository = repository
        self._metrics = metrics
        self._stored = StoredModels(repository)
        self._repository_token = ""
        self._survey = Survey(repository.footprints.of, repository.footprints.measured)
        self._in_flight = InFlight()
        self._plan = Plan()
        self._clock = clock
        self._clock_steps = ClockSteps()
        self._token = 0  # with which the pools were fenced and the orders in flight were given
        self._fenced: frozenset[str] = frozenset()  # pools
        self._wake = asyncio.Event()
        self._busy = False  # orders are being carried out, or a worker stops
        self._problem = ""  # that was logged
        self._tasks: list[asyncio.Task[None]] = []
        self._reading: asyncio.Future[Findings] | None = None  # of a thread that reads the repository

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(), name="rounds"),
            asyncio.create_task(self._listen(), name="events"),
        ]

    async def stop(self) -> None:
        """Give no further order. Orders that were given are carried out."""
        await cancel_all(self._tasks)

    def wake(self) -> None:
        """Begin a round now, or after the pause behind the last one."""
        self._wake.set()

    async def _run(self) -> None:
        pause_s = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(with_jitter(TICK_S - pause_s)):
                    await self._wake.wait()
            self._wake.clear()
            began_s = time.process_time()
            if token := self._leadership.token:
                await self._try_round(token)
            else:
                self._metrics.not_leading()
            pause_s = PAUSE_S
            if not self._busy:
                pause_s = min(TICK_S, max(PAUSE_S, (time.process_time() - began_s) / ROUND_SHARE))
            await asyncio.sleep(pause_s)

    async def _try_round(self, token: int) -> None:
        began = time.monotonic()
        try:
            await self.round(token)
            self._problem = ""
        except Failure as failure:
            if failure.message != self._problem:
                log.warning("%s; trying again", failure.message)
            self._problem = failure.message
        except Exception:
            log.exception("a round failed; trying again")
        self._metrics.round(time.monotonic() - began)

    async def round(self, token: int) -> None:
        """Read, decide, give the orders. Raises Failure."""
        workers = await self._cluster_state.workers()
        now = await self._cluster_state.now()  # after the records: none of them is of a later clock
        if not self._is_clock_settled(now) or not await self._lead(token, workers, now):
            return
        for settled in self._in_flight.settle(workers, now):
            self._settled(settled)
        found = await self._survey_now(workers, now)
        self._metrics.found(found)
        decided = plan(found.workers, found.versions, self._plan, now)
        given = [order for order in decided.orders if await self._give(order, found, token, now)]
        # What was not ordered because of a limit may be ordered in the next round.
        kept = {(order.worker, order.content_id) for order in given}
        left = {(order.worker, order.content_id) for order in decided.orders} - kept
        self._plan = decided.without(left)
        self._busy = bool(decided.orders) or len(self._in_flight) > 0 or any(one.draining for one in workers)
        self._metrics.in_flight(len(self._in_flight))

    def _is_clock_settled(self, now: float) -> bool:
        """Return whether instants of workers can be compared with `now`. After a step of the clock, begin anew."""
        monotonic = self._clock()
        if step_s := self._clock_steps.observe(now, monotonic):
            log.warning("the clock of Redis was set by %+.0f s: no orders for %g s", step_s, SETTLE_S)
            self._survey.clock_was_set(step_s)
            self._token = 0  # the plan and the orders in flight are of the clock before
        return self._clock_steps.is_settled(monotonic)

    async def _survey_now(self, workers: tuple[WorkerRecord, ...], now: float) -> Findings:
        """Read the repository, if it changed, and return what the planner takes. Raises Failure."""
        if self._reading is None or self._reading.done():
            self._reading = _in_daemon_thread(lambda: self._read(workers, now))
            self._reading.add_done_callback(lambda _: self._leadership.resume())
        done, _ = await asyncio.wait({self._reading}, timeout=READ_S_MAX)
        if not done:
            self._leadership.pause()
            raise Failure(Code.UNAVAILABLE, f"the repository does not answer within {READ_S_MAX:g} s")
        return self._reading.result()

    def _read(self, workers: tuple[WorkerRecord, ...], now: float) -> Findings:
        token = self._repository.token()
        if token != self._repository_token:
            self._stored.read()
            self._repository_token = token
        return self._survey.take(workers, self._stored.models, now)

    async def _lead(self, token: int, workers: tuple[WorkerRecord, ...], now: float) -> bool:
        """Keep earlier leaders from all pools, and learn which orders they gave; returns whether this one still leads.

        Orders that workers took but do not show yet are given again at worst: workers ignore them.
        """
        if token != self._token:
            self._token, self._fenced, self._plan = token, frozenset(), Plan()
            self._in_flight.clear()
        pools = frozenset(worker.pool for worker in workers)
        new = pools - self._fenced
        if not new:
            return True
        if not await self._lock.fence(sorted(new), token):
            self._leadership.refused()
            return False
        for worker in workers:
            if worker.pool in new:
                for order in await self._lock.waiting_orders(worker.pool, worker.id):
                    self._in_flight.add(Given(worker.id, order.content_id, order.do, now))
        self._fenced |= new
        return True

    async def _give(self, order: PlannedOrder, found: Findings, token: int, now: float) -> bool:
        """Give an order, if this process still leads and the limits allow it; returns whether it was given."""
        pool = found.pool_of(order.worker)
        if token != self._leadership.token or not self._in_flight.admits(order.worker, order.content_id):
            return False
        usage = self._survey.habits(order.content_id).usage.pack()
        delivery = await self._lock.order(
            pool,
            order.worker,
            Order(
                do=order.do,
                content_id=order.content_id,
                why=order.why,
                evict=order.evict,
                usage=usage if order.do == "load" else {},
                reason=order.reason.value,
                token=token,
            ),
        )
        if delivery is Delivery.NEWER_LEADER:
            self._leadership.refused()
        if delivery is not Delivery.GIVEN:
            return False
        self._in_flight.add(Given(order.worker, order.content_id, order.do, now))
        self._metrics.ordered(order.do, order.reason)
        log.info(
            "%s: %s %s: %s",
            order.worker,
            order.do,
            order.content_id,
            order.why,
            extra=about(
                order.content_id.partition(":")[0], worker=order.worker, order=order.do, reason=order.reason.value
            ),
        )
        return True

    def _settled(self, settled: Settled) -> None:
        order = settled.order
        self._metrics.settled(order.do, settled.outcome)
        if settled.outcome is not Outcome.DONE:
            log.warning(
                "%s: %s %s: %s%s",
                order.worker,
                order.do,
                order.content_id,
                settled.outcome.value,
                f": {settled.detail}" if settled.detail else "",
                extra=about(order.content_id.partition(":")[0], worker=order.worker, outcome=settled.outcome.value),
            )

    async def _listen(self) -> None:
        while True:
            with suppress(Failure):
                async for _ in self._cluster_state.messages():
                    self._wake.set()
            await asyncio.sleep(with_jitter(RETRY_S))


class ClockSteps:
    """Notices that the Redis clock was set, by the monotonic clock. Pure; all instants are in seconds."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None  # the Redis clock minus the monotonic clock
        self._settled_at = 0.0

    def observe(self, now: float, monotonic: float) -> float:
        """Return by how much the Redis clock was set since the last call; 0: it was not."""
        before, self._ahead_s = self._ahead_s, now - monotonic
        step_s = 0.0 if before is None else self._ahead_s - before
        if abs(step_s) < STEP_S_MIN:
            return 0.0
        self._settled_at = monotonic + SETTLE_S
        return step_s

    def is_settled(self, monotonic: float) -> bool:
        """Return whether all instants that workers publish are of the clock as it is now."""
        return monotonic >= self._settled_at


def _in_daemon_thread(work: Callable[[], Findings]) -> asyncio.Future[Findings]:
    """Run `work` in a thread that does not keep the process from ending: a file system may answer it never."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Findings] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            settle = partial(found.set_exception, error)
        else:
            settle = partial(found.set_result, result)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="survey", daemon=True).start()
    return found
