"""Redis' clock: the one clock that all processes of an installation share, whatever the clocks of their machines say.

It is the monotonic clock of this process and an offset, measured by asking for TIME: Redis took it between question and
answer. Each measurement narrows what is known of the offset, and time widens it again (Marzullo and Owicki, 1983).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

#: how fast two clocks may drift apart: NTP slews by at most 500 parts in a million, and each clock may be slewed
DRIFT = 0.001


class RedisClock:
    """Until the first measurement it is this machine's wall clock. Measurements may come from several threads."""

    def __init__(self) -> None:
        self.offset_ms = (time.time() - time.monotonic()) * 1000  # of Redis' clock to the monotonic one  # noqa: TID251
        self._lock = threading.Lock()
        self._low, self._high = float("-inf"), float("inf")  # bounds of the offset, in seconds, as they were
        self._measured = 0.0  # at this monotonic instant

    def now_ms(self) -> float:
        """Milliseconds since the epoch on Redis' clock."""
        return time.monotonic() * 1000 + self.offset_ms

    def measured(self, asked: float, answered: float, reply: Sequence[bytes | int]) -> None:
        """`asked`, `answered`: monotonic seconds around a TIME (also in a script). `reply`: its seconds and microseconds."""
        redis_s = int(reply[0]) + int(reply[1]) / 1e6
        low, high = redis_s - answered, redis_s - asked
        with self._lock:
            widened_s = max(0.0, answered - self._measured) * DRIFT
            known_low, known_high = max(low, self._low - widened_s), min(high, self._high + widened_s)
            # No common offset: a clock was set, or this is another server.
            self._low, self._high = (known_low, known_high) if known_low <= known_high else (low, high)
            self._measured = max(self._measured, answered)
            self.offset_ms = (self._low + self._high) * 500
