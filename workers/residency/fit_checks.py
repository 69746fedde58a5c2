"""fit_checks: loads that find out whether a version fits that may be larger than all memory for models.

A prediction alone is no reason to refuse a version, and its first call is a late time to learn that no worker can hold
it. So a worker that first sees such a version loads it at once, and unloads for that only what no client has called or
asked for.
"""

from __future__ import annotations

from millstream.services.placement.views import Footprint
from millstream.services.wire.orders import Order
from millstream.workers.models.memory_budget import MemoryBudget

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
    return need.load_bytes >= budget.room_bytes or need.device_load_bytes >= budget.device_room_bytes
