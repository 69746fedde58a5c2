"""Unloads versions that are still to be served: for others, for want of calls, or by order.

Redis decides whether a version is in use (`Unloads.evict`). A batch that was on its way has its version loaded again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from millstream.services.placement.preloads import OrderedLoads, headroom_of, unloaded_ahead
from millstream.services.placement.room import make_room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal
from millstream.services.wire.orders import Order
from millstream.services.wire.records import State
from millstream.workers.batches.consumer import Consumer
from millstream.workers.residency.owner_quotas import OwnerQuotas
from millstream.workers.residency.self_view import SelfView
from millstream.workers.residency.unloads import EvictionReason

log = logging.getLogger("millstream.residency")

CLOSE_WAIT_S = 0.25  # for an order until what was unloaded for it is closed; then other orders come first
OUTDATED_IDLE_S = 300.0  # without a call, until a version is unloaded that newer ones have replaced
#: When the lane of an unloaded version is looked at: its batches may wait, or a gateway sent one before it knew.
RECHECKS_S = (0.0, 1.0, 3.0)
RECALL_LIFE_MS = 60_000  # of the demand for a version that a batch waits for


class Evictions:
    """The evictions of one worker. Safe for several threads."""

    def __init__(self, view: SelfView, quotas: OwnerQuotas) -> None:
        self._view = view
        self._models, self._unloads, self._budget = view.models, view.unloads, view.budget
        self._quotas = quotas
        self.ordered = OrderedLoads()
        self._measured = False  # whether a load ended since it was last checked that the budget holds
        self._unpaid = ""  # why nothing is unloaded although the budget is exceeded
        self._rechecks: deque[tuple[float, str]] = deque(maxlen=1000)
        self._ahead: Sequence[str] = ()  # content ids that were unloaded last to keep memory free

    def load_ended(self) -> None:
        """Look soon whether the budget holds: an instance may have turned out to take more than was predicted."""
        self._measured = True

    def unload(
        self, content_id: str, reason: EvictionReason, why: str, consumer: Consumer, *, stop: bool = False
    ) -> bool:
        """Unload a version that is not in use, not pinned, and not needed for instances_min; False: it stays.

        `stop`: also if it is in use. Raises Failure(UNAVAILABLE) without Redis.
        """
        with self._view.changed:
            one = self._view.wanted.get(content_id)
            if one is None or one.placement.pin:
                return False
            model = self._models.get(content_id)
            if not self._unloads.evict(consumer, content_id, one.placement.instances_min, reason, why, stop=stop):
                return False
            if model is not None and model.demanded:  # if its lane was not added yet, nothing else ends the demand
                consumer.end_demand(content_id)
            self._view.put_away.add(content_id)
            now = time.monotonic()
            self._rechecks.extend((now + after_s, content_id) for after_s in RECHECKS_S)
            return True

    def unload_for(self, content_id: str, victims: Sequence[PlacedInstance], consumer: Consumer) -> None:
        """Unload instances for a version, up to the first that is in use again. Those in use have had their turn."""
        for one in victims:
            why = f"to make room for {content_id}"
            if not self.unload(one.content_id, EvictionReason.ROOM, why, consumer, stop=one.in_use):
                break

    def unload_idle(self, consumer: Consumer) -> None:
        """Unload the versions that were not called for the `idle_s` of their endpoints, or are outdated."""
        now = self._view.monotonic()
        with self._view.changed:
            limited = [one for one in self._view.wanted.values() if one.placement.idle_s or one.outdated]
            for one in limited:
                model = self._models.get(one.content_id)
                if model is not None and model.state is State.READY:
                    idle_s = now - max(model.loaded_at, model.calls.last)
                    if idle_s >= (one.placement.idle_s or OUTDATED_IDLE_S):
                        self.unload(one.content_id, EvictionReason.IDLE, f"idle for {idle_s:.0f} s", consumer)

    def repay(self, consumer: Consumer) -> None:
        """Unload what costs least if an instance turned out to take more than was predicted, and there is too little.

        Raises Failure(UNAVAILABLE) without Redis.
        """
        if not self._measured or self._unloads.closing:
            return
        with self._view.changed:
            over_bytes, device_over_bytes = self._budget.over_bytes, self._budget.device.over_bytes
            if not over_bytes and not device_over_bytes:
                self._measured, self._unpaid = False, ""
                return
            view, protected = self._view.with_use(consumer)
            need, now = Footprint(over_bytes, device_resident_bytes=device_over_bytes), self._view.now()
            victims = make_room(view, need, now, protected)
            if isinstance(victims, Refusal):
                if victims.reason != self._unpaid:
                    log.warning("more than the memory budget is in use: %s", victims.reason)
                self._unpaid = victims.reason
                return
            for victim in victims:
                why = "the worker uses more than its memory budget"
                self.unload(victim, EvictionReason.BUDGET, why, consumer)

    def keep_quotas(self, consumer: Consumer) -> None:
        """Unload models of keys that take more than their quota, or wait for it in another worker.

        Raises Failure(UNAVAILABLE) without Redis.
        """
        over = [quota for quota in self._quotas.all() if quota.to_free()]
        if not over or self._unloads.closing:
            return
        with self._view.changed:
            view, protected = self._view.with_use(consumer)
            for quota in over:
                owned, leaving = self._quotas.view(quota.key, view)
                for victim in quota.over(owned, leaving, self._view.now(), protected):
                    why = f"the models of key '{quota.key}' take more than its memory quota, or another of them waits"
                    self.unload(victim, EvictionReason.QUOTA, why, consumer, stop=view.instances[victim].in_use)

    def unload_ahead(self, consumer: Consumer) -> None:
        """Unload what is hardly called, after a load that a call waited for, so that the next one finds memory free.

        Not while another load runs, which could not be measured beside it. Raises Failure(UNAVAILABLE) without Redis.
        """
        if not self.ordered.any_new or self._view.loads.pending or self._unloads.closing:
            return
        with self._view.changed:
            expected = self.ordered.take()
            if expected is None:
                return
            headroom = headroom_of(expected.footprint, self._budget.room_bytes, self._budget.device.room_bytes)
            if headroom is None or self._budget.within(headroom.low, 1.0):
                return
            view, protected = self._view.with_use(consumer)
            victims = unloaded_ahead(view, headroom, expected.gap_s, self._view.now(), protected)
            why = "to keep memory free for the next model that is called"
            self._ahead = [one for one in victims if self.unload(one, EvictionReason.ROOM, why, consumer)]

    def wait_for_headroom(self) -> None:
        """Wait until what was unloaded ahead is closed: only then is its memory free, and a load measured alone."""
        ahead, self._ahead = self._ahead, ()
        self.closed(ahead)

    def closed(self, victims: Sequence[str]) -> bool:
        """Wait until instances that were unloaded are closed; False: that takes longer than CLOSE_WAIT_S."""
        return self._view.changed.wait_for(lambda: not self._unloads.any_closing(victims), CLOSE_WAIT_S)

    def recall(self, consumer: Consumer) -> None:
        """Order the load of unloaded versions whose lanes have calls: their gateways did not know of the unload.

        A readiness probe loads nothing, and so makes no other version give way.
        """
        now = time.monotonic()
        for _ in range(len(self._rechecks)):
            at, content_id = self._rechecks.popleft()
            gone = self._models.get(content_id) is None and content_id in self._view.wanted
            if at > now or self._unloads.any_closing([content_id]):
                self._rechecks.append((at, content_id))
            elif gone and consumer.has_calls(content_id):
                order = Order(do="load", content_id=content_id, why="a call came as it was unloaded", evict=True)
                consumer.demand(content_id, RECALL_LIFE_MS, order.model_dump_json().encode())
