"""What the planner takes and returns: versions with their traffic, orders with their reasons. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import Footprint
from millstream.services.wire.orders import OrderReason


class Unmeasured(NamedTuple):
    """What is known of a version that was never measured in a pool, besides the prediction.

    Args:
        file_bytes: of its files.
        too_little: memory that a load found too little; None: none did.
    """

    file_bytes: int
    too_little: Footprint | None = None


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
        unmeasured: pool -> of a version whose footprint there is a prediction: it may be tried with less memory.
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
    unmeasured: Mapping[str, Unmeasured] = field(default_factory=dict)


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
        ordered: orders of this and earlier rounds with their instants; `plan` drops the old ones. Kept in the leader's
            memory alone: a new leader begins without, and at worst repeats an order, which a worker ignores.
        unmet_after: content id of the last version that this round tried of those that no worker could load although
            they must be; the next round goes on after it. Empty: all were tried.
    """

    orders: tuple[PlannedOrder, ...] = ()
    ordered: tuple[tuple[float, PlannedOrder], ...] = ()
    unmet_after: str = ""

    def without(self, left: Collection[tuple[str, str]]) -> Plan:
        """Return the plan without orders that were not given: the next round may order them again.

        Args:
            left: workers and content ids of the orders of this round that were not given.
        """
        ungiven = {order for order in self.orders if (order.worker, order.content_id) in left}
        return replace(self, ordered=tuple((at, order) for at, order in self.ordered if order not in ungiven))
