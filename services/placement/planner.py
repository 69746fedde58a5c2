"""Decides what the controller orders: which worker loads or unloads which version, and why. Pure.

workers, served versions, what was ordered before ─> plan ─> Plan(orders, ordered)

The controller calls `plan` every few seconds with what the workers published, and hands each order to its worker. What
a call needs at once is no business of the planner: gateways order that themselves (services/placement/choice.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import Footprint, WorkerView


class OrderReason(StrEnum):
    """Why the controller orders something: a label of metrics. `PlannedOrder.why` says it for people."""

    MINIMUM = "minimum"  # fewer instances than instances_min
    DRAIN = "drain"  # its worker stops soon
    LOAD = "load"  # its instances cannot run the calls that arrive
    REGULAR = "regular"  # called regularly: a second instance survives the loss of a worker
    PREFETCH = "prefetch"  # a call is expected
    SPREAD = "spread"  # its worker has more to run than others
    IDLE = "idle"  # without a call for idle_s
    SURPLUS = "surplus"  # more instances than it needs, or than instances_max


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version that serves, with its endpoint's settings and its traffic.

    Args:
        pools: the pools that may serve it, the preferred one first.
        footprints: pool -> what an instance takes there, measured or predicted. A pool without one is left out.
        instances_min: instances that are always loaded.
        instances_max: most instances in a pool; 0: no limit.
        idle_s: seconds without a call until it is unloaded; 0: only if memory is short.
        pin: whether a loaded instance stays, also when memory is short.
        calls_per_s: its calls a second in the last minute, of all gateways.
        run_s: seconds that a worker is busy with one call, measured, its share of a batch; 0: not known.
        usage: the gaps between its calls, as published by an instance, or as remembered since its unload.
        last_used: instant of its last call; 0: none is known.
    """

    content_id: str
    pools: tuple[str, ...]
    footprints: Mapping[str, Footprint]
    instances_min: int = 0
    instances_max: int = 0
    idle_s: float = 0.0
    pin: bool = False
    calls_per_s: float = 0.0
    run_s: float = 0.0
    usage: Usage = NO_USAGE
    last_used: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """An order of the controller to one worker.

    Args:
        why: for people: "its second instance", "a call is expected in 4 s", "idle for 300 s", …
        evict: whether the worker may unload other versions for it.
    """

    do: Literal["load", "unload"]
    worker: str
    content_id: str
    reason: OrderReason
    why: str
    evict: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The orders of one round, the most urgent first, and what the next round has to know.

    Args:
        ordered: (worker, content id) -> instant of the last order; older entries are dropped by `plan`. Not kept
            anywhere else: a new leader begins without, and at worst repeats an order, which a worker ignores.
    """

    orders: tuple[PlannedOrder, ...] = ()
    ordered: Mapping[tuple[str, str], float] = field(default_factory=dict)


def plan(workers: Sequence[WorkerView], versions: Sequence[ServedVersion], before: Plan, now: float) -> Plan:
    """Return the orders of this round.

    Args:
        workers: all live workers of all pools. Loads in progress are instances with `loaded_at` infinity.
        versions: the versions that serve. An instance of another version is left alone: its worker unloads it.
        before: the result of the round before; `Plan()` at the start.
        now: the current instant, on the clock of `loaded_at` and `last_used`.
    """
    del workers, versions, now  # until the decisions are here
    return Plan((), before.ordered)
