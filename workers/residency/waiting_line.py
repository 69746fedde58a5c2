"""waiting_line: the orders to load that wait for their turn: those that calls wait for, oldest first, then others."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.services.wire.orders import Order
from millstream.services.wire.records import LoadRecord
from millstream.workers.loads.loader import SET_ASIDE_S


class WaitingLine:
    """The line of one worker, by content id. Changed with the lock of its residency."""

    def __init__(self) -> None:
        self._called: dict[str, Order] = {}
        self._others: dict[str, Order] = {}  # of the controller, of clients that stage a load, of the worker itself

    def __contains__(self, content_id: str) -> bool:
        return content_id in self._called or content_id in self._others

    def __bool__(self) -> bool:
        return bool(self._called or self._others)

    def __iter__(self) -> Iterator[tuple[Order, bool]]:
        """Yield the orders, and whether calls wait for them. The line may change meanwhile."""
        yield from [(order, True) for order in self._called.values()]
        yield from [(order, False) for order in self._others.values()]

    def add(self, order: Order, *, called: bool, first: bool = False) -> None:
        """Add an order, or replace the order of the same version, which keeps its place.

        Args:
            order: the order.
            called: whether calls wait for it.
            first: whether it goes before all others: its load found no memory, and is tried once more.
        """
        if called:
            self._others.pop(order.content_id, None)
        elif order.content_id in self._called:
            return
        line = self._called if called else self._others
        known = line.get(order.content_id)
        if known is not None and not (known.deadline and (order.deadline > known.deadline or not order.deadline)):
            return  # what waits for it goes on for longer
        if first:
            line = {order.content_id: order} | line
            self._called, self._others = (line, self._others) if called else (self._called, line)
        else:
            line[order.content_id] = order

    def remove(self, content_id: str) -> None:
        """Remove an order; one that is not there is no error."""
        self._called.pop(content_id, None)
        self._others.pop(content_id, None)

    def content_ids(self) -> set[str]:
        return self._called.keys() | self._others.keys()

    def records(self) -> tuple[LoadRecord, ...]:
        """Return the loads that calls wait for, for other processes."""
        return tuple(LoadRecord(content_id=one, yields_s=SET_ASIDE_S) for one in list(self._called))
