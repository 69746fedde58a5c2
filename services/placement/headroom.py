"""The memory that a worker keeps free for the next models that are called, and what it unloads for that. Pure.

a load that a call waited for has ended ─> headroom_of: its low and high mark ─> less than low is free ─> unloaded_ahead

Unloading a model takes about as long as loading a small one: a first call that has to wait for both takes twice as long
as one that finds memory free. So a little room is made after such a load, from what will hardly be called before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from millstream.services.placement.eviction import make_room
from millstream.services.placement.views import Footprint, Refusal, WorkerView

#: Loads for which memory is kept free at most; when half of them do not fit, room is made.
LOADS_MAX = 4
#: Largest part of the memory for models that is kept free. Models that take more are not unloaded for ahead of calls.
SHARE_MAX = 1 / 16
#: Loads that take longer gain little: choosing and unloading another model takes 10 ms.
LOAD_S_MAX = 0.1
#: Largest probability that what is unloaded is called before the room that it leaves is used.
USE_MAX = 0.1
#: Loads from which the next ones are foretold: how far apart they are, and what they take. Before these no memory is
#: kept free.
LOADS_KNOWN = 8


class Headroom(NamedTuple):
    """Memory to keep free.

    Args:
        low: while this is free, nothing is unloaded.
        high: what is made free then.
        loads: the number of loads for which that is enough.
    """

    low: Footprint
    high: Footprint
    loads: int


def headroom_of(load: Footprint, models_bytes: int, device_models_bytes: int) -> Headroom | None:
    """Return the memory to keep free for loads like this one; None: none is kept.

    Args:
        load: what the next load is expected to take.
        models_bytes: memory that all instances of the worker may take.
        device_models_bytes: likewise of its device.
    """
    if load.load_s > LOAD_S_MAX:
        return None
    for loads in range(LOADS_MAX, 0, -1):
        high = _of_loads(load, loads)
        within = high.load_bytes <= SHARE_MAX * models_bytes
        if within and high.device_load_bytes <= SHARE_MAX * device_models_bytes:
            return Headroom(_of_loads(load, (loads + 1) // 2), high, loads)
    return None


def unloaded_ahead(
    worker: WorkerView, headroom: Headroom, gap_s: float, now: float, protected: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the instances to unload now, so that the next loads find memory free.

    They are of those that `make_room` would unload for these loads: never one that is in use, pinned or young. One that
    is likely to be called before the room is used stays: its own next call would have to load it.

    Args:
        worker: a worker that has less than `headroom.low` free.
        headroom: the memory that it keeps free.
        gap_s: the time between two loads on demand.
        now: the current instant.
        protected: content ids that must stay (`instances_min`).
    """
    found = make_room(worker, headroom.high, now, frozenset(protected))
    if isinstance(found, Refusal):
        return ()
    until_used_s = headroom.loads * gap_s
    instances = map(worker.instances.__getitem__, found)
    return tuple(
        one.content_id
        for one in instances
        if one.usage.next_use_probability(max(0.0, now - one.last_used), until_used_s) <= USE_MAX
    )


def _of_loads(one: Footprint, loads: int) -> Footprint:
    """Return what a number of loads takes, one after the other: they share the memory of their peaks."""
    return replace(
        one,
        resident_bytes=loads * one.resident_bytes,
        device_resident_bytes=loads * one.device_resident_bytes,
    )


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
