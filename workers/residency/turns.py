"""The orders to load wait in a line until it is their turn.

order ─> WaitingLine ─> advance ─(its turn)─> room is made ─> on_turn: its load begins, or is refused
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from millstream.services.placement.views import Footprint, Refusal
from millstream.services.wire.orders import Order
from millstream.services.wire.records import LoadRecord, State
from millstream.workers.batches.consumer import Consumer
from millstream.workers.models.wanted import Wanted
from millstream.workers.residency.loader import SET_ASIDE_S
from millstream.workers.residency.room_making import Answer, FitChecks, RoomMaking, Turn
from millstream.workers.residency.self_view import SelfView

log = logging.getLogger("millstream.residency")

LEAVING_MAX = 8  # orders that wait for what is leaving, before those behind them are not looked at
RECORDS_MAX = 64  # loads that wait, in the record of the worker
OnTurn = Callable[[Wanted, Order, Refusal | None, bool], None]


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
        """Return the next loads that calls wait for, for other processes; what comes later counts as after them."""
        waiting = list(self._called)[:RECORDS_MAX]
        return tuple(LoadRecord(content_id=one, yields_s=SET_ASIDE_S) for one in waiting)


class Turns:
    """Lets the loads of one worker begin in their turn. Called with the lock of its residency.

    Args:
        on_turn: begins a load, or refuses it; called with its version, its order, why it is refused (None: its memory
            is reserved), and whether calls wait for it.
    """

    def __init__(self, view: SelfView, room: RoomMaking, fit_checks: FitChecks, on_turn: OnTurn) -> None:
        self.line = WaitingLine()
        self._view = view
        self._models, self._loads = view.models, view.loads
        self._room = room
        self._fit_checks = fit_checks
        self._on_turn = on_turn

    def advance(self, consumer: Consumer | None) -> None:
        """Begin the loads whose turn it is. Raises Failure(UNAVAILABLE) without Redis.

        `consumer`: the connection of the caller's thread; None: only those begin for which memory is free.
        """
        with self._view.changed:
            before: list[Footprint] = []  # of those that wait for what is leaving
            for order, called in self.line:
                if self._has_left(order):
                    continue
                if not self._loads.takes_demanded or len(before) >= LEAVING_MAX:
                    return
                one = self._view.wanted[order.content_id]
                answer = self._make_room(one, order, consumer, before, called=called)
                if answer is Answer.OVER_QUOTA:
                    continue
                if answer is Answer.WAITS:
                    return
                if answer is Answer.LEAVING:
                    before.append(self._view.need(one.manifest))
                else:
                    self._end_wait(one, order, answer, called=called)

    def _has_left(self, order: Order) -> bool:
        """Return whether an order waits no longer: its version was removed or loaded, or its calls have given up."""
        content_id = order.content_id
        if content_id not in self.line or content_id not in self._view.wanted:
            return True
        model = self._models.get(content_id)
        is_ready = model is not None and model.state is State.READY
        if is_ready or content_id in self._loads.active():  # it was preloaded meanwhile
            self.line.remove(content_id)
            if is_ready:
                self._view.ended.append(content_id)
            return True
        if self._view.until(order) >= time.monotonic():
            return False
        log.info("not loaded: %s: the calls that it was ordered for wait no longer", content_id)
        self.line.remove(content_id)
        if model is not None and model.state is State.LOADING:
            self._models.remove(content_id)
        self._view.ended.append(content_id)
        return True

    def _end_wait(self, one: Wanted, order: Order, answer: Refusal | Answer, *, called: bool) -> None:
        if one.content_id not in self.line:  # its version was removed while this waited
            if answer is Answer.RESERVED:
                self._room.give_back(one.content_id)
            return
        self.line.remove(one.content_id)
        self._on_turn(one, order, answer if isinstance(answer, Refusal) else None, called)

    def _make_room(
        self, one: Wanted, order: Order, consumer: Consumer | None, before: list[Footprint], *, called: bool
    ) -> Refusal | Answer:
        model = self._models.get(one.content_id)
        if model is not None and model.state is State.DRAINING:
            return Answer.LEAVING  # it was stopped for another one, and its last batch runs
        check = self._fit_checks.order_of(one.content_id) is order
        put_away = set(self._view.put_away)
        answer = self._room.make(Turn(one, order, consumer, called, check), before)
        if check:
            self._fit_checks.unloaded(one.content_id, self._view.put_away - put_away)
        return answer
