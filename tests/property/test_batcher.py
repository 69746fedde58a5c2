"""The batcher against a plain list of what waits, over any order of arrivals, batches, cancellations and expiries."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.gateway.scheduling.batching.batcher import AGING_S, COMPACT_MIN, RANK_DEFAULT, RANK_MAX, Batcher
from millstream.gateway.scheduling.request import Request
from tests.kit.responders import DISCARD
from tests.kit.state_machines import machine_settings

TIMES = st.integers(0, 20)
PRIORITIES = st.sampled_from([0, 0, 1, 2, 40])
SETTINGS = machine_settings(max_examples=100, stateful_step_count=50)


def rank(request: Request) -> int:
    return min(request.priority, RANK_MAX) if request.priority else RANK_DEFAULT


class BatcherMachine(RuleBasedStateMachine):
    """`waiting`: requests with their shapes, in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher = Batcher()
        self.now = 0.0
        self.waiting: list[tuple[Request, Hashable]] = []
        self.came = 0
        self.gone: list[Request] = []

    @rule(
        rows=st.integers(0, 5),
        priority=PRIORITIES,
        timeout=TIMES,
        shape=st.sampled_from("abc"),
    )
    def add(self, rows: int, priority: int, timeout: int, shape: Hashable) -> None:
        shape = shape if self.shaped else None
        request = Request((), rows, priority, self.now, self.now + timeout, DISCARD)
        self.batcher.add(request, shape)
        self.waiting.append((request, shape))
        self.came += 1

    shaped = False

    @rule(passed=st.floats(0, 5))
    def time_passes(self, passed: float) -> None:
        self.now += passed

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request, _ = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        request.done = True
        self.batcher.discard(request)
        self.gone.append(request)

    @rule()
    def expire(self) -> None:
        late = [request for request, _ in self.waiting if request.deadline <= self.now]
        expired = self.batcher.expire(self.now)
        assert sorted(map(id, expired)) == sorted(map(id, late))
        self._left(expired)

    @rule()
    def drain(self) -> None:
        drained = self.batcher.drain()
        assert len(drained) == len(self.waiting)
        self._left(drained)

    @rule(rows_max=st.integers(1, 8))
    def take(self, rows_max: int) -> None:
        batch = self.batcher.take(self.now, rows_max)
        assert bool(batch) == bool(self.waiting)
        if not batch:
            return
        shapes = {id(request): shape for request, shape in self.waiting}
        assert len({id(request) for request in batch}) == len(batch)
        assert len({shapes[id(request)] for request in batch}) == 1
        assert sum(request.rows for request in batch) <= rows_max or len(batch) == 1
        self._check_first(batch[0])
        self._check_order(batch, shapes)
        self._check_full(batch, shapes, rows_max)
        self._left(batch)

    def _check_first(self, first: Request) -> None:
        """It is the first of its priority, and no other priority's first was more urgent, aging counted."""
        heads: dict[int, Request] = {}
        for request, _ in self.waiting:
            head = heads.get(rank(request))
            if head is None or request.deadline < head.deadline:
                heads[rank(request)] = request
        assert first is heads[rank(first)]
        urgency = {
            number: (number - (self.now - head.arrival) / AGING_S, head.deadline) for number, head in heads.items()
        }
        assert urgency[rank(first)] == min(urgency.values())

    def _check_order(self, batch: list[Request], shapes: dict[int, Hashable]) -> None:
        """Within a priority and shape no request overtakes another."""
        order = {id(request): number for number, (request, _) in enumerate(self.waiting)}
        for number in {rank(request) for request in batch}:
            taken = [request for request in batch if rank(request) == number]
            able = [r for r, shape in self.waiting if rank(r) == number and shape == shapes[id(batch[0])]]
            able.sort(key=lambda request: (request.deadline, order[id(request)]))
            assert taken == able[: len(taken)]

    def _check_full(self, batch: list[Request], shapes: dict[int, Hashable], rows_max: int) -> None:
        """There is room for another only if every other is of another shape or the next one did not fit."""
        room = rows_max - sum(request.rows for request in batch)
        left = [r for r, shape in self.waiting if shape == shapes[id(batch[0])] and r not in batch]
        assert room <= 0 or not left or any(request.rows > room for request in left)

    def _left(self, requests: list[Request]) -> None:
        out = set(map(id, requests))
        assert all(request.taken for request in requests)
        self.waiting = [(request, shape) for request, shape in self.waiting if id(request) not in out]
        self.gone += requests

    @invariant()
    def counts_are_right(self) -> None:
        assert self.batcher.count == len(self.waiting) == self.came - len(self.gone)
        assert self.batcher.rows == sum(request.rows for request, _ in self.waiting)
        oldest = min((request.arrival for request, _ in self.waiting), default=float("inf"))
        if self.waiting:
            assert self.batcher.earliest().deadline == min(request.deadline for request, _ in self.waiting)
        assert self.batcher.oldest_arrival() == oldest

    @rule(priority=PRIORITIES, timeout=TIMES)
    def ask_what_is_ahead(self, priority: int, timeout: int) -> None:
        asker = Request((), 1, priority, self.now, self.now + timeout, DISCARD)
        mine = (rank(asker), asker.deadline)
        ahead = [r.rows for r, _ in self.waiting if rank(r) < mine[0] or (rank(r) == mine[0] and r.deadline <= mine[1])]
        assert self.batcher.rows_ahead(priority, asker.deadline) == sum(ahead)

    def teardown(self) -> None:
        """Nothing is lost: whatever waits comes out."""
        while batch := self.batcher.take(self.now, 4):
            self._left(batch)
        assert (self.waiting, self.came) == ([], len(self.gone))
        assert all(not level.order and not level.by_shape for level in self.batcher._levels.values())


class ShapedBatcherMachine(BatcherMachine):
    shaped = True


TestUniform = pytest.mark.state_machine(BatcherMachine.TestCase)
TestUniform.settings = SETTINGS
TestShaped = pytest.mark.state_machine(ShapedBatcherMachine.TestCase)
TestShaped.settings = SETTINGS


@given(low=st.integers(2, RANK_MAX), above=st.integers(1, RANK_MAX - 1), rate=st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_nothing_starves_however_much_more_urgent_work_comes(low: int, above: int, rate: int) -> None:
    """More of a higher priority than is taken: a request waits no longer than the difference takes to age."""
    high = max(1, low - above)
    batcher = Batcher()
    one = Request((), 1, low, 0.0, 1e9, DISCARD)
    batcher.add(one, None)
    now, step = 0.0, 0.25 * AGING_S
    while not one.taken:
        for _ in range(rate):
            batcher.add(Request((), 1, high, now, now + 1, DISCARD), None)
        batcher.expire(now)
        batcher.take(now, 1)
        now += step
        assert now <= (low - high + 2) * AGING_S


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.booleans()), max_size=60),
    st.sampled_from([None, 1, 7]),
)
@settings(deadline=None, derandomize=True)
def test_memory_is_bounded_by_what_waits(script: list[tuple[int, int, bool]], shapes: int | None) -> None:
    """Bursts of requests of which some are cancelled and some are taken, many times over."""
    batcher = Batcher()
    bound = 0
    for number, (priority, burst, takes) in enumerate(script * 20):
        requests = [Request((), 1, priority, 0.0, float(k * 37 % 11), DISCARD) for k in range(burst)]
        for k, request in enumerate(requests):
            batcher.add(request, None if shapes is None else (k + number) % shapes)
        bound = max(bound, 3 * batcher.count + COMPACT_MIN)
        for request in requests[::2]:
            request.done = True
            batcher.discard(request)
        if takes:
            batcher.take(0.0, 16)
        shelves = batcher._levels.values()
        assert sum(len(level.order) for level in shelves) <= bound + burst
        assert sum(len(heap) for level in shelves for heap in level.by_shape.values()) <= bound + burst
        assert len(batcher._shapes) <= batcher.count
