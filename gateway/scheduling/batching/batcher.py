"""Chooses which waiting requests run together, and in which order. Pure: the caller passes the time in.

Order: earliest deadline first within a priority; parts of a request have later turns (scheduling/split_requests.py).
Priorities age: for each `aging_s` that the first request of a priority has waited, it counts one priority higher, so
that no priority starves. Requests of a batch have equal shapes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from millstream.gateway.scheduling.request import Request

RANK_DEFAULT = 16  # rank of requests that name no priority; priority 1 is the highest
RANK_MAX = 32  # larger priorities count as this one
DELAYED = -1  # priority of requests that wait behind all others and do not age
_RANK_DELAYED = 1 << 20  # rank of delayed requests, so large that aging cannot bring them forward
AGING_S = 1.0
COMPACT_MIN = 256  # stale entries below which the queues are not compacted
COUNTED_MAX = 256  # requests that `rows_ahead` counts one by one; beyond that it returns a bound

_Entry = tuple[float, int, Request]


class _DeadlineQueue:
    """Requests by deadline; requests with equal deadlines in the order of their arrival.

    Deadlines mostly rise with arrival, so most requests go to a queue. Those that are out of order go to a heap.
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
        """Return the first request that still waits, and drop the stale entries before it."""
        queue, heap = self.queue, self.heap
        while queue and _is_stale(queue[0]):
            queue.popleft()
        while heap and _is_stale(heap[0]):
            heapq.heappop(heap)
        if heap and not (queue and queue[0] < heap[0]):
            return heap[0][2]
        return queue[0][2] if queue else None

    def pop(self) -> None:
        """Drop the entry of the request that `head` returned."""
        if self.heap and not (self.queue and self.queue[0] < self.heap[0]):
            heapq.heappop(self.heap)
        else:
            self.queue.popleft()

    def rows_until(self, deadline: float) -> int | None:
        """Return the rows that wait until `deadline` or earlier; None if that is all rows, or too many to count."""
        queue, heap = self.queue, self.heap
        if not heap and (not queue or queue[-1][0] <= deadline):
            return None
        counted = [entry for entry in itertools.islice(queue, COUNTED_MAX) if entry[0] <= deadline]
        at = [0] if heap else []
        for i in at:  # a child in the heap is no earlier than its parent
            if heap[i][0] <= deadline and len(counted) < COUNTED_MAX:
                counted.append(heap[i])
                at += [child for child in (2 * i + 1, 2 * i + 2) if child < len(heap)]
        return (
            None if len(counted) >= COUNTED_MAX else sum([entry[2].rows for entry in counted if not _is_stale(entry)])
        )

    def waiting(self) -> Iterator[Request]:
        """Yield the requests that still wait, in order."""
        entries = heapq.merge(self.queue, sorted(self.heap)) if self.heap else iter(self.queue)
        return (entry[2] for entry in entries if not _is_stale(entry))

    def compact(self) -> None:
        """Drop stale entries."""
        self.queue = deque(entry for entry in self.queue if not _is_stale(entry))
        self.heap = [entry for entry in self.heap if not _is_stale(entry)]
        heapq.heapify(self.heap)

    def clear(self) -> None:
        self.queue.clear()
        self.heap.clear()

    def __len__(self) -> int:
        return len(self.queue) + len(self.heap)

    def __iter__(self) -> Iterator[_Entry]:
        return itertools.chain(self.queue, self.heap)


def _is_stale(entry: _Entry) -> bool:
    request = entry[2]
    return request.taken or request.done


def _rank(priority: int, largest: int) -> int:
    if priority < 0:
        return _RANK_DELAYED
    return min(priority, largest) if priority else RANK_DEFAULT


class _PriorityLevel:
    """The waiting requests of one priority, by deadline, and by deadline within each shape."""

    __slots__ = ("by_shape", "order", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.order = _DeadlineQueue()
        self.by_shape: dict[Hashable, _DeadlineQueue] = {}

    def push(self, entry: _Entry, shape: Hashable) -> None:
        self.order.push(entry)
        if shape is not None:
            line = self.by_shape.get(shape)
            if line is None:
                line = self.by_shape[shape] = _DeadlineQueue()
            line.push(entry)

    def compact(self) -> None:
        """Drop stale entries."""
        self.order.compact()
        for shape, line in list(self.by_shape.items()):
            line.compact()
            if not line:
                del self.by_shape[shape]

    def clear(self) -> None:
        self.order.clear()
        self.by_shape.clear()


class Batcher:
    """The waiting requests of one version. A request waits from `add` until `take`, `expire`, `drain` or `discard`.

    Entries of a request that no longer waits are stale. They are removed lazily: when they reach the front, when they
    outnumber the other entries, and when no request waits.

    Args:
        aging_s: seconds of waiting after which a priority counts as the next higher one.
        rank_max: larger priorities count as this one.
    """

    def __init__(self, aging_s: float = AGING_S, rank_max: int = RANK_MAX) -> None:
        self.rows = 0  # rows of all waiting requests
        self.count = 0
        self._aging_s = aging_s
        self._rank_max = rank_max
        self._levels: dict[int, _PriorityLevel] = {}
        self._shapes: dict[int, Hashable] = {}
        self._numbers = itertools.count()
        self._stale_max = 0  # upper bound on the stale entries, counted since the last compaction

    def add(self, request: Request, shape: Hashable) -> None:
        """Queue a request. `shape` is equal for requests that may share a batch; None: all requests may."""
        rank = _rank(request.priority, self._rank_max)
        level = self._levels.get(rank)
        if level is None:
            level = self._levels[rank] = _PriorityLevel()
        turn = request.deadline if request.turn is None else request.turn
        level.push((turn, next(self._numbers), request), shape)
        if self._stale_max > 2 * self.count + COMPACT_MIN:
            for other in self._levels.values():
                other.compact()
            self._stale_max = 0
        if shape is not None:
            self._shapes[id(request)] = shape
        level.rows += request.rows
        self.rows += request.rows
        self.count += 1

    def discard(self, request: Request) -> None:
        """Remove a waiting request that is done (answered or cancelled), and free its tensors."""
        self._remove((request,))
        request.inputs = ()

    def _remove(self, requests: Sequence[Request]) -> None:
        rows = sum([request.rows for request in requests])
        self.rows -= rows
        if len(self._levels) == 1:
            for level in self._levels.values():
                level.rows -= rows
        else:
            for request in requests:
                self._levels[_rank(request.priority, self._rank_max)].rows -= request.rows
        self.count -= len(requests)
        self._stale_max += len(requests)
        if self._shapes:
            for request in requests:
                self._shapes.pop(id(request), None)
        if not self.count:
            for level in self._levels.values():
                level.clear()
            self._stale_max = 0

    def earliest(self) -> Request:
        """Return the waiting request with the earliest deadline. Raises ValueError when no request waits."""
        heads = [head for level in self._levels.values() if (head := level.order.head()) is not None]
        return heads[0] if len(heads) == 1 else min(heads, key=lambda head: head.deadline)

    def rows_ahead(self, priority: int, deadline: float) -> int:
        """Return the rows ahead of a request: of higher priorities, and of its priority with no later deadline.

        Ignores aging. If more than COUNTED_MAX requests had to be counted, all rows of its priority count.
        """
        rank = _rank(priority, self._rank_max)
        ahead = 0
        for other, level in self._levels.items():
            if other < rank:
                ahead += level.rows
            elif other == rank:
                counted = level.order.rows_until(deadline)
                ahead += level.rows if counted is None else counted
        return ahead

    def take(self, now: float, rows_max: int) -> list[Request]:
        """Remove and return the next batch: at most `rows_max` rows, but at least one request if any waits.

        `now` is used only for aging. Call `expire` first: requests past their deadline are not skipped.
        """
        if not self.count:
            return []
        batch: list[Request] = []
        room = rows_max
        for level, shape in self._lines(now):
            line = level.order if shape is None else level.by_shape[shape]
            room = _fill(batch, line, room)
            if shape is not None and not line:
                del level.by_shape[shape]
            if room <= 0:
                break
        self._remove(batch)
        return batch

    def sums(self, now: float, rows_max: int) -> list[int]:
        """Return the rows of the first, the first two, … requests of the next batch. `take` would take all of them.

        Args:
            now: as for `take`.
            rows_max: the most rows of the batch. A first request with more rows is counted all the same.
        """
        sums: list[int] = []
        for level, shape in self._lines(now):
            for request in (level.order if shape is None else level.by_shape[shape]).waiting():
                rows = request.rows + (sums[-1] if sums else 0)
                if sums and rows > rows_max:
                    return sums
                sums.append(rows)
        return sums

    def _lines(self, now: float) -> Iterator[tuple[_PriorityLevel, Hashable]]:
        """Yield the levels whose requests may join the next batch, the most urgent first, and the shape they have."""
        first, shape = True, None
        for level in self._by_urgency(now):
            head = level.order.head()
            if head is None:
                continue
            if first:
                first, shape = False, self._shapes.get(id(head))
            if shape is None or shape in level.by_shape:
                yield level, shape

    def _by_urgency(self, now: float) -> list[_PriorityLevel]:
        if len(self._levels) == 1:
            return list(self._levels.values())
        ranked: list[tuple[float, float, _PriorityLevel]] = []
        for rank, level in list(self._levels.items()):
            head = level.order.head()
            if head is None:
                del self._levels[rank]
            else:
                ranked.append((rank - (now - head.arrival) / self._aging_s, head.deadline, level))
        ranked.sort(key=lambda item: item[:2])
        return [level for _, _, level in ranked]

    def expire(self, now: float) -> list[Request]:
        """Remove and return every waiting request whose deadline has passed."""
        expired: list[Request] = []
        for level in self._levels.values():
            while (head := level.order.head()) is not None and head.deadline <= now:
                level.order.pop()
                head.taken = True
                self._remove((head,))
                expired.append(head)
        return expired

    def drain(self) -> list[Request]:
        """Remove and return all waiting requests."""
        return self.expire(float("inf"))

    def oldest_arrival(self) -> float:
        """Return the earliest arrival of the waiting requests, infinity if none waits. Visits all of them."""
        return min(self.arrivals(), default=float("inf"))

    def arrivals(self) -> Iterator[float]:
        """Yield the arrivals of the waiting requests."""
        waiting = (entry[2] for level in self._levels.values() for entry in level.order)
        return (request.arrival for request in waiting if not (request.taken or request.done))


def _fill(batch: list[Request], line: _DeadlineQueue, room: int) -> int:
    """Move requests to the batch while they fit. Returns the rows that are still free, 0 once a request did not fit."""
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
