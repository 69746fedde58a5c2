"""Waits for conditions without a signal by polling every few milliseconds up to a limit, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_S = 0.01


def wait_until(predicate: Callable[[], T | None], timeout_s: float = 30, what: str = "") -> T:
    """Return the first true value of `predicate`. Raises AssertionError, with the last value, after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {timeout_s:g} s: {what or predicate} (last: {value!r})")
        time.sleep(PAUSE_S)
    return value


def wait_for_none(leftovers: Callable[[], T], timeout_s: float = 30) -> None:
    """Return when `leftovers` is empty. Raises AssertionError with what is left after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while left := leftovers():
        if time.monotonic() > until:
            raise AssertionError(f"left after {timeout_s:g} s: {left!r}")
        time.sleep(PAUSE_S)
