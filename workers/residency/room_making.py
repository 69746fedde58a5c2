"""Gets the memory that an order to load needs: unloads what goes for it, and reserves it.

order ─> reserved │ LEAVING: what was unloaded is still being closed │ WAITS for its turn │ Refusal
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from millstream.services.placement.line import Wait, stopped, turn
from millstream.services.placement.quota import Quota
from millstream.services.placement.room import Room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView
from millstream.services.wire.orders import Order
from millstream.workers.batches.consumer import Consumer
from millstream.workers.models.memory_budget import MemoryBudget
from millstream.workers.models.wanted import Wanted
from millstream.workers.residency.evictions import Evictions
from millstream.workers.residency.owner_quotas import OwnerQuotas
from millstream.workers.residency.self_view import SelfView

TOO_LARGE_RETRY_S = 30.0


WHY = "to find out whether it fits"


class FitChecks:
    """The fit checks of one worker, by content id. Called with the lock of its residency."""

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._unloaded: dict[str, set[str]] = {}

    def begin(self, content_id: str) -> Order:
        """Return the order to load a version for its check."""
        order = self._orders[content_id] = Order(do="load", content_id=content_id, why=WHY, evict=True)
        self._unloaded[content_id] = set()
        return order

    def __contains__(self, content_id: str) -> bool:
        return content_id in self._orders

    def is_over(self, order: Order) -> bool:
        """Return whether an order is that of a check that has ended, for example because a call ordered the load."""
        return order.why == WHY and order.content_id not in self._orders

    def order_of(self, content_id: str) -> Order | None:
        """Return the order of the check of a version, for its second try; None: it is not being checked."""
        return self._orders.get(content_id)

    def unloaded(self, content_id: str, others: set[str]) -> None:
        """Record what was unloaded for a check."""
        self._unloaded[content_id] |= others

    def end(self, content_id: str) -> set[str]:
        """End a check, if there is one; return what was unloaded for it, by content id."""
        self._orders.pop(content_id, None)
        return self._unloaded.pop(content_id, set())


def is_doubtful(need: Footprint, budget: MemoryBudget) -> bool:
    """Return whether only a load can tell if a version fits: what is predicted takes all memory for models."""
    if need.measured or budget.too_large(need):
        return False
    return need.load_bytes >= budget.room_bytes or need.device_load_bytes >= budget.device.room_bytes


class Turn(NamedTuple):
    """An order to load a version, when it is looked at.

    Args:
        consumer: the connection of the caller's thread; None: nothing is unloaded.
        called: whether calls wait for it.
        check: whether only instances may be unloaded that no client has called or asked for.
    """

    one: Wanted
    order: Order
    consumer: Consumer | None
    called: bool
    check: bool


class Answer(Enum):
    """What making room for a version came to, unless it is refused."""

    RESERVED = "reserved"
    LEAVING = "leaving"  # there is room once what was unloaded is closed: what fits beside it may be loaded before
    WAITS = "waits"  # for loads, residences of others, or work in the background to end
    OVER_QUOTA = "over quota"  # it waits for models of its own key alone: those behind it do not wait for it


class RoomMaking:
    """Makes room in one worker. Called with the lock of its residency."""

    def __init__(self, view: SelfView, evictions: Evictions, quotas: OwnerQuotas) -> None:
        self._view = view
        self._loads, self._budget = view.loads, view.budget
        self._evictions = evictions
        self._quotas = quotas

    def make(self, asked: Turn, before: Collection[Footprint]) -> Refusal | Answer:
        """Unload what goes for a version, and reserve its memory. Raises Failure(UNAVAILABLE) without Redis.

        `before`: what those take that are before it in the line, and wait for what is leaving.
        """
        one, consumer = asked.one, asked.consumer
        content_id = one.content_id
        if consumer is not None:
            self._evictions.wait_for_headroom()
        need = self._view.need(one.manifest)
        if self._budget.too_large(need):
            return self.too_large(need)
        quota = self._quotas.of(one)
        if quota is not None and not quota.allows(need):
            over = self._within_quota(quota, asked, need)
            if over is not None:
                return over
        if before:
            fits = self._fits_beside(need, before) and self.reserve(content_id, need, 1.0)
            return Answer.RESERVED if fits else Answer.LEAVING
        if self.reserve(content_id, need, 1.0):
            return Answer.RESERVED
        if consumer is None or self._loads.giving_way:  # nothing is unloaded for it
            return Answer.WAITS
        found = self._victims(asked, need, consumer)
        return found if isinstance(found, Answer | Refusal) else self._unload(content_id, *found, consumer)

    def _within_quota(self, quota: Quota, asked: Turn, need: Footprint) -> Refusal | Answer | None:
        """Unload what goes of the models of a version's key, or have other workers do so; None: it may be loaded."""
        one, consumer = asked.one, asked.consumer
        if consumer is None:
            return Answer.OVER_QUOTA
        view, protected = self._seen(consumer, check=asked.check)
        owned, leaving = self._quotas.view(quota.key, view)
        found, wanted = quota.make_way(owned, leaving, need, self._view.now(), protected, called=asked.called)
        if isinstance(found, Refusal):
            return found
        if wanted:
            self._quotas.want(quota.key, wanted)
        if isinstance(found, Wait) or not found:
            return Answer.OVER_QUOTA
        if not asked.order.evict:
            return Refusal(RefusalKind.BUSY, f"key '{quota.key}' is at its quota, and nothing was to be unloaded", 1.0)
        self._evictions.unload_for(one.content_id, [view.instances[victim] for victim in found], consumer)
        self._evictions.closed(found)
        now = self._quotas.of(one)
        return None if now is None or now.allows(need) else Answer.OVER_QUOTA

    def _unload(
        self, content_id: str, need: Footprint, victims: Sequence[PlacedInstance], consumer: Consumer
    ) -> Answer:
        self._evictions.unload_for(content_id, victims, consumer)
        if not self._evictions.closed([victim.content_id for victim in victims]):
            return Answer.LEAVING
        if self.reserve(content_id, need, 1.0):
            return Answer.RESERVED
        return Answer.LEAVING if self._view.unloads.closing else Answer.WAITS

    def _fits_beside(self, need: Footprint, before: Collection[Footprint]) -> bool:
        """Return whether a version leaves the memory that those before it wait for."""
        host, device = self._budget.leaving_bytes, self._budget.device.leaving_bytes
        host += self._budget.free_bytes - sum(one.load_bytes for one in before)
        device += self._budget.device.free_bytes - sum(one.device_load_bytes for one in before)
        return need.load_bytes <= host and need.device_load_bytes <= device

    def reserve(self, content_id: str, need: Footprint, share: float) -> bool:
        """Reserve the memory of a load that leaves the other part of the budgets free; compilations end for it.

        False while `giving_way`: it may have the memory a moment later.
        """
        while not (self._budget.within(need, share) and self._budget.reserve(content_id, need)):
            if not self._loads.give_way():
                return False
        return True

    def give_back(self, content_id: str) -> None:
        """Return what was reserved for a load that does not begin."""
        self._budget.begin_unload(content_id)
        self._budget.freed(content_id)

    def too_large(self, need: Footprint) -> Refusal:
        """Return the refusal of a load that takes more than all memory for models; without a reason if it fits."""
        return Refusal(RefusalKind.TOO_LARGE, self._budget.too_large(need), TOO_LARGE_RETRY_S)

    def _victims(
        self, asked: Turn, need: Footprint, consumer: Consumer
    ) -> tuple[Footprint, Sequence[PlacedInstance]] | Answer | Refusal:
        """Return what an order is tried with, and what goes for that, or why that is not possible (now).

        If instances that stay are in the way of a version that was never measured, it is tried with the memory that
        they leave.
        """
        view, protected = self._seen(consumer, check=asked.check)
        now = self._view.now()
        victims = turn(view, need, now, protected, called=asked.called)
        tried = not need.measured and not asked.check  # a check is to tell whether all memory is enough
        if isinstance(victims, Refusal) and victims.kind is not RefusalKind.BUSY and tried:
            need = self._loads.memory.need_within(
                asked.one.manifest, *Room.of(stopped(view), protected).attainable_bytes()
            )
            victims = turn(view, need, now, protected, called=asked.called)
        if isinstance(victims, Refusal):
            temporary = victims.kind is RefusalKind.TOO_LARGE
            return replace(victims, kind=RefusalKind.NOTHING_EVICTABLE, retry_after_s=1.0) if temporary else victims
        if isinstance(victims, Wait):
            return Answer.WAITS
        if victims and not asked.order.evict:
            return Refusal(RefusalKind.BUSY, "there is no free memory, and nothing was to be unloaded", 1.0)
        return need, [view.instances[victim] for victim in victims]

    def _seen(self, consumer: Consumer, *, check: bool) -> tuple[WorkerView, frozenset[str]]:
        """Return what the worker holds, and what must stay; for a check also what any client has called."""
        view, protected = self._view.with_use(consumer)
        if check:
            protected |= {content_id for content_id, held in view.instances.items() if held.last_used}
        return view, protected
