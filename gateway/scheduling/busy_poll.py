"""Keeps the event loop turning while the reply to a lone batch is due: waking a sleeping process would take longer."""

from __future__ import annotations

from collections.abc import Callable

from millstream.services.process.spin_wait import Spin


class BusyPoll:
    """The busy-polling of one lane. Times are seconds.

    Args:
        limit_s: duration of the longest poll; 0 turns polling off.
        soon: schedules a function for the next turn of the event loop.
        clock: the lane's clock.
        in_flight: returns how many batches of the lane have no reply yet.
    """

    __slots__ = ("_clock", "_in_flight", "_polling", "_soon", "_spin", "_until")

    def __init__(
        self,
        limit_s: float,
        soon: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
        in_flight: Callable[[], int],
    ) -> None:
        self._spin = Spin(limit_s)
        self._soon = soon
        self._clock = clock
        self._in_flight = in_flight
        self._polling = False
        self._until = 0.0

    def begin(self, now: float) -> None:
        """Poll from now on, if the previous reply came within the limit."""
        limit_s = self._spin.seconds
        if limit_s:
            self._until = now + limit_s
            if not self._polling:
                self._polling = True
                self._soon(self._turn)

    def record_wait(self, seconds: float, requests: int) -> None:
        """Record how long the reply to a batch of `requests` took."""
        self._spin.record_wait(seconds, requests)

    def _turn(self) -> None:
        self._polling = self._in_flight() > 0 and self._clock() < self._until
        if self._polling:
            self._soon(self._turn)
