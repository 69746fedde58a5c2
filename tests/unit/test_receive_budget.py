"""What one caller may let a gateway receive leaves a part for all others, for any callers and bodies."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.connection.budgets import SMALL_BYTES_MAX, BodyReservation, ReceiveBudget
from millstream.services.errors import Code, Failure

MIB = 1 << 20
MAX = 64 * MIB


def stall(budget: ReceiveBudget, caller: str, body_bytes: int) -> list[BodyReservation]:
    """Let a caller send bodies without end that stall when they are refused; return those that are held."""
    held: list[BodyReservation] = []
    for _ in range(2 * MAX // body_bytes):
        one = BodyReservation(budget, caller)
        try:
            for _ in range(body_bytes // MIB):
                one.grow(MIB)
        except Failure:
            one.resize(0)
            break
        held.append(one)
    return held


def test_bodies_of_one_caller_that_stall_leave_room_for_those_of_others() -> None:
    budget = ReceiveBudget(MAX)
    first = stall(budget, "first", 4 * MIB)
    assert sum(one.size for one in first) == 40 * MIB  # two thirds, in whole bodies
    second = stall(budget, "second", 4 * MIB)
    third = BodyReservation(budget, "third")
    third.grow(4 * MIB)
    with pytest.raises(Failure) as refused:
        BodyReservation(budget, "first").grow(4 * MIB)
    assert (refused.value.code, refused.value.retry_after_s) == (Code.UNAVAILABLE, 1)
    BodyReservation(budget, "first").grow(SMALL_BYTES_MAX)
    for one in (*first, *second, third):
        one.resize(0)
    assert budget.bytes == SMALL_BYTES_MAX + 4 * MIB  # those that a refused reader has not given back


def test_a_single_body_may_take_the_whole_budget() -> None:
    budget = ReceiveBudget(MAX)
    BodyReservation(budget, "alone").grow(MAX)
    assert not budget.exceeds_share("alone", MAX)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20 * MIB), st.booleans()), max_size=40))
def test_what_callers_hold_is_what_their_large_bodies_have(steps: list[tuple[str, int, bool]]) -> None:
    budget = ReceiveBudget(MAX)
    bodies: list[BodyReservation] = []
    for caller, size, ends in steps:
        if ends and bodies:
            bodies.pop(0).resize(0)
        bodies.append(BodyReservation(budget, caller))
        bodies[-1].resize(size)
    large = Counter[str]()
    for one in bodies:
        if one.size > SMALL_BYTES_MAX:
            large[str(one.caller)] += one.size
    assert budget.bytes == sum(one.size for one in bodies)
    for caller in "abc":
        others = large[caller] > 2 * (MAX - budget.bytes)
        assert budget.exceeds_share(caller, SMALL_BYTES_MAX + 1) == (others and large[caller] > SMALL_BYTES_MAX + 1)
