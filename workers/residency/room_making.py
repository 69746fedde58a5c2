"""room_making: gets the memory that an order to load needs: unloads what costs least, and reserves it.

order ─> reserved │ LATER: what was unloaded is still being closed │ Refusal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from millstream.services.model.manifest import Manifest
from millstream.services.placement.eviction import make_room
from millstream.services.placement.room import Room
from millstream.services.placement.views import Footprint, Refusal, RefusalKind
from millstream.services.wire.orders import Order
from millstream.workers.batches.consumer import Consumer
from millstream.workers.loads.unloads import Unloads
from millstream.workers.loads.version_loads import VersionLoads
from millstream.workers.models.wanted import Wanted
from millstream.workers.residency.evictions import Evictions
from millstream.workers.residency.own_view import OwnView
from millstream.workers.residency.state import ResidencyState

ROOM_TRIES = 32  # to make room while calls for the versions that are to be unloaded keep coming
TOO_LARGE_RETRY_S = 30.0


class Answer(Enum):
    """What making room for a version came to, unless it is refused."""

    RESERVED = "reserved"
    LATER = "later"  # what was unloaded for it is still being closed, or work in the background is ending


class RoomMaking:
    """Makes room in one worker. Called with `state.changed` locked."""

    def __init__(
        self, state: ResidencyState, view: OwnView, evictions: Evictions, loads: VersionLoads, unloads: Unloads
    ) -> None:
        self._state = state
        self._view = view
        self._evictions = evictions
        self._loads = loads
        self._unloads = unloads
        self._memory = loads.memory
        self._budget = loads.memory.budget
        #: content id -> its order, and what was unloaded for it and is not closed yet
        self.waiting: dict[str, tuple[Order, Sequence[str]]] = {}
        unloads.on_closed = self._on_closed

    def make(self, one: Wanted, order: Order, consumer: Consumer, *, of_unused: bool = False) -> Refusal | Answer:
        """Unload what costs least until the version fits, and reserve its memory; return why that is not possible.

        While what was unloaded is being closed, for longer than CLOSE_WAIT_S, or what works in the background is being
        ended, other orders come first: LATER. Raises Failure(UNAVAILABLE) without Redis.

        Args:
            one: the version.
            order: to load it.
            consumer: the connection of the caller's thread.
            of_unused: whether only instances may be unloaded that no client has called or asked for.
        """
        content_id = one.content_id
        self._evictions.wait_for_headroom()
        for _ in range(ROOM_TRIES):
            need = self._view.need(one.manifest)
            if self._budget.too_large(need):
                return self.too_large(need)
            if self.reserve(content_id, need, 1.0):
                return Answer.RESERVED
            if self._loads.giving_way:  # nothing is unloaded for it
                self._state.again.append(order)
                return Answer.LATER
            found = self._victims(one.manifest, need, order, consumer, of_unused=of_unused)
            if isinstance(found, Refusal):
                return found
            need, victims = found
            if not victims and self.reserve(content_id, need, 1.0):
                return Answer.RESERVED
            self._evictions.unload_for(content_id, victims, consumer)
            if not self._evictions.closed(victims):
                self.waiting[content_id] = order, victims
                return Answer.LATER
            if self._state.wanted.get(content_id) is not one:  # it changed while this waited
                self._state.again.append(order)
                return Answer.LATER
        return Refusal(RefusalKind.NOTHING_EVICTABLE, "all models that could be unloaded for it are called", 1.0)

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
        self, manifest: Manifest, need: Footprint, order: Order, consumer: Consumer, *, of_unused: bool
    ) -> tuple[Footprint, Sequence[str]] | Refusal:
        """Return what an order is tried with, and what is to be unloaded for that, or why that is not possible.

        What costs least is unloaded first. If instances that stay are in the way of a version that was never measured,
        it is tried with the memory that they leave.
        """
        view, protected = self._view.with_use(consumer)
        if of_unused:
            protected |= {content_id for content_id, held in view.instances.items() if held.last_used}
        now = self._view.now()
        victims = make_room(view, need, now, protected)
        tried = not need.measured and not of_unused  # a check is to tell whether all memory is enough
        if isinstance(victims, Refusal) and victims.kind is RefusalKind.NOTHING_EVICTABLE and tried:
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
        with self._state.changed:
            for content_id, (order, victims) in list(self.waiting.items()):
                if not self._unloads.any_closing(victims):
                    del self.waiting[content_id]
                    self._state.again.append(order)
            self._state.changed.notify_all()
