"""Which waiting requests run together, and which first. Pure: no clock, no I/O; time is passed in.

Order: earliest deadline first within a priority. Priorities age: for every `aging_s` that the first request of a
priority has waited it counts as one priority higher, so nothing starves. Requests of one batch have equal shapes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from millstream.gateway.scheduling.request import Request

RANK_DEFAULT = 16  # of requests that name no priority; priority 1 is the highest
RANK_MAX = 32
DELAYED = -1  # the priority of requests that wait behind all others, however long
_RANK_DELAYED = 1 << 20  # no aging gets from there to the others
AGING_S = 1.0
COMPACT_MIN = 256
COUNTED_MAX = 256

_Entry = tuple[float, int, Request]


class _Line:
    """Requests by deadline, at equal ones in the order they came.

    Deadlines mostly rise as requests come: then this is a queue. Only those that are out of turn go to a heap.
    """

    __slots__ = ("heap", "queue")

    def __init__(self) -> None:
        self.queue: deque[_Entry] = deque()
        self.heap: list[_Entry] = []

    def push(self, entry: _Entry) -> None:
        queue = self.queue
        if not queue or entry[0] >= queue[-1][0]:
            queue.append(entry)
        else:
            heapq.heappush(self.heap, entry)

    def head(self) -> Request | None:
        """The first one that still waits; those before it that left are forgotten."""
        queue, heap = self.queue, self.heap
        while queue and _left(queue[0]):
            queue.popleft()
        while heap and _left(heap[0]):
            heapq.heappop(heap)
        if heap and not (queue and queue[0] < heap[0]):
            return heap[0][2]
        return queue[0][2] if queue else None

    def pop(self) -> None:
        """Forget the head, just found."""
        if self.heap and not (self.queue and self.queue[0] < self.heap[0]):
            heapq.heappop(self.heap)
        else:
            self.queue.popleft()

    def rows_until(self, deadline: float) -> int | None:
        """Rows that wait with this deadline or an earlier one; None if these are all, or too many to count."""
        queue, heap = self.queue, self.heap
        if not heap and (not queue or queue[-1][0] <= deadline):
            return None
        counted = [entry for entry in itertools.islice(queue, COUNTED_MAX) if entry[0] <= deadline]
        at = [0] if heap else []
        for i in at:  # a heap's entries are no earlier than the one above them
            if heap[i][0] <= deadline and len(counted) < COUNTED_MAX:
                counted.append(heap[i])
                at += [child for child in (2 * i + 1, 2 * i + 2) if child < len(heap)]
        return None if len(counted) >= COUNTED_MAX else sum([entry[2].rows for entry in counted if not _left(entry)])

    def compact(self) -> None:
        """Forget all that left."""
        self.queue = deque(entry for entry in self.queue if not _left(entry))
        self.heap = [entry for entry in self.heap if not _left(entry)]
        heapq.heapify(self.heap)

    def clear(self) -> None:
        self.queue.clear()
        self.heap.clear()

    def __len__(self) -> int:
        return len(self.queue) + len(self.heap)

    def __iter__(self) -> Iterator[_Entry]:
        return itertools.chain(self.queue, self.heap)


def _left(entry: _Entry) -> bool:
    request = entry[2]
    return request.taken or request.done


def _rank(priority: int, largest: int) -> int:
    if priority < 0:
        return _RANK_DELAYED
    return min(priority, largest) if priority else RANK_DEFAULT


class _Shelf:
    """The waiting requests of one priority: by deadline, and by deadline within each shape."""

    __slots__ = ("by_shape", "order", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.order = _Line()
        self.by_shape: dict[Hashable, _Line] = {}

    def push(self, entry: _Entry, shape: Hashable) -> None:
        self.order.push(entry)
        if shape is not None:
            line = self.by_shape.get(shape)
            if line is None:
                line = self.by_shape[shape] = _Line()
            line.push(entry)

    def compact(self) -> None:
        """Forget entries whose requests have left."""
        self.order.compact()
        for shape, line in list(self.by_shape.items()):
            line.compact()
            if not line:
                del self.by_shape[shape]

    def clear(self) -> None:
        self.order.clear()
        self.by_shape.clear()


class Batcher:
    """Requests of one version that wait for a slot. A request is in it from `add` until `take`, `expire` or `discard`.

    Who leaves is not looked for in the lines: its entries go when they come to the front, when they outnumber those of
    the waiting requests, and when nothing waits. `rank_max`: larger priorities count as this one.
    """

    def __init__(self, aging_s: float = AGING_S, rank_max: int = RANK_MAX) -> None:
        self.rows = 0  # of all requests that wait
        self.count = 0
        self._aging_s = aging_s
        self._rank_max = rank_max
        self._shelves: dict[int, _Shelf] = {}
        self._shapes: dict[int, Hashable] = {}
        self._numbers = itertools.count()
        self._left = 0  # requests that left since the lines had entries of waiting ones alone: a bound on the others

    def add(self, request: Request, shape: Hashable) -> None:
        """`shape`: equal for requests that may share a batch; None where all requests of the version have one shape."""
        rank = _rank(request.priority, self._rank_max)
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
        shelf.rows += request.rows
        self.rows += request.rows
        self.count += 1

    def discard(self, request: Request) -> None:
        """A waiting request was answered or cancelled (its `done` is set): it counts no more, its tensors are let go."""
        self._leave((request,))
        request.inputs = ()

    def _leave(self, requests: Sequence[Request]) -> None:
        rows = sum([request.rows for request in requests])
        self.rows -= rows
        if len(self._shelves) == 1:
            for shelf in self._shelves.values():
                shelf.rows -= rows
        else:
            for request in requests:
                self._shelves[_rank(request.priority, self._rank_max)].rows -= request.rows
        self.count -= len(requests)
        self._left += len(requests)
        if self._shapes:
            for request in requests:
                self._shapes.pop(id(request), None)
        if not self.count:
            for shelf in self._shelves.values():
                shelf.clear()
            self._left = 0

    def earliest(self) -> Request:
        """The request that waits with the earliest deadline. Raises ValueError when none waits."""
        heads = [head for shelf in self._shelves.values() if (head := shelf.order.head()) is not None]
        return heads[0] if len(heads) == 1 else min(heads, key=lambda head: head.deadline)

    def rows_ahead(self, priority: int, deadline: float) -> int:
        """Rows that would come before a request: of higher priority, and of its own those with no later deadline.

        Aging is not looked at. More than COUNTED_MAX requests are not counted: then it is all rows of its priority.
        """
        rank = _rank(priority, self._rank_max)
        ahead = 0
        for other, shelf in self._shelves.items():
            if other < rank:
                ahead += shelf.rows
            elif other == rank:
                counted = shelf.order.rows_until(deadline)
                ahead += shelf.rows if counted is None else counted
        return ahead

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
            head = shelf.order.head()
            if head is None:
                continue
            if not batch:
                shape = self._shapes.get(id(head))
            line = shelf.order if shape is None else shelf.by_shape.get(shape)
            if line is None:
                continue
            room = _fill(batch, line, room)
            if shape is not None and not line:
                del shelf.by_shape[shape]
            if room <= 0:
                break
        self._leave(batch)
        return batch

    def _by_urgency(self, now: float) -> list[_Shelf]:
        if len(self._shelves) == 1:
            return list(self._shelves.values())
        ranked: list[tuple[float, float, _Shelf]] = []
        for rank, shelf in list(self._shelves.items()):
            head = shelf.order.head()
            if head is None:
                del self._shelves[rank]
            else:
                ranked.append((rank - (now - head.arrival) / self._aging_s, head.deadline, shelf))
        ranked.sort(key=lambda item: item[:2])
        return [shelf for _, _, shelf in ranked]

    def expire(self, now: float) -> list[Request]:
        """Take out every waiting request whose deadline has passed."""
        expired: list[Request] = []
        for shelf in self._shelves.values():
            while (head := shelf.order.head()) is not None and head.deadline <= now:
                shelf.order.pop()
                head.taken = True
                self._leave((head,))
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


def _fill(batch: list[Request], line: _Line, room: int) -> int:
    """Move requests from a line to the batch while they fit; returns the rows that are left, 0 when one did not fit."""
    queue = line.queue
    while queue or line.heap:
        if line.heap:
            head = line.head()
            if head is None:
                break
            request = head
        else:
            request = queue[0][2]
            if request.taken or request.done:
                queue.popleft()
                continue
        rows = request.rows
        if batch and rows > room:
            return 0
        if line.heap:
            line.pop()
        else:
            queue.popleft()
        request.taken = True
        batch.append(request)
        room -= rows
        if room <= 0:
            return 0
    return room
