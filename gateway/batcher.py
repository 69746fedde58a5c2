"""Which waiting requests run together, and which first. Pure: no clock, no I/O; time is passed in.

Order: earliest deadline first within a priority. Priorities age: for every `aging_s` that the first request of a
priority has waited it counts as one priority higher, so nothing starves. Requests of one batch have equal shapes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable

from gateway.request import Request

RANK_DEFAULT = 16  # of requests that name no priority; priority 1 is the highest
RANK_MAX = 32
AGING_S = 1.0
COMPACT_MIN = 256

_Entry = tuple[float, int, Request]


class _Shelf:
    """The waiting requests of one priority: by deadline, and by deadline within each shape."""

    __slots__ = ("by_shape", "order")

    def __init__(self) -> None:
        self.order: list[_Entry] = []
        self.by_shape: dict[Hashable, list[_Entry]] = {}

    def push(self, entry: _Entry, shape: Hashable) -> None:
        heapq.heappush(self.order, entry)
        if shape is not None:
            heapq.heappush(self.by_shape.setdefault(shape, []), entry)

    def head(self) -> Request | None:
        """The request with the earliest deadline that still waits."""
        order = self.order
        while order:
            request = order[0][2]
            if not (request.taken or request.done):
                return request
            heapq.heappop(order)
        return None

    def compact(self) -> None:
        """Forget entries whose requests have left."""
        self.order = [entry for entry in self.order if not (entry[2].taken or entry[2].done)]
        heapq.heapify(self.order)
        for shape, heap in list(self.by_shape.items()):
            kept = [entry for entry in heap if not (entry[2].taken or entry[2].done)]
            heapq.heapify(kept)
            if kept:
                self.by_shape[shape] = kept
            else:
                del self.by_shape[shape]


class Batcher:
    """Requests of one version that wait for a slot. A request is in it from `add` until `take`, `expire` or `discard`.

    Who leaves is not looked for in the heaps: its entries go when they come to the front, when they outnumber those of
    the waiting requests, and when nothing waits.
    """

    def __init__(self, aging_s: float = AGING_S) -> None:
        self.rows = 0  # of all requests that wait
        self.count = 0
        self._aging_s = aging_s
        self._shelves: dict[int, _Shelf] = {}
        self._shapes: dict[int, Hashable] = {}
        self._numbers = itertools.count()
        self._left = 0  # requests that left since the heaps had entries of waiting ones alone: a bound on the others

    def add(self, request: Request, shape: Hashable) -> None:
        """`shape`: equal for requests that may share a batch; None where all requests of the version have one shape."""
        rank = min(request.priority, RANK_MAX) if request.priority else RANK_DEFAULT
        shelf = self._shelves.get(rank)
        if shelf is None:
            shelf = self._shelves[rank] = _Shelf()
        shelf.push((request.deadline, next(self._numbers), request), shape)
        if self._left > 2 * self.count + COMPACT_MIN:
            for other in self._shelves.values():
                other.compact()
            self._left = 0
        if shape is not None:
            self._shapes[id(request)] = shape
        self.rows += request.rows
        self.count += 1

    def discard(self, request: Request) -> None:
        """A waiting request was answered or cancelled (its `done` is set): it counts no more, its tensors are let go."""
        self._leave(request)
        request.inputs = ()

    def _leave(self, request: Request) -> None:
        self.rows -= request.rows
        self.count -= 1
        self._left += 1
        self._shapes.pop(id(request), None)
        if not self.count:
            for shelf in self._shelves.values():
                shelf.order.clear()
                shelf.by_shape.clear()
            self._left = 0

    def earliest_deadline(self) -> float:
        """Of all waiting requests; infinity when nothing waits."""
        earliest = float("inf")
        for shelf in self._shelves.values():
            head = shelf.head()
            if head is not None and head.deadline < earliest:
                earliest = head.deadline
        return earliest

    def take(self, now: float, rows_max: int) -> list[Request]:
        """The next batch: at most `rows_max` rows, but at least one request if any waits. Expired ones are not in it.

        `now` decides the aging alone. Requests past their deadline must have been taken out with `expire` before.
        """
        if not self.count:
            return []
        batch: list[Request] = []
        room = rows_max
        shape: Hashable = None
        for shelf in self._by_urgency(now):
            head = shelf.head()
            if head is None:
                continue
            if not batch:
                shape = self._shapes.get(id(head))
            heap = shelf.order if shape is None else shelf.by_shape.get(shape, [])
            room = self._fill(batch, heap, room)
            if shape is not None and not heap:
                shelf.by_shape.pop(shape, None)
            if room <= 0:
                break
        return batch

    def _fill(self, batch: list[Request], heap: list[_Entry], room: int) -> int:
        """Move requests from a heap to the batch while they fit; returns the rows that are left, 0 when one did not fit."""
        while heap:
            request = heap[0][2]
            if request.taken or request.done:
                heapq.heappop(heap)
                continue
            if batch and request.rows > room:
                return 0
            heapq.heappop(heap)
            request.taken = True
            self._leave(request)
            batch.append(request)
            room -= request.rows
            if room <= 0:
                return 0
        return room

    def _by_urgency(self, now: float) -> list[_Shelf]:
        if len(self._shelves) == 1:
            return list(self._shelves.values())
        ranked: list[tuple[float, float, _Shelf]] = []
        for rank, shelf in list(self._shelves.items()):
            head = shelf.head()
            if head is None:
                del self._shelves[rank]
            else:
                ranked.append((rank - (now - head.arrival) / self._aging_s, head.deadline, shelf))
        ranked.sort(key=lambda item: item[:2])
        return [shelf for _, _, shelf in ranked]

    def expire(self, now: float) -> list[Request]:
        """Take out every waiting request whose deadline has passed; nobody will run them, so their tensors are let go."""
        expired: list[Request] = []
        for shelf in self._shelves.values():
            while (head := shelf.head()) is not None and head.deadline <= now:
                heapq.heappop(shelf.order)
                head.taken = True
                self.discard(head)
                expired.append(head)
        return expired

    def drain(self) -> list[Request]:
        """Take out everything that waits."""
        return self.expire(float("inf"))

    def oldest_arrival(self) -> float:
        """When the first request arrived of all that wait; infinity when nothing waits. Looks at every one."""
        waiting = (entry[2] for shelf in self._shelves.values() for entry in shelf.order)
        arrivals = (request.arrival for request in waiting if not (request.taken or request.done))
        return min(arrivals, default=float("inf"))
