"""What a worker loads without any order, and what it unloads to keep a little memory free for the next call. Pure.

its instances and memory, what serves in its pool ─> preloads ─> versions to load, in order; the others are on standby
a load that a call waited for has ended ─> headroom_of: its low and high mark ─> less than low is free ─> unloaded_ahead

If all these versions fit into the worker's memory together, it holds all of them. If not, it keeps what it has,
loads the pinned ones while memory is free, and fills free memory up to FILL_SHARE in an order of its own. Nothing is
unloaded for a preload.
Unloading a model takes about as long as loading a small one: a first call that has to wait for both takes twice as long
as one that finds memory free. So a little room is made after such a load, from what will hardly be called before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from millstream.services.placement.fleet import rendezvous
from millstream.services.placement.room import make_room
from millstream.services.placement.views import Footprint, Refusal, WorkerView

#: Preloads fill this share of the memory; the rest is for what is called.
FILL_SHARE = 0.75
#: Versions that are passed over because they do not fit, before the rest of the order is not tried.
PASSED_OVER_MAX = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version of the worker's pool.

    Args:
        pinned: whether its endpoint forbids to unload it: it comes first.
        waits: whether it is loaded only by an order: it was unloaded on purpose, or other workers hold enough of it.
    """

    content_id: str
    footprint: Footprint
    pinned: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Preloads:
    """What a worker loads without any order, in this order. `whole`: all versions of its pool fit together."""

    whole: bool
    content_ids: tuple[str, ...]


def preloads(
    worker: WorkerView, candidates: Sequence[Candidate], base_bytes: int, device_base_bytes: int = 0
) -> Preloads:
    """Return the versions to load besides those that the worker holds or loads.

    Args:
        worker: its instances include those that are being loaded.
        candidates: all versions of its pool, in the order in which they are loaded if all of them fit.
        base_bytes: what the process takes without any instance.
        device_base_bytes: likewise of the device.
    """
    missing = [one for one in candidates if one.content_id not in worker.instances and not one.waits]
    if fits_together(candidates, worker, base_bytes, device_base_bytes):
        return Preloads(True, tuple(one.content_id for one in missing))
    chosen: list[str] = []
    for one in missing:
        if one.pinned and _fits(worker, one.footprint, 1.0):
            chosen.append(one.content_id)
            worker = _with(worker, one.footprint)
    passed_over = 0
    others = (one for one in missing if not one.pinned)
    for one in sorted(others, key=lambda one: rendezvous(one.content_id, worker.id)):
        if _fits(worker, one.footprint, FILL_SHARE):
            chosen.append(one.content_id)
            worker = _with(worker, one.footprint)
        else:
            passed_over += 1
            if passed_over >= PASSED_OVER_MAX:
                break
    return Preloads(False, tuple(chosen))


def _fits(worker: WorkerView, need: Footprint, share: float) -> bool:
    """Return whether a load leaves the other part of both budgets free."""
    fits = not worker.budget_bytes or worker.used_bytes + need.load_bytes <= share * worker.budget_bytes
    device_bytes = worker.device_budget_bytes
    return fits and (not device_bytes or worker.device_used_bytes + need.device_load_bytes <= share * device_bytes)


def _with(worker: WorkerView, loaded: Footprint) -> WorkerView:
    return replace(
        worker,
        used_bytes=worker.used_bytes + loaded.resident_bytes,
        device_used_bytes=worker.device_used_bytes + loaded.device_resident_bytes,
    )


def fits_together(
    candidates: Collection[Candidate], worker: WorkerView, base_bytes: int, device_base_bytes: int
) -> bool:
    """Return whether instances of all versions fit into the budgets of a worker at the same time."""
    needs = [one.footprint for one in candidates]
    host = sum(one.resident_bytes for one in needs) + max((one.peak_bytes for one in needs), default=0)
    device = sum(one.device_resident_bytes for one in needs)
    device += max((one.device_peak_bytes for one in needs), default=0)
    return (not worker.budget_bytes or base_bytes + host <= worker.budget_bytes) and (
        not worker.device_budget_bytes or device_base_bytes + device <= worker.device_budget_bytes
    )


#: Loads for which memory is kept free at most; when half of them do not fit, room is made.
HEADROOM_LOADS_MAX = 4
#: Largest part of the memory for models that is kept free. Models that take more are not unloaded for ahead of calls.
HEADROOM_SHARE_MAX = 1 / 16
#: Loads that take longer gain little: choosing and unloading another model takes 10 ms.
HEADROOM_LOAD_S_MAX = 0.1
#: Largest probability that what is unloaded is called before the room that it leaves is used.
HEADROOM_USE_MAX = 0.1
#: Loads from which the next ones are foretold: how far apart they are, and what they take. Before these no memory is
#: kept free.
HEADROOM_LOADS_KNOWN = 8


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
    if load.load_s > HEADROOM_LOAD_S_MAX:
        return None
    for loads in range(HEADROOM_LOADS_MAX, 0, -1):
        high = _of_loads(load, loads)
        within = high.load_bytes <= HEADROOM_SHARE_MAX * models_bytes
        if within and high.device_load_bytes <= HEADROOM_SHARE_MAX * device_models_bytes:
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
        if one.usage.next_use_probability(max(0.0, now - one.last_used), until_used_s) <= HEADROOM_USE_MAX
    )


def _of_loads(one: Footprint, loads: int) -> Footprint:
    """Return what a number of loads takes, one after the other: they share the memory of their peaks."""
    return replace(
        one,
        resident_bytes=loads * one.resident_bytes,
        device_resident_bytes=loads * one.device_resident_bytes,
    )


class NextLoads(NamedTuple):
    """What the last HEADROOM_LOADS_KNOWN loads tell about the next ones.

    Args:
        footprint: the most that was reserved for one of them, and the seconds of the last one.
        gap_s: the mean time between two.
    """

    footprint: Footprint
    gap_s: float


class OrderedLoads:
    """Written by the threads of loads and of the orders."""

    def __init__(self) -> None:
        self._reserved: deque[Footprint] = deque(maxlen=HEADROOM_LOADS_KNOWN)
        self._instants: deque[float] = deque(maxlen=HEADROOM_LOADS_KNOWN)
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
        if load_s is None or len(instants) < HEADROOM_LOADS_KNOWN:
            return None
        most = Footprint(
            max(one.resident_bytes for one in reserved),
            max(one.peak_bytes for one in reserved),
            load_s,
            device_resident_bytes=max(one.device_resident_bytes for one in reserved),
            device_peak_bytes=max(one.device_peak_bytes for one in reserved),
        )
        return NextLoads(most, max(0.0, instants[-1] - instants[0]) / (HEADROOM_LOADS_KNOWN - 1))
