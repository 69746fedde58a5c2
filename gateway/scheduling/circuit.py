"""One lane's side of the circuit breaker: closed, or open for some seconds, which refuses requests of the version."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Gauge
from millstream.services.model.manifest import Manifest

log = logging.getLogger("millstream.lane")


class Circuit:
    """The circuit of one lane.

    `open_until`: the instant at which an open circuit closes; 0 while it is closed.

    Args:
        manifest: the version's.
        gauge: is 1 while the circuit is open.
        clock: returns seconds.
    """

    __slots__ = ("_clock", "_gauge", "_manifest", "open_until")

    def __init__(self, manifest: Manifest, gauge: Gauge, clock: Callable[[], float]) -> None:
        self.open_until = 0.0
        self._manifest = manifest
        self._gauge = gauge
        self._clock = clock

    def open(self, deaths: int, seconds: float) -> None:
        """Refuse the version for `seconds`. `deaths`: how much recent deaths and ended runs count together."""
        if not self.open_until:
            log.warning(
                "%s ended its worker, or had runs that had to be ended, too often recently (%d): refused for %.0f s",
                self._manifest.content_id,
                deaths,
                seconds,
            )
        self.open_until = self._clock() + seconds
        self._gauge.set(1)

    def check(self) -> None:
        """Raise Failure(UNAVAILABLE) while the circuit is open; close it when its time is over."""
        if self.is_open():
            raise self.failure()
        self.open_until = 0.0
        self._gauge.set(0)

    def is_open(self) -> bool:
        return self._clock() < self.open_until

    def failure(self) -> Failure:
        """Return the Failure with which an open circuit refuses a request."""
        left_s = max(1.0, self.open_until - self._clock())
        name = f"version {self._manifest.version} of model '{self._manifest.model}'"
        why = f"{name} ended its worker, or had runs that had to be ended, too often: it is refused for {left_s:.0f} s"
        return Failure(Code.UNAVAILABLE, why, retry_after_s=left_s)
