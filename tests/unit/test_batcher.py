"""Which requests share a batch, and in which order, one rule at a time."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from millstream.gateway.scheduling.batching.batcher import AGING_S, COMPACT_MIN, RANK_DEFAULT, Batcher, _PriorityLevel
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import InputTensor
from tests.kit.responders import DISCARD

TENSORS = (InputTensor((1,), b"data", 4),)
FAR = 1e9


def request(rows: int = 1, deadline: float = FAR, priority: int = 0, arrival: float = 0.0) -> Request:
    return Request(TENSORS, rows, priority, arrival, deadline, DISCARD)


def filled(*requests: Request, shape: Hashable = None) -> Batcher:
    batcher = Batcher()
    for one in requests:
        batcher.add(one, shape)
    return batcher


def entries(batcher: Batcher) -> int:
    """Entries in all heaps, those of requests that left among them."""
    shelves = batcher._levels.values()
    return sum(len(level.order) + sum(map(len, level.by_shape.values())) for level in shelves)


def test_an_empty_batcher_has_nothing():
    batcher = Batcher()
    assert batcher.take(0, 8) == []
    assert (batcher.expire(FAR), batcher.drain()) == ([], [])
    assert batcher.oldest_arrival() == float("inf")
    with pytest.raises(ValueError, match="empty"):
        batcher.earliest()


def test_the_earliest_deadline_comes_first_whenever_it_came():
    late, early, soon = request(deadline=3), request(deadline=1), request(deadline=2)
    batcher = filled(late, early, soon)
    assert batcher.earliest().deadline == 1
    assert batcher.take(0, 2) == [early, soon]
    assert batcher.take(0, 2) == [late]


def test_equal_deadlines_leave_in_the_order_of_their_arrival():
    requests = [request() for _ in range(20)]
    assert filled(*requests).take(0, 20) == requests


def test_a_batch_has_at_most_the_rows_it_may():
    four, three, two = request(4, 1), request(3, 2), request(2, 3)
    batcher = filled(four, three, two)
    assert (batcher.rows, batcher.count) == (9, 3)
    assert batcher.take(0, 6) == [four]  # the one behind it does not fit, and none overtakes it
    assert batcher.take(0, 6) == [three, two]
    assert (batcher.rows, batcher.count) == (0, 0)


def test_a_request_larger_than_a_batch_runs_alone():
    small, large, other = request(1, 1), request(100, 2), request(1, 3)
    batcher = filled(small, large, other)
    assert [batcher.take(0, 8) for _ in range(3)] == [[small], [large], [other]]


def test_requests_without_rows_take_no_room():
    requests = [request(0, 1), request(8, 2), request(0, 3)]
    batcher = filled(*requests)
    assert batcher.take(0, 8) == requests[:2]
    assert batcher.take(0, 8) == requests[2:]


def test_only_equal_shapes_share_a_batch():
    batcher = Batcher()
    requests = [request(deadline=number) for number in range(6)]
    for number, one in enumerate(requests):
        batcher.add(one, (number % 2,))
    assert batcher.take(0, 8) == requests[::2]
    assert batcher.take(0, 8) == requests[1::2]


def test_equal_shapes_of_a_lower_priority_fill_the_batch():
    batcher = Batcher()
    first, other, same = request(priority=1), request(priority=2, deadline=1), request(priority=3)
    for one, shape in ((first, "a"), (other, "b"), (same, "a")):
        batcher.add(one, shape)
    assert batcher.take(0, 8) == [first, same]
    assert batcher.take(0, 8) == [other]


def test_priority_comes_before_deadline():
    low, none, high = request(priority=RANK_DEFAULT + 1, deadline=1), request(deadline=2), request(priority=1)
    batcher = filled(low, none, high)
    assert [batcher.take(0, 1) for _ in range(3)] == [[high], [none], [low]]


@pytest.mark.parametrize(("waited_s", "first"), [(0.9 * AGING_S, "high"), (1.1 * AGING_S, "low")])
def test_what_waited_counts_as_a_higher_priority(waited_s, first):
    low, high = request(priority=3), request(priority=2, arrival=waited_s)
    assert filled(low, high).take(waited_s, 1) == [{"low": low, "high": high}[first]]


def test_very_low_priorities_are_one():
    batcher = filled(request(priority=32, deadline=2), request(priority=2**31 - 1, deadline=1))
    assert [one.deadline for one in batcher.take(0, 8)] == [1, 2]


def test_what_expired_is_taken_out():
    requests = [request(2, deadline, priority) for deadline in (1, 2, 3) for priority in (1, 2)]
    batcher = filled(*requests)
    expired = batcher.expire(2)
    assert set(expired) == set(requests[:4])
    assert (batcher.count, batcher.rows) == (2, 4)
    assert all(one.taken for one in expired)
    assert batcher.take(2, 8) == requests[4:]
    assert requests[4].inputs is TENSORS


def test_what_was_cancelled_never_runs_and_its_tensors_are_let_go():
    requests = [request(3, deadline) for deadline in (1, 2, 3)]
    batcher = filled(*requests)
    for one in requests[:2]:
        one.done = True
        batcher.discard(one)
    assert (batcher.count, batcher.rows, batcher.earliest().deadline) == (1, 3, 3)
    assert requests[0].inputs == ()
    assert batcher.take(0, 100) == requests[2:]


def test_draining_takes_everything():
    requests = [request(deadline=deadline) for deadline in (5, FAR, float("inf"))]
    batcher = filled(*requests)
    assert batcher.drain() == requests
    assert (batcher.count, batcher.rows, batcher.take(0, 8)) == (0, 0, [])


def test_the_oldest_arrival_is_of_all_that_wait_not_of_the_most_urgent():
    old, urgent = request(deadline=9, arrival=1), request(deadline=2, arrival=5)
    batcher = filled(old, urgent)
    assert batcher.oldest_arrival() == 1
    assert batcher.take(5, 1) == [urgent]
    assert batcher.oldest_arrival() == 1
    old.done = True
    batcher.discard(old)
    assert batcher.oldest_arrival() == float("inf")


@pytest.mark.parametrize("how", ["cancelled", "expired"])
@pytest.mark.parametrize("shaped", [False, True])
def test_what_never_runs_leaves_no_memory_behind(how, shaped):
    batcher = Batcher()
    batcher.add(request(), "stays" if shaped else None)
    for number in range(5000):
        one = request(deadline=number)
        batcher.add(one, f"shape {number}" if shaped else None)
        if how == "expired":
            assert batcher.expire(number) == [one]
        else:
            one.done = True
            batcher.discard(one)
    assert batcher.count == 1
    assert entries(batcher) <= 2 * (COMPACT_MIN + 6)
    assert sum(len(level.by_shape) for level in batcher._levels.values()) <= COMPACT_MIN + 6
    assert len(batcher._shapes) == shaped


def test_tidying_up_costs_little_for_each_that_left(monkeypatch):
    tidied: list[int] = []
    compact = _PriorityLevel.compact

    def counted(level: _PriorityLevel) -> None:
        tidied.append(len(level.order))
        compact(level)

    monkeypatch.setattr(_PriorityLevel, "compact", counted)
    batcher = filled(*(request(deadline=FAR + 1) for _ in range(100)))
    for number in range(10_000):
        one = request(deadline=number)
        batcher.add(one, None)
        one.done = True
        batcher.discard(one)
    assert 0 < sum(tidied) <= 2 * 10_000


def test_an_empty_batcher_keeps_no_request():
    batcher = Batcher()
    for number in range(10):
        batcher.add(request(deadline=number), number % 3)
    while batcher.take(0, 4):
        pass
    assert entries(batcher) == 0
    cancelled = request()
    batcher.add(cancelled, None)
    cancelled.done = True
    batcher.discard(cancelled)
    assert entries(batcher) == 0
