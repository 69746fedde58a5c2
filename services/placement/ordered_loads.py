"""The last loads of a worker that calls waited for, which tell how much memory is to be kept free.

an order ─> begin; its load has ended ─> end ─> take: what the next loads will take, and how far apart they are
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from millstream.services.placement.views import Footprint

#: Loads from which the next ones are foretold: how far apart they are, and what they take. Before these no memory is
#: kept free.
LOADS_KNOWN = 8


class NextLoads(NamedTuple):
    """What the last LOADS_KNOWN loads tell about the next ones.

    Args:
        footprint: the most that was reserved for one of them, and the seconds of the last one.
        gap_s: the mean time between two.
    """

    footprint: Footprint
    gap_s: float


class OrderedLoads:
    """Written by the threads of loads and of the orders."""

    def __init__(self) -> None:
        self._reserved: deque[Footprint] = deque(maxlen=LOADS_KNOWN)
        self._instants: deque[float] = deque(maxlen=LOADS_KNOWN)
        self._load_s: float | None = None  # of the last load; None: none has ended since `take`

    def begin(self, reserved: Footprint) -> None:
        """Record what is reserved for a load: a prediction, if its version was never measured."""
        self._reserved.append(reserved)

    def end(self, load_s: float, now: float) -> None:
        """Record that a load has ended at `now`, in seconds, which took `load_s`."""
        self._instants.append(now)
        self._load_s = load_s

    @property
    def any_new(self) -> bool:
        """Whether a load has ended since `take`."""
        return self._load_s is not None

    def take(self) -> NextLoads | None:
        """Return what is known when a load has ended; None: none has since the last time, or there were too few."""
        load_s, self._load_s = self._load_s, None
        instants, reserved = list(self._instants), list(self._reserved)
        if load_s is None or len(instants) < LOADS_KNOWN:
            return None
        most = Footprint(
            max(one.resident_bytes for one in reserved),
            max(one.peak_bytes for one in reserved),
            load_s,
            device_resident_bytes=max(one.device_resident_bytes for one in reserved),
            device_peak_bytes=max(one.device_peak_bytes for one in reserved),
        )
        return NextLoads(most, max(0.0, instants[-1] - instants[0]) / (LOADS_KNOWN - 1))
