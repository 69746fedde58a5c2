"""Waits for conditions without a signal by polling up to a limit, never for a fixed time.

The longer the wait so far, the longer the pause: it adds a tenth at most, and polls do not take the processor time
that what is waited for needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Long: a busy machine may need minutes for what takes a tenth of a second, and only a test that fails waits for it.
TIMEOUT_S = 240.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.01, 0.05
PAUSE_SHARE = 0.1  # of the time waited so far


def wait_until(predicate: Callable[[], T | None], timeout_s: float = TIMEOUT_S, what: str = "") -> T:
    """Return the first true value of `predicate`. Raises AssertionError, with the last value, after `timeout_s`."""
    began = time.monotonic()
    while not (value := predicate()):
        if time.monotonic() > began + timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what or predicate} (last: {value!r})")
        _pause(began)
    return value


def wait_for_none(leftovers: Callable[[], T], timeout_s: float = TIMEOUT_S) -> None:
    """Return when `leftovers` is empty. Raises AssertionError with what is left after `timeout_s`."""
    began = time.monotonic()
    while left := leftovers():
        if time.monotonic() > began + timeout_s:
            raise AssertionError(f"left after {timeout_s:g} s: {left!r}")
        _pause(began)


def _pause(began: float) -> None:
    waited_s = time.monotonic() - began
    time.sleep(min(PAUSE_S_MAX, max(PAUSE_S_MIN, waited_s * PAUSE_SHARE)))
