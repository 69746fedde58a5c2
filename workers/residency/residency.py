"""Which versions this worker holds. Repository and orders in, loads and unloads out.

update (repository changed) ─> preloads ─> loader                     what it holds without any order
load (order: a call waits) ─> line ─(its turn)─> make room ─> reserve memory ─> loader, before all preloads
                                              └> refusal in the worker's record, end of the demand
The decisions are pure (millstream.services.placement); this module brings them the facts and does what they say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace

from millstream.services.access.access_keys import AccessKeys
from millstream.services.model.manifest import Manifest
from millstream.services.placement.preloads import FILL_SHARE, Candidate, preloads
from millstream.services.placement.quota import counted
from millstream.services.placement.room import OTHERS_BUSY_RETRY_S
from millstream.services.placement.usage import Usage
from millstream.services.placement.views import Footprint, Refusal, RefusalKind
from millstream.services.queue.pipeline import RedisClock
from millstream.services.sizes import sizes
from millstream.services.wire.orders import Order, OrderReason
from millstream.services.wire.records import State
from millstream.workers.batches.consumer import Consumer
from millstream.workers.models.loaded_models import BatchingVerdicts, LoadedModel, LoadedModels
from millstream.workers.models.record_parts import Refusals
from millstream.workers.models.wanted import Wanted
from millstream.workers.residency.evictions import Evictions
from millstream.workers.residency.loader import LoadPolicy, LoadRequest
from millstream.workers.residency.owner_quotas import OwnerQuotas
from millstream.workers.residency.room_making import FitChecks, RoomMaking, is_doubtful
from millstream.workers.residency.self_view import SelfView, is_held
from millstream.workers.residency.turns import Turns
from millstream.workers.residency.unloads import Unloads
from millstream.workers.residency.version_loads import FAILED_OFTEN_RETRY_S, FAILURES_MAX, VersionLoads

log = logging.getLogger("millstream.residency")

UNKNOWN_S_MAX = 2.0  # for the reconciler to read a version that was ordered just after it was published
_LOADS = frozenset({State.LOADING, State.WARMING})


class Residency(LoadPolicy):
    """The versions of one worker. Safe for several threads: one at a time decides.

    `again` are orders that the worker gives itself, `ended` the content ids whose demands end without a lane.

    Args:
        number: its number in its pool.
        keys: of the repository; None: quotas are not in force.
    """

    def __init__(
        self,
        worker: str,
        number: int,
        keys: AccessKeys | None,
        models: LoadedModels,
        loads: VersionLoads,
        unloads: Unloads,
        clock: RedisClock,
    ) -> None:
        self._number = number
        self._models = models
        self._loads = loads
        self._budget = loads.memory.budget
        self._kind = loads.kind
        self._view = view = SelfView(worker, models, loads, unloads, clock)
        self.quotas = OwnerQuotas(view, keys)
        self.evictions = Evictions(view, self.quotas)
        self._room = RoomMaking(view, self.evictions, self.quotas)
        self.refusals = Refusals(models.signal, self._view.monotonic, self._view.on_redis_clock)
        self._batching = BatchingVerdicts(models)
        self.again = self._view.again
        self.ended = self._view.ended
        self._by_verdict: set[str] = set()  # content ids that are not loaded because of their verdict
        self._needs: dict[str, Footprint] = {}  # what the versions take, as of the last load
        self._whole = True  # whether all versions fit together
        self._retried: set[str] = set()  # content ids of loads that found no memory and are tried again
        self._retries: dict[str, Order] = {}  # for when these loads have ended
        self._fit_checks = FitChecks()
        self.turns = Turns(view, self._room, self._fit_checks, self._on_turn)

    # What the worker holds without any order.

    def update(self, wanted: dict[str, Wanted]) -> None:
        """Load what is to be held, now that the repository has these versions for the pool."""
        with self._view.changed:
            removed = self._view.wanted.keys() - wanted.keys()
            self._view.wanted = wanted
            self._view.put_away &= wanted.keys()
            self._retried &= wanted.keys()
            for content_id in removed:
                self._needs.pop(content_id, None)
            self._choose()
            for content_id in removed:
                self._forget(content_id)
            self._view.changed.notify_all()

    def _forget(self, content_id: str) -> None:
        """Forget a version that was removed. What is loaded of it is unloaded elsewhere."""
        self.refusals.remove(content_id)
        self.turns.line.remove(content_id)
        self._by_verdict.discard(content_id)
        self._batching.forget(content_id)
        self._fit_checks.end(content_id)
        self._loads.failed.forget(content_id)
        model = self._models.get(content_id)
        if model is not None and model.state is State.LOADING and not self._loads.in_progress(content_id):
            self._room.give_back(content_id)  # it was ordered, and its load had not begun
            self.ended.append(content_id)

    def reconsider(self) -> None:
        """Choose preloads again after loads have ended, when their memory is known."""
        if self._view.learnt and not self._loads.pending:
            with self._view.changed:
                self._choose()

    def _choose(self) -> None:
        if self._view.learnt:
            self._view.learnt = False
            self._needs.clear()  # predictions have changed
        active, models = self._loads.active(), self._models.all()
        fitting: list[Wanted] = []
        candidates: list[Candidate] = []
        too_large: list[str] = []
        free = {quota.key: quota.free_bytes for quota in self.quotas.all()}
        for content_id, one in self._view.wanted.items():
            model = models.get(content_id)
            held = is_held(model, content_id in active)
            if not self._may_load(one, model) or not (one.preloaded or held):
                continue
            need = self._needs.get(content_id)
            if need is None:
                need = self._needs[content_id] = self._view.need(one.manifest)
            if not held and not _take(free, one, need):
                continue  # its first call loads it, in place of others of its key
            if not self._budget.too_large(need):
                fitting.append(one)
                candidates.append(self._candidate(one, need))
            elif not held:
                too_large.append(content_id)
        chosen = preloads(self._view.of(active), candidates, self._budget.base_bytes, self._budget.device.base_bytes)
        self._whole = chosen.whole
        queued = [*chosen.content_ids, *too_large]
        listed = queued if chosen.whole else too_large
        self._list(listed)
        ordered = {order.content_id for order in list(self.again)}
        ordered |= self._retries.keys() | self.turns.line.content_ids()
        self._unlist(active, [*listed, *ordered])
        for one, candidate in zip(fitting, candidates, strict=True):
            held = is_held(models.get(one.content_id), one.content_id in active)
            queued_now = chosen.whole and one.content_id in queued
            if not (held or queued_now or one.content_id in ordered or self.refusals.of(one.content_id)):
                self._order_itself(one, candidate)
        kept = {one.content_id for one in fitting if one.content_id in active}
        self._loads.want([self._request(self._view.wanted[content_id]) for content_id in queued], kept)

    def _order_itself(self, one: Wanted, candidate: Candidate) -> None:
        """Order the load of a version that is neither held nor preloaded, if this worker is to make room for it."""
        if one.staged:
            self.again.append(Order(do="load", content_id=one.content_id, why="its load is staged", evict=True))
        elif one.content_id in self._fit_checks or candidate.waits:
            return
        elif is_doubtful(candidate.footprint, self._budget):
            self.again.append(self._fit_checks.begin(one.content_id))
            self._list([one.content_id])

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
        waits = one.content_id in self._view.put_away or bool(one.instances_max and self._number >= one.instances_max)
        return Candidate(one.content_id, need, one.placement.pin, waits)

    def _request(self, one: Wanted) -> LoadRequest:
        why = "it fits with all others" if self._whole else "memory is free"
        return LoadRequest(one.manifest, suspect=one.verdict.on(self._kind).deaths > 0, staged=one.staged, why=why)

    def _list(self, content_ids: Collection[str]) -> None:
        """Publish versions as loading although their loads have not begun: callers wait for these."""
        for content_id in content_ids:
            if self._models.get(content_id) is None:
                self._models.set(LoadedModel(self._view.wanted[content_id].manifest, State.LOADING))

    def _unlist(self, active: Collection[str], kept: Collection[str]) -> None:
        """Do not publish versions as loading whose loads may not begin soon: their first call orders them."""
        for content_id, model in self._models.all().items():
            if model.state is State.LOADING and content_id not in active and content_id not in kept:
                self._models.remove(content_id)

    def admits(self, request: LoadRequest) -> bool:
        """Return whether a load may begin now, and reserve its memory. Called by the loader, which is locked."""
        content_id = request.content_id
        if request.demanded:
            return True
        need = self._view.need(request.manifest)
        if self._budget.too_large(need):
            return True  # its load fails with the numbers
        wanted = self._view.wanted.get(content_id)
        quota = None if wanted is None else self.quotas.of(wanted)
        if quota is not None and not quota.allows(need):
            self._view.learnt = True  # `reconsider` leaves it out, until its quota is free
            return False
        limit = 1.0 if self._whole or (wanted is not None and wanted.placement.pin) else FILL_SHARE
        if self._room.reserve(content_id, need, limit):
            return True
        if self._loads.giving_way:
            self._view.learnt = True  # `reconsider` tries again, and the version stays one that is being loaded
            return False
        self._view.put_away.add(content_id)
        model = self._models.get(content_id)
        if model is not None and model.state is State.LOADING:
            self._models.remove(content_id)
        return False

    # Orders.

    def load(self, order: Order, consumer: Consumer) -> None:
        """Carry out an order to load a version. Raises Failure(UNAVAILABLE) without Redis."""
        content_id = order.content_id
        with self._view.changed:
            self._view.changed.wait_for(lambda: content_id in self._view.wanted, UNKNOWN_S_MAX)
            one = self._view.wanted.get(content_id)
            if one is None:
                log.info("not loaded: %s: the repository does not have it for this pool", content_id)
                self.ended.append(content_id)
                return
            if self._fit_checks.is_over(order):
                return
            model = self._models.get(content_id)
            if model is not None and model.state is State.READY:
                self._usage_of(order)
                if not model.demanded:  # from now on it is one for which a call is on its way
                    self._models.set(replace(model, demanded=True))
                self.ended.append(content_id)
                return
            if content_id in self._loads.active():
                return
            if self._view.until(order) < time.monotonic():
                self.ended.append(content_id)
                return
            self._usage_of(order)
            failure = self._known_failure(one, model)
            if failure is not None:
                self._refuse(one, failure)
                return
            check = self._fit_checks.order_of(content_id) is order
            if not check:
                self._fit_checks.end(content_id)  # a call decides more, because more makes room for it
            # What is always loaded waits as a call does; all else comes after the calls.
            called = order.reason == OrderReason.MINIMUM or not (order.token or one.staged or check)
            self.turns.line.add(order, called=called, first=content_id in self._retried)
            self.turns.advance(consumer)
            if content_id in self.turns.line:
                self._list([content_id])

    def _on_turn(self, one: Wanted, order: Order, refusal: Refusal | None, called: bool) -> None:
        if refusal is None:
            self._begin(one, order, called=called)
        else:
            self._refuse(one, refusal)

    def _begin(self, one: Wanted, order: Order, *, called: bool) -> None:
        """Begin a load whose memory is reserved."""
        content_id = one.content_id
        self.refusals.remove(content_id)
        self._view.put_away.discard(content_id)
        self._by_verdict.discard(content_id)
        staged = one.staged or content_id in self._fit_checks  # no call waits for it
        self._models.set(LoadedModel(one.manifest, State.LOADING, why=order.why, demanded=not staged))
        if called:
            self.evictions.ordered.begin(self._view.need(one.manifest))
        suspect = one.verdict.on(self._kind).deaths > 0
        self._loads.demand(LoadRequest(one.manifest, suspect, True, staged, order.why))

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

    def _refuse(self, one: Wanted, refusal: Refusal) -> None:
        content_id = one.content_id
        checked = content_id in self._fit_checks
        if self.refusals.first(content_id, refusal.kind):
            #  no call waits for it
            passing = refusal.kind is RefusalKind.BUSY or (
                (one.staged or checked) and refusal.kind is not RefusalKind.TOO_LARGE
            )
            log.log(logging.INFO if passing else logging.WARNING, "not loaded: %s: %s", content_id, refusal.reason)
        self.refusals.add(content_id, refusal)
        self._retried.discard(content_id)
        self.ended.append(content_id)
        if checked:
            self._end_fit_check(content_id, fits=False)
            self._view.put_away.add(content_id)  # its first call tries it again, with what is used then
        model = self._models.get(content_id)
        if one.staged and refusal.kind is RefusalKind.TOO_LARGE:  # the two-phase load fails; else it ends on standby
            self._models.set(LoadedModel(one.manifest, State.FAILED, refusal.reason))
        elif model is None or model.state is State.LOADING:
            self._stand_by(one.manifest, refusal.kind)

    def _stand_by(self, manifest: Manifest, kind: RefusalKind) -> None:
        """Publish that a version is not loaded now. One that never fits is loaded once more, which fails it."""
        if kind is RefusalKind.TOO_LARGE:
            self._models.set(LoadedModel(manifest, State.LOADING))
            self._view.learnt = True
        else:
            self._models.remove(manifest.content_id)

    def _end_fit_check(self, content_id: str, *, fits: bool) -> None:
        """End the fit check of a version. What was unloaded for one that does not fit is preloaded again."""
        unloaded = self._fit_checks.end(content_id)
        if not fits:
            self._view.put_away -= unloaded

    def load_ended(self, content_id: str) -> None:
        """Note the end of a load, in its thread. A demand ends when the lane is added, otherwise here."""
        self._view.learnt = True
        self.evictions.load_ended()
        retry = self._retries.pop(content_id, None)
        model = self._models.get(content_id)
        ready = model is not None and model.state is State.READY
        if retry is None:
            with self._view.changed:
                self._end_fit_check(content_id, fits=ready)
        if retry is not None:
            self.again.append(retry)
        elif model is not None and ready:
            self._retried.discard(content_id)
            self.refusals.remove(content_id)
            if model.demanded and model.footprint is not None:
                self.evictions.ordered.end(model.footprint.load_s, self._view.now())
        else:
            self.ended.append(content_id)
        self.turns.advance(None)  # the next one of the line need not wait for the thread of the orders

    def found_no_memory(self, request: LoadRequest) -> bool:
        """Try a load that found no memory once more, if it is awaited, with the corrected number; False: it failed."""
        content_id = request.content_id
        wanted = self._view.wanted.get(content_id)
        if not request.demanded and not (wanted is not None and wanted.staged):
            if self._budget.too_large(self._view.need(request.manifest)):
                return False
            self._view.put_away.add(content_id)  # its first call loads it, with more memory made free
            self._models.remove(content_id)
            return True
        if content_id not in self._retried:
            self._retried.add(content_id)
            # Not removed: to those who wait it is still loading, not on standby.
            self._models.set(LoadedModel(request.manifest, State.LOADING, why=request.why, demanded=not request.staged))
            again = Order(do="load", content_id=content_id, why=request.why, evict=True)
            self._retries[content_id] = self._fit_checks.order_of(content_id) or again
            return True
        self._retried.discard(content_id)
        need = self._view.need(request.manifest)
        refusal = self._room.too_large(need)
        if not refusal.reason:
            reason = f"its loads found less memory than the {sizes(need.load_bytes)[0]} that it takes"
            refusal = Refusal(RefusalKind.NOTHING_EVICTABLE, reason, OTHERS_BUSY_RETRY_S)
        self.refusals.add(content_id, refusal)  # first: a version that is on standby from now on has a reason
        self._stand_by(request.manifest, refusal.kind)
        return True


def _take(free: dict[str, int], one: Wanted, need: Footprint) -> bool:
    """Take what a version needs of what is free of its key's quota; False: it is not enough, and no load is staged."""
    owner = one.placement.owner
    if owner not in free:
        return True
    if counted(need) > free[owner] and not one.staged:
        return False
    free[owner] -= counted(need)
    return True
