"""The line of the versions that calls wait for in one worker: whose turn it is, what goes for it, and when. Pure.

calls of versions that the worker does not have ─> line, oldest first ─> turn: what goes for the first ─> load
LoadRecords of a worker, seconds that each load takes ─> ready_in_s ─> seconds until a version can serve

A version that was loaded stays for a residence in proportion to its load time, so that a load serves more than the
calls that waited for it. Then it may go although it is called: its further calls wait in the line like all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from millstream.services.placement.room import Room, make_room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView
from millstream.services.wire.records import LoadRecord

#: A version that was loaded for a call stays for this multiple of its load time. Shorter, and where calls never pause a
#: load serves only those that waited for it; longer, and those that wait for others wait longer than they must.
RESIDENCE_LOADS = 1.0
#: Beyond its residence, for a caller that was told to come again: `Retry-After` counts whole seconds.
FIRST_CALL_S = 2.0
_BUSY = Refusal(RefusalKind.BUSY, "the models that could make room for it are called, or were loaded a moment ago", 1.0)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can go now. `until`: when the next residence ends; infinity: a load, a close or a run must end first."""

    until: float


def turn(
    worker: WorkerView, need: Footprint, now: float, protected: Collection[str] = (), *, called: bool = True
) -> tuple[str, ...] | Wait | Refusal:
    """Return what a worker unloads for the first of its line; empty if it fits, or will once what is leaving is gone.

    What is idle goes first. If that is not enough, what is called goes, too, once its residence is over.

    Args:
        worker: the worker.
        need: what the first takes.
        now: the current instant.
        protected: content ids that must stay (`instances_min`).
        called: whether calls wait for it; otherwise it waits for loads in progress only, and nothing called goes.
    """
    ends = {one.content_id: residence_end(one) for one in worker.instances.values() if one.loaded_at < math.inf}
    stay = frozenset(protected) | {content_id for content_id, end in ends.items() if end > now}
    idle = make_room(worker, need, now, stay)
    if not isinstance(idle, Refusal):
        return idle
    if not called:
        later = Wait(math.inf) if _fits_at_last(worker, need, stay) else turn(worker, need, now, protected)
        return later if isinstance(later, Refusal) or later == Wait(math.inf) else _BUSY
    worker = stopped(worker)
    over = make_room(worker, need, now, stay)
    if not isinstance(over, Refusal):
        return over
    if _fits_at_last(worker, need, protected):
        return Wait(min((end for end in ends.values() if end > now), default=math.inf))
    return make_room(worker, need, now, frozenset(protected))


def stopped(worker: WorkerView) -> WorkerView:
    """Return a worker as if none of its instances were in use: at some time each of them is stopped for the line."""
    instances = {
        content_id: replace(one, in_use=False) if one.in_use else one for content_id, one in worker.instances.items()
    }
    return replace(worker, instances=instances)


def _fits_at_last(worker: WorkerView, need: Footprint, protected: Collection[str]) -> bool:
    """Return whether a version fits once loads in progress have ended, if all goes that may go."""
    host, device = Room.of(worker, protected).attainable_bytes()
    return need.load_bytes <= host and need.device_load_bytes <= device


def residence_end(one: PlacedInstance) -> float:
    """Return until when an instance stays for its calls, whoever waits. One that was called and idles may go at once.

    So may one that was loaded for no call.
    """
    was_called = one.last_used > one.loaded_at
    if was_called and not one.in_use:
        return one.loaded_at
    return one.loaded_at + RESIDENCE_LOADS * one.footprint.load_s + (0.0 if was_called else FIRST_CALL_S)


def ready_in_s(
    loads: Sequence[LoadRecord], load_s_of: Callable[[str], float], content_id: str, load_s: float, now: float
) -> float:
    """Return the seconds until a version can be loaded at the earliest; one not in `loads` comes after all of them.

    Loads that run beside each other are predicted as if each had the worker to itself. Residences are left out: they
    end early when nobody calls, and a caller who was told more than it takes might come when its own is over, too.

    Args:
        loads: the loads of its worker, in the order in which they begin.
        load_s_of: returns the seconds that loading a content id takes; 0: unknown.
        content_id: the version.
        load_s: what loading it takes.
        now: the current instant, on the clock of the records.
    """
    begins = now
    for one in loads:
        if one.content_id == content_id:
            return max(0.0, (one.began or begins) + load_s - now)
        began = one.began or begins
        begins = max(begins, min(began + load_s_of(one.content_id), began + one.yields_s))
    return begins + load_s - now
