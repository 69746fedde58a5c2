"""A key's limit on rows: whenever a call is let in, all rows before it are paid for, whatever their sizes and times."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from millstream.services.access.document import Limits
from millstream.services.access.limits import DEBT_S_MAX, Account, LimitReached, Use
from millstream.services.errors import Code, Failure

CALLS = st.lists(
    st.tuples(st.floats(0.0, 2 * DEBT_S_MAX), st.integers(0, 10_000_000), st.integers(1, 3), st.booleans()),
    max_size=60,
)
ROUNDING = 1e-6


@given(rate=st.floats(0.01, 1e5), calls=CALLS)
def test_no_key_gets_more_rows_than_its_rate(rate: float, calls: list[tuple[float, int, int, bool]]) -> None:
    account, now, paid = Account("team", Limits(rows_per_s=rate), 0.0), 0.0, 0
    burst = max(rate, 1.0)
    for pause, rows, together, elsewhere in calls:
        now += pause
        let_in = 0
        for _ in range(together):  # their rows are known after all of them were let in
            with suppress(LimitReached):
                account.enter(now)
                let_in += 1
        if let_in:
            assert paid <= (burst + rate * now) * (1 + ROUNDING)
        for _ in range(let_in):
            try:
                account.add_rows(rows, now)
            except LimitReached as refused:
                assert rows <= burst + rate * DEBT_S_MAX
                assert (refused.retry_after_s or 0) > 0
            except Failure as refused:
                assert refused.code is Code.TOO_LARGE
                assert rows > burst + rate * DEBT_S_MAX
            else:
                paid += rows
            account.leave()
        if elsewhere:  # another gateway let the same in
            account.settle(Use(rows=rows), now)
            paid += rows
    assert account.in_flight == 0


@given(rate=st.floats(0.01, 1e5), rows=st.integers(1, 10_000_000))
def test_a_debt_ends_when_it_is_paid(rate: float, rows: int) -> None:
    account, burst = Account("team", Limits(rows_per_s=rate), 0.0), max(rate, 1.0)
    account.enter(0.0)
    try:
        account.add_rows(rows, 0.0)
    except Failure as refused:
        assert refused.code is Code.TOO_LARGE
        account.enter(0.0)  # nothing was charged
        return
    seconds = max(0.0, (rows - burst) / rate)
    assert seconds <= DEBT_S_MAX * (1 + ROUNDING)
    account.enter(seconds * (1 + ROUNDING) + ROUNDING)
