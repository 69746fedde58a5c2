"""A change is tried again while other processes write in between, and only then."""

from __future__ import annotations

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.repository.endpoint_changes import TRIES_MAX, retry_on_conflict


class Change:
    """Raises one failure after the other, then returns how often it was called."""

    def __init__(self, *codes: Code) -> None:
        self._codes = list(codes)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self._codes:
            raise Failure(self._codes.pop(0), "no")
        return self.calls


@pytest.mark.parametrize("conflicts", [0, 1, TRIES_MAX - 1])
def test_conflicts_are_tried_again(conflicts: int) -> None:
    assert retry_on_conflict(Change(*[Code.CONFLICT] * conflicts)) == conflicts + 1


def test_conflicts_without_end_are_raised() -> None:
    change = Change(*[Code.CONFLICT] * (TRIES_MAX + 1))
    with pytest.raises(Failure) as failed:
        retry_on_conflict(change)
    assert (failed.value.code, change.calls) == (Code.CONFLICT, TRIES_MAX)


def test_other_failures_are_raised_at_once() -> None:
    change = Change(Code.CONFLICT, Code.STORAGE)
    with pytest.raises(Failure) as failed:
        retry_on_conflict(change)
    assert (failed.value.code, change.calls) == (Code.STORAGE, 2)
