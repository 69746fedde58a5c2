"""residency: which versions this worker holds. Repository and orders in, loads and unloads out.

update (repository changed) ─> preloads ─> loader                     what it holds without any order
load (order: a call waits) ─> make room: unload what costs least ─> reserve memory ─> loader, before all preloads
                           └> refusal in the worker's record, end of the demand
The decisions are pure (millstream.services.placement); this module brings them the facts and does what they say.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum

from millstream.services.model.manifest import Manifest
from millstream.services.placement.eviction import make_room
from millstream.services.placement.headroom import headroom_of, unloaded_ahead
from millstream.services.placement.residency import FILL_SHARE, Candidate, preloads
from millstream.services.placement.room import OTHERS_BUSY_RETRY_S, Room
from millstream.services.placement.usage import Usage
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView
from millstream.services.queue.clock import RedisClock
from millstream.services.wire.orders import Order
from millstream.services.wire.records import State
from millstream.workers.batching_verdicts import BatchingVerdicts
from millstream.workers.consumer import Consumer
from millstream.workers.failed_loads import FAILED_OFTEN_RETRY_S, FAILURES_MAX
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.loader import LoadRequest
from millstream.workers.ordered_loads import OrderedLoads
from millstream.workers.refusals import Refusals
from millstream.workers.unloads import EvictionReason, Unloads
from millstream.workers.version_loads import VersionLoads
from millstream.workers.wanted import Wanted

log = logging.getLogger("millstream.residency")

UNKNOWN_S_MAX = 2.0  # for the reconciler to read a version that was ordered just after it was published
CLOSE_WAIT_S = 0.25  # for an order until what was unloaded for it is closed; then other orders come first
ROOM_TRIES = 32  # to make room while calls for the versions that are to be unloaded keep coming
TOO_LARGE_RETRY_S = 30.0
#: When the lane of an unloaded version is looked at: a gateway may have sent a batch before it knew.
RECHECKS_S = (1.0, 3.0)
RECALL_LIFE_MS = 60_000  # of the demand for a version that a batch waits for
_LOADS = frozenset({State.LOADING, State.WARMING})


class _Room(Enum):
    """What making room for a version came to, unless it is refused."""

    RESERVED = "reserved"
    LATER = "later"  # what was unloaded for it is still being closed, or work in the background is ending


class Residency:
    """The versions of one worker. Safe for several threads: one at a time decides.

    Args:
        member: id of the worker, its pool, and its number in the pool.
        clock: the Redis clock.
    """

    def __init__(
        self,
        worker: str,
        pool: str,
        number: int,
        models: LoadedModels,
        loads: VersionLoads,
        unloads: Unloads,
        clock: RedisClock,
    ) -> None:
        self._worker = worker
        self._pool = pool
        self._number = number
        self._models = models
        self._loads = loads
        self._unloads = unloads
        self._memory = loads.memory
        self._budget = loads.memory.budget
        self._kind = loads.kind
        self._clock = clock
        self.refusals = Refusals(self._now)
        self._batching = BatchingVerdicts(models)
        self._changed = threading.Condition(threading.RLock())  # locked while deciding
        self._wanted: dict[str, Wanted] = {}
        self._by_verdict: set[str] = set()  # content ids that are not loaded because of their verdict
        self._put_away: set[str] = set()  # unloaded, or not loaded, for want of memory or of calls: not preloaded
        self._needs: dict[str, Footprint] = {}  # what the versions take, as of the last load
        self._whole = True  # whether all versions fit together
        self._learnt = False  # whether a load ended since preloads were last chosen
        self._measured = False  # whether a load ended since it was last checked that the budget holds
        self._rechecks: deque[tuple[float, str]] = deque(maxlen=1000)
        self._retried: set[str] = set()  # content ids of loads that found no memory and are tried again
        self._retries: dict[str, Order] = {}  # for when these loads have ended
        self.again: deque[Order] = deque()  # orders that this worker gives itself
        self.ended: deque[str] = deque()  # content ids whose demands end without a lane
        self._after_preloads: dict[str, Order] = {}  # of staged versions, for when a preload has ended
        #: content id -> its order, and what was unloaded for it and is not closed yet
        self._waiting: dict[str, tuple[Order, Sequence[str]]] = {}
        self._unpaid = ""  # why nothing is unloaded although the budget is exceeded
        self._ordered = OrderedLoads()
        self._ahead: Sequence[str] = ()  # content ids that were unloaded last to keep memory free
        loads.follow(self._admit, self._on_end, self._on_out_of_memory)
        unloads.on_closed = self._on_closed

    def _now(self) -> float:
        return self._clock.now_ms() / 1000

    # What the worker holds without any order.

    def update(self, wanted: dict[str, Wanted]) -> None:
        """Load what is to be held, now that the repository has these versions for the pool."""
        with self._changed:
            removed = self._wanted.keys() - wanted.keys()
            self._wanted = wanted
            self._put_away &= wanted.keys()
            self._retried &= wanted.keys()
            for content_id in removed:
                self._needs.pop(content_id, None)
            self._choose()
            for content_id in removed:
                self._forget(content_id)
            self._changed.notify_all()

    def _forget(self, content_id: str) -> None:
        """Forget a version that was removed. What is loaded of it is unloaded elsewhere."""
        self.refusals.remove(content_id)
        self._after_preloads.pop(content_id, None)
        self._by_verdict.discard(content_id)
        self._batching.forget(content_id)
        self._loads.failed.forget(content_id)
        model = self._models.get(content_id)
        if model is not None and model.state is State.LOADING and not self._loads.in_progress(content_id):
            self._return_memory(content_id)  # it was demanded, and its load had not begun
            self.ended.append(content_id)

    def reconsider(self) -> None:
        """Choose preloads again after loads have ended, when their memory is known."""
        if self._learnt and not self._loads.pending:
            with self._changed:
                self._choose()

    def _choose(self) -> None:
        if self._learnt:
            self._learnt = False
            self._needs.clear()  # predictions have changed
        active, models = self._loads.active(), self._models.all()
        fitting: list[Wanted] = []
        candidates: list[Candidate] = []
        too_large: list[str] = []
        for content_id, one in self._wanted.items():
            model = models.get(content_id)
            if not self._may_load(one, model):
                continue
            need = self._needs.get(content_id)
            if need is None:
                need = self._needs[content_id] = self._need(one.manifest)
            if not self._budget.too_large(need):
                fitting.append(one)
                candidates.append(self._candidate(one, need))
            elif not _is_held(model, content_id in active):
                too_large.append(content_id)
        chosen = preloads(self._view(active), candidates, self._budget.base_bytes, self._budget.device_base_bytes)
        self._whole = chosen.whole
        queued = [*chosen.content_ids, *too_large]
        self._list(queued if chosen.whole else too_large)
        ordered = {order.content_id for order in list(self.again)} | self._after_preloads.keys()
        if not chosen.whole:
            self._unlist(active, [*too_large, *ordered, *self._retries])
        for one in fitting:
            held = _is_held(models.get(one.content_id), one.content_id in active)
            queued_now = chosen.whole and one.content_id in queued
            known = held or queued_now or one.content_id in ordered or self.refusals.of(one.content_id)
            if one.staged and not known:
                order = Order(do="load", content_id=one.content_id, why="its load is staged", evict=True)
                self.again.append(order)
        kept = {one.content_id for one in fitting if one.content_id in active}
        self._loads.want([self._request(self._wanted[content_id]) for content_id in queued], kept)

    def _may_load(self, one: Wanted, model: LoadedModel | None) -> bool:
        """Return whether a version is held or may be loaded; publish it as failed if its verdict says so."""
        content_id = one.content_id
        self._batching.apply(content_id, one.verdict)
        retry = self._loads.failed.take_due(content_id)
        failed = one.verdict.on(self._kind).failed
        if failed:
            if model is None or model.state in {*_LOADS, State.FAILED}:
                self._by_verdict.add(content_id)
                self._models.set(LoadedModel(one.manifest, State.FAILED, failed))
                return False
            return True
        if model is not None and model.state is State.FAILED:
            if content_id in self._by_verdict:
                self._loads.failed.forget(content_id)
            elif not retry:
                return False
            self._models.remove(content_id)
        self._by_verdict.discard(content_id)
        return True

    def _candidate(self, one: Wanted, need: Footprint) -> Candidate:
        waits = one.content_id in self._put_away or bool(one.instances_max and self._number >= one.instances_max)
        return Candidate(one.content_id, need, one.placement.pin, waits)

    def _request(self, one: Wanted) -> LoadRequest:
        why = "it fits with all others" if self._whole else "memory is free"
        return LoadRequest(one.manifest, suspect=one.verdict.on(self._kind).deaths > 0, staged=one.staged, why=why)

    def _list(self, content_ids: Collection[str]) -> None:
        """Publish versions as loading although their loads have not begun: callers wait for these."""
        for content_id in content_ids:
            if self._models.get(content_id) is None:
                self._models.set(LoadedModel(self._wanted[content_id].manifest, State.LOADING))

    def _unlist(self, active: Collection[str], kept: Collection[str]) -> None:
        """Do not publish versions as loading whose loads may not begin soon: their first call orders them."""
        for content_id, model in self._models.all().items():
            if model.state is State.LOADING and content_id not in active and content_id not in kept:
                self._models.remove(content_id)

    def _admit(self, request: LoadRequest) -> bool:
        """Return whether a load may begin now, and reserve its memory. Called by the loader, which is locked."""
        content_id = request.content_id
        if request.demanded:
            if time.monotonic() <= request.until:
                return True
            log.info("not loaded: %s: the calls that it was ordered for wait no longer", content_id)
            self._return_memory(content_id)
            self._models.remove(content_id)
            self.ended.append(content_id)
            return False
        need = self._need(request.manifest)
        if self._budget.too_large(need):
            return True  # its load fails with the numbers
        wanted = self._wanted.get(content_id)
        limit = 1.0 if self._whole or (wanted is not None and wanted.placement.pin) else FILL_SHARE
        if self._reserve(content_id, need, limit):
            return True
        if self._loads.giving_way:
            self._learnt = True  # `reconsider` tries again, and the version stays one that is being loaded
            return False
        self._put_away.add(content_id)
        model = self._models.get(content_id)
        if model is not None and model.state is State.LOADING:
            self._models.remove(content_id)
        return False

    def _reserve(self, content_id: str, need: Footprint, share: float) -> bool:
        """Reserve the memory of a load that leaves the other part of the budgets free; compilations end for it.

        False while `giving_way`: it may have the memory a moment later.
        """
        while not (self._budget.within(need, share) and self._budget.reserve(content_id, need)):
            if not self._loads.give_way():
                return False
        return True

    # Orders.

    def load(self, order: Order, consumer: Consumer) -> None:
        """Carry out an order to load a version. Raises Failure(UNAVAILABLE) without Redis."""
        content_id = order.content_id
        with self._changed:
            self._changed.wait_for(lambda: content_id in self._wanted, UNKNOWN_S_MAX)
            one = self._wanted.get(content_id)
            if one is None:
                log.info("not loaded: %s: the repository does not have it for this pool", content_id)
                self.ended.append(content_id)
                return
            model = self._models.get(content_id)
            if model is not None and model.state is State.READY:
                self._usage_of(order)
                if not model.demanded:  # from now on it is one for which a call is on its way
                    self._models.set(replace(model, demanded=True))
                self.ended.append(content_id)
                return
            if content_id in {*self._loads.active(), *self._waiting, *self._after_preloads}:
                return
            until = self._until(order)
            if until < time.monotonic():
                self.ended.append(content_id)
                return
            self._usage_of(order)
            answer = self._known_failure(one, model) or self._make_room(one, order, consumer)
            if isinstance(answer, Refusal):
                if one.staged and answer.kind is RefusalKind.NOTHING_EVICTABLE and self._preloads_now():
                    self._after_preloads[content_id] = order  # then what was preloaded makes room
                else:
                    self._refuse(one, answer)
                return
            if answer is _Room.LATER:
                return
            self.refusals.remove(content_id)
            self._put_away.discard(content_id)
            self._by_verdict.discard(content_id)
            self._models.set(LoadedModel(one.manifest, State.LOADING, why=order.why, demanded=not one.staged))
            self._ordered.begin(self._need(one.manifest))
            suspect = one.verdict.on(self._kind).deaths > 0
            self._loads.demand(LoadRequest(one.manifest, suspect, True, one.staged, order.why, until))

    def unload(self, content_id: str, reason: EvictionReason, why: str, consumer: Consumer) -> bool:
        """Unload a version that is not in use, not pinned, and not needed for instances_min; False: it stays."""
        with self._changed:
            one = self._wanted.get(content_id)
            if one is None or one.placement.pin:
                return False
            if not self._unloads.evict(consumer, content_id, one.placement.instances_min, reason, why):
                return False
            self._put_away.add(content_id)
            now = time.monotonic()
            self._rechecks.extend((now + after_s, content_id) for after_s in RECHECKS_S)
            return True

    def unload_idle(self, consumer: Consumer) -> None:
        """Unload the versions that were not called for the `idle_s` of their endpoints."""
        now = self._now()
        with self._changed:
            limited = [one for one in self._wanted.values() if one.placement.idle_s]
            for one in limited:
                model = self._models.get(one.content_id)
                if model is not None and model.state is State.READY:
                    idle_s = now - max(model.loaded_at, self._last_used(model))
                    if idle_s >= one.placement.idle_s:
                        self.unload(one.content_id, EvictionReason.IDLE, f"idle for {idle_s:.0f} s", consumer)

    def repay(self, consumer: Consumer) -> None:
        """Unload what costs least if an instance turned out to take more than was predicted, and there is too little.

        Raises Failure(UNAVAILABLE) without Redis.
        """
        if not self._measured or self._unloads.closing:
            return
        with self._changed:
            over_bytes, device_over_bytes = self._budget.over_bytes
            if not over_bytes and not device_over_bytes:
                self._measured, self._unpaid = False, ""
                return
            view, protected = self._view_now(consumer)
            need, now = Footprint(over_bytes, device_resident_bytes=device_over_bytes), self._now()
            victims = make_room(view, need, now, protected)
            if isinstance(victims, Refusal) and victims.kind is RefusalKind.THRASHING:
                victims = make_room(_settled(view), need, now, protected)  # the budget comes first
            if isinstance(victims, Refusal):
                if victims.reason != self._unpaid:
                    log.warning("more than the memory budget is in use: %s", victims.reason)
                self._unpaid = victims.reason
                return
            for victim in victims:
                why = "the worker uses more than its memory budget"
                self.unload(victim, EvictionReason.BUDGET, why, consumer)

    def unload_ahead(self, consumer: Consumer) -> None:
        """Unload what is hardly called, after a load that a call waited for, so that the next one finds memory free.

        Not while another load runs, which could not be measured beside it. Raises Failure(UNAVAILABLE) without Redis.
        """
        if not self._ordered.any_new or self._loads.pending or self._unloads.closing:
            return
        with self._changed:
            expected = self._ordered.take()
            if expected is None:
                return
            headroom = headroom_of(expected.footprint, self._budget.room_bytes, self._budget.device_room_bytes)
            if headroom is None or self._budget.within(headroom.low, 1.0):
                return
            view, protected = self._view_now(consumer)
            victims = unloaded_ahead(view, headroom, expected.gap_s, self._now(), protected)
            why = "to keep memory free for the next model that is called"
            self._ahead = [one for one in victims if self.unload(one, EvictionReason.ROOM, why, consumer)]

    def recall(self, consumer: Consumer) -> None:
        """Order the load of unloaded versions whose lanes have calls: their gateways did not know of the unload.

        A readiness probe loads nothing, and so makes no other version give way.
        """
        now = time.monotonic()
        for _ in range(len(self._rechecks)):
            at, content_id = self._rechecks.popleft()
            if at > now:
                self._rechecks.append((at, content_id))
            elif self._models.get(content_id) is None and content_id in self._wanted and consumer.has_calls(content_id):
                order = Order(do="load", content_id=content_id, why="a call came as it was unloaded", evict=True)
                consumer.demand(content_id, RECALL_LIFE_MS, order.model_dump_json().encode())

    def _until(self, order: Order) -> float:
        """Return the time (monotonic) after which an order is not worth a load."""
        if order.token or not order.deadline:
            return float("inf")
        return order.deadline - self._clock.offset_ms / 1000

    def _preloads_now(self) -> bool:
        """Return whether the worker is loading a version by itself: for no call, and for no client."""
        models = map(self._models.get, self._loads.active())
        return any(one is None or not (one.demanded or one.staged) for one in models)

    def _usage_of(self, order: Order) -> None:
        try:
            self._models.usage.continue_from(order.content_id, Usage.unpack(order.usage))
        except ValueError as error:
            log.warning("the usage in an order for %s is ignored: %s", order.content_id, error)

    def _known_failure(self, one: Wanted, model: LoadedModel | None) -> Refusal | None:
        """Return why a version that failed to load is not tried again now."""
        failed = one.verdict.on(self._kind).failed
        if failed:
            return Refusal(RefusalKind.FAILED, failed, FAILED_OFTEN_RETRY_S)
        if model is None or model.state is not State.FAILED:
            return None
        failures, ago_s = self._loads.failed.of(one.content_id)
        if failures < FAILURES_MAX or ago_s >= FAILED_OFTEN_RETRY_S:
            return None
        reason = f"its load failed {failures} times: {model.reason}"
        return Refusal(RefusalKind.FAILED, reason, FAILED_OFTEN_RETRY_S - ago_s)

    def _make_room(self, one: Wanted, order: Order, consumer: Consumer) -> Refusal | _Room:
        """Unload what costs least until the version fits, and reserve its memory; return why that is not possible.

        While what was unloaded is being closed, for longer than CLOSE_WAIT_S, or what works in the background is being
        ended, other orders come first: LATER.
        """
        content_id = one.content_id
        self._wait_for_headroom()
        for _ in range(ROOM_TRIES):
            need = self._need(one.manifest)
            if self._budget.too_large(need):
                return self._too_large(need)
            if self._reserve(content_id, need, 1.0):
                return _Room.RESERVED
            if self._loads.giving_way:  # nothing is unloaded for it
                self.again.append(order)
                return _Room.LATER
            found = self._victims(one.manifest, need, order, consumer)
            if isinstance(found, Refusal):
                return found
            need, victims = found
            if not victims and self._reserve(content_id, need, 1.0):
                return _Room.RESERVED
            self._unload_for(content_id, victims, consumer)
            if not self._closed(victims):
                self._waiting[content_id] = order, victims
                return _Room.LATER
            if self._wanted.get(content_id) is not one:  # it changed while this waited
                self.again.append(order)
                return _Room.LATER
        return Refusal(RefusalKind.NOTHING_EVICTABLE, "all models that could be unloaded for it are called", 1.0)

    def _wait_for_headroom(self) -> None:
        """Wait until what was unloaded ahead is closed: only then is its memory free, and a load measured alone."""
        ahead, self._ahead = self._ahead, ()
        self._closed(ahead)

    def _unload_for(self, content_id: str, victims: Sequence[str], consumer: Consumer) -> None:
        """Unload instances for a version, up to the first that is in use again."""
        for victim in victims:
            if not self.unload(victim, EvictionReason.ROOM, f"to make room for {content_id}", consumer):
                break

    def _victims(
        self, manifest: Manifest, need: Footprint, order: Order, consumer: Consumer
    ) -> tuple[Footprint, Sequence[str]] | Refusal:
        """Return what an order is tried with, and what is to be unloaded for that, or why that is not possible.

        What costs least is unloaded first. If instances that stay are in the way of a version that was never measured,
        it is tried with the memory that they leave.
        """
        view, protected = self._view_now(consumer)
        now = self._now()
        victims = make_room(view, need, now, protected)
        if isinstance(victims, Refusal) and victims.kind is RefusalKind.NOTHING_EVICTABLE and not need.measured:
            need = self._memory.need_within(manifest, *Room.of(view, now, protected).attainable_bytes())
            victims = make_room(view, need, now, protected)
        if isinstance(victims, Refusal):
            temporary = victims.kind is RefusalKind.TOO_LARGE
            return replace(victims, kind=RefusalKind.NOTHING_EVICTABLE, retry_after_s=1.0) if temporary else victims
        if victims and not order.evict:
            return Refusal(RefusalKind.NOTHING_EVICTABLE, "there is no free memory, and nothing was to be unloaded")
        return need, victims

    def _on_closed(self) -> None:
        """Carry out the orders that waited for the memory of an instance that was closed now, in its thread."""
        with self._changed:
            for content_id, (order, victims) in list(self._waiting.items()):
                if not self._unloads.any_closing(victims):
                    del self._waiting[content_id]
                    self.again.append(order)
            self._changed.notify_all()

    def _closed(self, victims: Sequence[str]) -> bool:
        """Wait until instances that were unloaded are closed; False: that takes longer than CLOSE_WAIT_S."""
        return self._changed.wait_for(lambda: not self._unloads.any_closing(victims), CLOSE_WAIT_S)

    def _too_large(self, need: Footprint) -> Refusal:
        return Refusal(RefusalKind.TOO_LARGE, self._budget.too_large(need), TOO_LARGE_RETRY_S)

    def _refuse(self, one: Wanted, refusal: Refusal) -> None:
        if self.refusals.first(one.content_id, refusal.kind):
            passing = one.staged and refusal.kind is not RefusalKind.TOO_LARGE  # no call waits for it
            log.log(logging.INFO if passing else logging.WARNING, "not loaded: %s: %s", one.content_id, refusal.reason)
        self.refusals.add(one.content_id, refusal)
        self._retried.discard(one.content_id)
        self.ended.append(one.content_id)
        model = self._models.get(one.content_id)
        if one.staged and refusal.kind is RefusalKind.TOO_LARGE:  # the two-phase load fails; else it ends on standby
            self._models.set(LoadedModel(one.manifest, State.FAILED, refusal.reason))
        elif model is not None and model.state is State.LOADING:
            self._models.remove(one.content_id)

    def _on_end(self, content_id: str) -> None:
        """Note the end of a load, in its thread. A demand ends when the lane is added, otherwise here."""
        self._learnt = self._measured = True
        with self._changed:  # no order is deciding to wait for this end
            self.again.extend(self._after_preloads.values())
            self._after_preloads.clear()
        retry = self._retries.pop(content_id, None)
        model = self._models.get(content_id)
        if retry is not None:
            self.again.append(retry)
        elif model is not None and model.state is State.READY:
            self._retried.discard(content_id)
            self.refusals.remove(content_id)
            if model.demanded and model.footprint is not None:
                self._ordered.end(model.footprint.load_s, self._now())
        else:
            self.ended.append(content_id)

    def _on_out_of_memory(self, request: LoadRequest) -> bool:
        """Try a load that found no memory once more, if it is awaited, with the corrected number; False: it failed."""
        content_id = request.content_id
        wanted = self._wanted.get(content_id)
        if not request.demanded and not (wanted is not None and wanted.staged):
            if self._budget.too_large(self._need(request.manifest)):
                return False
            self._put_away.add(content_id)  # its first call loads it, with more memory made free
            self._models.remove(content_id)
            return True
        if content_id not in self._retried:
            self._retried.add(content_id)
            # Not removed: to those who wait it is still loading, not on standby.
            self._models.set(LoadedModel(request.manifest, State.LOADING, why=request.why, demanded=not request.staged))
            self._retries[content_id] = Order(do="load", content_id=content_id, why=request.why, evict=True)
            return True
        self._retried.discard(content_id)
        need = self._need(request.manifest)
        refusal = self._too_large(need)
        if not refusal.reason:
            reason = f"its loads found less memory than the {need.load_bytes} bytes that it takes"
            refusal = Refusal(RefusalKind.NOTHING_EVICTABLE, reason, OTHERS_BUSY_RETRY_S)
        self.refusals.add(content_id, refusal)  # first: a version that is on standby from now on has a reason
        self._models.remove(content_id)
        return True

    def _return_memory(self, content_id: str) -> None:
        """Return what was reserved for a load that does not begin."""
        self._budget.begin_unload(content_id)
        self._budget.freed(content_id)

    # The facts.

    def _need(self, manifest: Manifest) -> Footprint:
        return self._budget.footprint(manifest.content_id) or self._memory.need(manifest)

    def _last_used(self, model: LoadedModel) -> float:
        """Return the instant of the last call, in seconds on the Redis clock; 0: there was none."""
        last = model.calls.last
        return last + self._clock.offset_ms / 1000 if last else 0.0

    def _view_now(self, consumer: Consumer) -> tuple[WorkerView, frozenset[str]]:
        """Return what the worker holds, with what is in use, and which versions are needed for instances_min."""
        counted = [one.content_id for one in self._wanted.values() if one.placement.instances_min]
        counted = [content_id for content_id in counted if self._models.get(content_id) is not None]
        holders, in_use = consumer.lanes_in_use(counted, list(self._models.lanes()))
        protected = {
            content_id
            for content_id, count in holders.items()
            if count - 1 < self._wanted[content_id].placement.instances_min
        }
        return self._view(self._loads.active(), in_use), frozenset(protected)

    def _view(self, active: Collection[str], in_use: Collection[str] = ()) -> WorkerView:
        instances: dict[str, PlacedInstance] = {}
        budget = self._budget
        footprints = budget.footprints()
        for content_id, model in self._models.all().items():
            if model.state in {State.READY, State.DRAINING} or content_id in active:
                footprint = footprints.get(content_id) or self._memory.need(model.manifest)
                instances[content_id] = self._placed(model, footprint, content_id in in_use)
        return WorkerView(
            self._worker,
            self._pool,
            budget.budget_bytes,
            budget.used_bytes,
            instances=instances,
            device_budget_bytes=budget.device_budget_bytes,
            device_used_bytes=budget.device_used_bytes,
            room_bytes=budget.room_bytes,
            device_room_bytes=budget.device_room_bytes,
        )

    def _placed(self, model: LoadedModel, footprint: Footprint, in_use: bool) -> PlacedInstance:
        content_id = model.manifest.content_id
        known = self._models.usage.fold(content_id, model.calls)
        last_used = self._last_used(model)
        if model.demanded:
            last_used = max(last_used, model.loaded_at)  # its first call is on its way
        was_called = last_used > 0
        if model.staged:  # a client asked for it: it makes room for calls, not for what the worker loads by itself
            last_used = max(last_used, model.loaded_at)
        draining = model.state is State.DRAINING  # its bytes are there, and go without an order
        if model.state is not State.READY and not draining:
            loaded_at = float("inf")
        else:  # a version that was never called is no loss, however young it is
            loaded_at = model.loaded_at if was_called else 0.0
        wanted = self._wanted.get(content_id)
        pinned = wanted is not None and wanted.placement.pin
        staged = wanted is not None and wanted.staged  # its activation waits until it is ready
        in_use = in_use or draining or staged
        return PlacedInstance(content_id, footprint, loaded_at, last_used, in_use, pinned, known.usage)


def _settled(worker: WorkerView) -> WorkerView:
    """Return a worker in which every loaded instance has been there long enough to be unloaded."""
    return replace(
        worker,
        instances={
            content_id: replace(one, loaded_at=0.0 if one.loaded_at < float("inf") else one.loaded_at)
            for content_id, one in worker.instances.items()
        },
    )


def _is_held(model: LoadedModel | None, active: bool) -> bool:
    """Return whether a version is loaded, or is being loaded or demanded (`active`)."""
    return active or (model is not None and model.state in {State.READY, State.DRAINING})
