"""The order in which the orders of a worker wait for their turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.wire.orders import Order
from millstream.workers.residency.turns import RECORDS_MAX, WaitingLine


def order(content_id: str, deadline: float = 0.0) -> Order:
    return Order(do="load", content_id=content_id, why="a call", deadline=deadline)


def waiting(line: WaitingLine) -> list[tuple[str, float, bool]]:
    return [(one.content_id, one.deadline, called) for one, called in line]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans())))
def test_calls_come_oldest_first_and_before_all_others_however_often_they_are_told(orders):
    line = WaitingLine()
    for name, called in orders:
        line.add(order(name), called=called)
    calls = list(dict.fromkeys(name for name, called in orders if called))
    others = [name for name in dict.fromkeys(name for name, _ in orders) if name not in calls]
    assert [(name, called) for name, _, called in waiting(line)] == [
        *((name, True) for name in calls),
        *((name, False) for name in sorted(others, key=[name for name, _ in orders].index)),
    ]


def test_an_order_that_comes_again_keeps_its_place_and_waits_for_longer():
    line = WaitingLine()
    line.add(order("a", 5.0), called=True)
    line.add(order("b", 9.0), called=True)
    line.add(order("a", 8.0), called=True)
    line.add(order("b", 6.0), called=True)
    assert waiting(line) == [("a", 8.0, True), ("b", 9.0, True)]
    line.add(order("a"), called=True)
    line.add(order("a", 99.0), called=True)
    assert waiting(line) == [("a", 0.0, True), ("b", 9.0, True)], "the one without a deadline waits on"


def test_a_load_that_found_no_memory_is_tried_again_before_all_others():
    line = WaitingLine()
    for name in "ab":
        line.add(order(name), called=True)
    line.add(order("c"), called=True, first=True)
    assert [name for name, _, _ in waiting(line)] == ["c", "a", "b"]
    line.remove("a")
    line.remove("unknown")
    assert [name for name, _, _ in waiting(line)] == ["c", "b"]
    assert line.content_ids() == {"b", "c"}


def test_the_record_of_a_worker_stays_small():
    line = WaitingLine()
    for number in range(1000):
        line.add(order(f"m{number}"), called=True)
    assert [one.content_id for one in line.records()] == [f"m{number}" for number in range(RECORDS_MAX)]
    assert line
    assert "m999" in line
