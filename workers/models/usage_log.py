"""When each version was called, as placement needs it. Kept for unloaded versions, too.

main loop: Calls.add(now), once for each batch ─> fold: gaps since the last fold ─> Usage, last_used
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, replace

from millstream.services.placement.usage import GAP_S_MIN, HALVE_AT, NO_USAGE, Usage

VERSIONS_MAX = 10_000  # beyond, the one that was read or called least recently is forgotten
SIZES_MAX = 16  # powers of two up to the most rows of a run
GAPS_MAX = 256  # between two folds; of more the last ones count


RUNS_MIN = 20  # of a size, before they bound a run
RUNS_MAX = 2000  # at which all counts are halved, so that old runs fade
SHARE = 0.99  # of the runs take at most what is usual
_STEPS = 4  # durations are counted in steps of 2 ** (1 / 4), 19 %


class RunHistory:
    """The durations of one version's runs. Written by the main loop; `usual_s` may be called in another thread."""

    __slots__ = ("_by_size",)

    def __init__(self) -> None:
        self._by_size: dict[int, dict[int, int]] = {}  # power of two of bytes -> step of the duration -> runs

    def add(self, size_bytes: int, seconds: float) -> None:
        """Record a run that ended by itself."""
        step = math.ceil(_STEPS * math.log2(max(seconds, 1e-6)))
        counts = self._by_size.setdefault(size_bytes.bit_length(), {})
        counts[step] = counts.get(step, 0) + 1
        if counts[step] >= RUNS_MAX:
            self._by_size[size_bytes.bit_length()] = {known: runs // 2 for known, runs in counts.items() if runs > 1}

    def usual_s(self, size_bytes: int) -> float:
        """Return the 99th percentile of the seconds of runs of this size; 0: there were too few."""
        counts = self._by_size.get(size_bytes.bit_length(), {}).copy()
        total = sum(counts.values())
        if total < RUNS_MIN:
            return 0.0
        seen = 0
        for step in sorted(counts):
            seen += counts[step]
            if seen >= SHARE * total:
                return float(2 ** (step / _STEPS))
        raise AssertionError("the shares of all steps are 1")


class Calls:
    """The calls of one version since they were last folded. Written by the main loop, read by other threads.

    Args:
        last: time of the last call, also of an instance before (monotonic); 0: there was none.

    Attributes:
        runs: runs of this instance. Only grows.
        busy_s: seconds that they took together. Only grows.
        batches: how many runs had 1 row, 2, 3 or 4, 5 to 8, …; the last element has all larger ones.
        history: how long they took.
    """

    __slots__ = ("batches", "bursts", "busy_s", "gaps", "history", "last", "runs")

    def __init__(self, last: float = 0.0) -> None:
        self.last = last
        self.runs = 0
        self.busy_s = 0.0
        self.batches = [0] * (SIZES_MAX + 1)
        self.bursts = 0  # calls that came within GAP_S_MIN after the call before them
        self.gaps: deque[float] = deque(maxlen=GAPS_MAX)  # between the other calls
        self.history = RunHistory()

    def sizes(self) -> dict[int, int]:
        """Return how many runs had at most so many rows, and more than the next smaller size."""
        return {1 << power: count for power, count in enumerate(self.batches) if count}

    def add(self, now: float) -> None:
        """Record a call. Costs two attribute writes while calls are frequent."""
        gap = now - self.last
        self.last = now
        if gap <= GAP_S_MIN:
            self.bursts += 1
        else:
            self.gaps.append(gap)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about the calls of a version. `last_used` is monotonic; 0: not called in this worker."""

    usage: Usage = NO_USAGE
    last_used: float = 0.0


class UsageLog:
    """The usage of versions by content id. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Known] = OrderedDict()

    def fold(self, content_id: str, calls: Calls) -> Known:
        """Add the calls of a version since the last fold, and return what is known about all of its calls."""
        with self._lock:
            known = self._known.get(content_id, Known())
            if calls.last == known.last_used:
                return known
            usage, first = known.usage, not known.last_used
            for _ in range(len(calls.gaps)):
                gap = calls.gaps.popleft()
                if not first:  # the first call has none before it
                    usage = usage.with_gap(gap)
                first = False
            bursts, calls.bursts = calls.bursts, 0
            for _ in range(min(bursts, HALVE_AT)):  # further ones would change nothing
                usage = usage.with_gap(0.0)
            known = Known(usage, calls.last)
            self._set(content_id, known)
            return known

    def calls(self, content_id: str) -> Calls:
        """Return where the calls of a new instance are recorded."""
        with self._lock:
            return Calls(self._known.get(content_id, Known()).last_used)

    def continue_from(self, content_id: str, usage: Usage) -> None:
        """Use what other processes know about a version's calls, if they know more of them."""
        with self._lock:
            known = self._known.get(content_id, Known())
            if sum(usage.gaps.values()) > sum(known.usage.gaps.values()):
                self._set(content_id, replace(known, usage=usage))

    def _set(self, content_id: str, known: Known) -> None:
        self._known[content_id] = known
        self._known.move_to_end(content_id)
        while len(self._known) > VERSIONS_MAX:
            self._known.popitem(last=False)
