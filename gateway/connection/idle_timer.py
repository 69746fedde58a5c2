"""A timer that is moved with each request and nearly never fires: moving it is a store, the event loop is not asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_NEVER = float("inf")


class LazyTimer:
    """Calls `on_due` when the time that was set last has come. All calls in the event loop."""

    __slots__ = ("_armed", "_due", "_handle", "_loop", "_on_due")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due: Callable[[], None] | None = on_due
        self._due = _NEVER
        self._armed = _NEVER  # when the loop will call: not later than due, mostly much earlier
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """From now on due in so many seconds."""
        due = self._due = self._loop.time() + seconds
        if due < self._armed:
            self._arm(due)

    def unset(self) -> None:
        self._due = _NEVER

    def close(self) -> None:
        """It is not used any more, and holds on to nothing."""
        self._due = _NEVER
        self._on_due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, due: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed = due
        self._handle = self._loop.call_later(max(0.0, due - self._loop.time()), self._look)

    def _look(self) -> None:
        self._handle = None
        self._armed = _NEVER
        if self._due == _NEVER or self._on_due is None:
            return
        if self._due > self._loop.time():
            self._arm(self._due)
        else:
            self._due = _NEVER
            self._on_due()
