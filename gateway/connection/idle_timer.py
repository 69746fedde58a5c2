"""idle_timer: a timer that each request moves and that rarely fires. Moving it is one assignment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_NEVER = float("inf")


class LazyTimer:
    """Calls `on_due` when the time set last is reached. Use it in the event loop's thread."""

    __slots__ = ("_armed", "_due", "_handle", "_loop", "_on_due")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due: Callable[[], None] | None = on_due
        self._due = _NEVER
        self._armed = _NEVER  # when the loop calls `_check`: never after `_due`, mostly long before
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move the timer to `seconds` from now."""
        due = self._due = self._loop.time() + seconds
        if due < self._armed:
            self._arm(due)

    def unset(self) -> None:
        self._due = _NEVER

    def close(self) -> None:
        """Stop the timer and drop its references. It cannot be set again."""
        self._due = _NEVER
        self._on_due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, due: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed = due
        self._handle = self._loop.call_later(max(0.0, due - self._loop.time()), self._check)

    def _check(self) -> None:
        self._handle = None
        self._armed = _NEVER
        if self._due == _NEVER or self._on_due is None:
            return
        if self._due > self._loop.time():
            self._arm(self._due)
        else:
            self._due = _NEVER
            self._on_due()
