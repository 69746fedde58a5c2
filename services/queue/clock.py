"""The Redis clock: the clock that all processes of an installation share; the clocks of their machines may differ.

It is computed as this process' monotonic clock plus an offset. The offset is measured with TIME: Redis reads its clock
between request and reply. Each measurement narrows the interval that contains the offset, and passing time widens the
interval again (Marzullo and Owicki, 1983).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

#: Bound on how fast two clocks drift apart: NTP slews by at most 500 parts per million, and each clock may be slewed.
DRIFT = 0.001


class RedisClock:
    """An estimate of the Redis clock; this machine's wall clock until the first measurement. Thread-safe."""

    def __init__(self) -> None:
        self.offset_ms = (time.time() - time.monotonic()) * 1000  # Redis clock - monotonic clock  # noqa: TID251
        self._lock = threading.Lock()
        self._low, self._high = float("-inf"), float("inf")  # bounds of the offset (s) at `_measured_at`
        self._measured_at = 0.0  # monotonic

    def now_ms(self) -> float:
        """Return milliseconds since the epoch on the Redis clock."""
        return time.monotonic() * 1000 + self.offset_ms

    def record_measurement(self, sent: float, received: float, reply: Sequence[bytes | int]) -> None:
        """Narrow the offset by one reading of the Redis clock.

        Args:
            sent: when the command was sent (monotonic seconds).
            received: when its reply had arrived.
            reply: seconds and microseconds, as TIME returns them, also inside a script.
        """
        redis_s = int(reply[0]) + int(reply[1]) / 1e6
        low, high = redis_s - received, redis_s - sent
        with self._lock:
            widened_s = max(0.0, received - self._measured_at) * DRIFT
            known_low, known_high = max(low, self._low - widened_s), min(high, self._high + widened_s)
            # If the intervals do not overlap, a clock was set, or this is another server.
            self._low, self._high = (known_low, known_high) if known_low <= known_high else (low, high)
            self._measured_at = max(self._measured_at, received)
            self.offset_ms = (self._low + self._high) * 500
