"""Decides what the controller orders: which worker loads or unloads which version, and why. Pure.

workers, served versions, what was ordered before ─> plan ─> Plan(orders, ordered)

The controller calls `plan` every few seconds with what the workers published, and hands each order to its worker. What
a call needs at once is no business of the planner: gateways order that themselves (services/placement/fleet.py).
Each rule below is a function; their order is the order of urgency, since a round has a limited number of orders.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from millstream.plugins.fleet.planned import Plan, ServedVersion
from millstream.plugins.fleet.planning_round import Holder, PlanningRound
from millstream.services.placement.fleet import SPREAD_WORTH
from millstream.services.placement.room import evictable
from millstream.services.placement.usage import Usage
from millstream.services.placement.views import WorkerView
from millstream.services.wire.orders import OrderReason

#: After an order for a version, none of its copies is moved or unloaded as surplus for this time: no to and fro.
REST_S = 300.0
#: Share of the time in which the instances of a version are busy: above HIGH it gets another instance, enough for
#: WANTED; below LOW of one instance less, it loses one. The gap between them keeps the number stable.
LOAD_HIGH = 0.7
LOAD_WANTED = 0.5
LOAD_LOW = 0.4
#: Share of its load time that the unloads for another instance may cost: less than 1, so that no two versions take
#: turns in the same memory.
LOAD_WORTH = 0.8
#: Versions that must be loaded, and that no worker could load, for which a round looks for one. Each takes 3 to 5 ms
#: among 200 workers, and a round follows in 2 s, which goes on with the others.
UNMET_MAX = 25
COPIES_PER_ROUND = 2  # instances that a version gets for its load in one round
DRAIN_SOON_MIN = 0.5  # probability of a call soon, below which a version on a worker that stops waits for its next call
UTILISATION_HIGH = 0.8  # share of the time in which a worker is busy, above which some of its versions move
SHARE_MIN = 0.05  # share of a worker's time below which moving a version is not worth a load
SPREAD_GAIN = 0.1  # by which the other worker stays less busy than the first one was
#: Mean gap of the calls for which a second instance is worth its memory: more seldom, a cold call is no loss; more
#: often, load decides. The bounds are ModelMesh's (7 and 40 minutes).
REGULAR_S = (420.0, 2400.0)
REGULAR_GAPS_MIN = 3
PREFETCH_LEAD_S = 15.0  # a few rounds of the controller
PREFETCH_DEVIATIONS = 3.0  # of the gaps: how much earlier than its mean the call may come, and how long it is awaited
PREFETCH_WORTH = 0.8  # share of its load time that the unloads for it may cost at most: the call may not come


def plan(workers: Sequence[WorkerView], versions: Sequence[ServedVersion], before: Plan, now: float) -> Plan:
    """Return the orders of this round.

    Args:
        workers: all live workers of all pools. Loads in progress are instances with `loaded_at` infinity.
        versions: the versions that serve. An instance of another version is left alone: its worker unloads it.
        before: the result of the round before; `Plan()` at the start.
        now: the current instant, on the clock of `loaded_at` and `last_used`.
    """
    recent = tuple((at, order) for at, order in before.ordered if now - at < REST_S)
    current = PlanningRound(workers, versions, recent, now)
    unmet_after = _keep_minimum(current, before.unmet_after)
    for rule in (
        _leave_draining_workers,
        _share_load,
        _prefetch,
        _unload_idle,
        _unload_surplus,
        _second_copies,
        _spread,
    ):
        rule(current)
    orders = tuple(current.orders)
    return Plan(orders, (*recent, *((now, order) for order in orders)), unmet_after)


def _keep_minimum(current: PlanningRound, unmet_after: str) -> str:
    """Load what is below `instances_min`, whatever has to go for it, up to UNMET_MAX that no worker can load.

    Begins after the content id `unmet_after`, and returns the one after which the next round is to begin.
    """
    below = [version for version in current.versions if len(current.holders(version)) < version.instances_min]
    first = bisect_right([version.content_id for version in below], unmet_after)
    unmet = 0
    for version in below[first:] + below[:first]:
        for number in range(len(current.holders(version)), version.instances_min):
            why = f"instance {number + 1} of the {version.instances_min} that are always loaded"
            if not current.load(version, OrderReason.MINIMUM, why):
                unmet += 1
                break
        if current.is_full:
            return unmet_after
        if unmet == UNMET_MAX:
            return version.content_id
    return ""


def _leave_draining_workers(current: PlanningRound) -> None:
    """Load elsewhere what a worker that stops is likely to be asked for; unload it there once that is ready."""
    for worker in current.draining:
        for content_id in sorted(worker.instances):
            version, instance = current.version(content_id), worker.instances[content_id]
            if version is None or current.was_asked(worker.id, content_id):
                continue
            if current.holders(version):
                if current.is_ready(version) and evictable(instance):
                    current.unload(worker.id, version, OrderReason.DRAIN, f"{worker.id} stops soon")
                continue
            soon = 1.0 if instance.in_use else current.soon(version)
            if soon >= DRAIN_SOON_MIN:
                worth_s = soon * current.load_s(version)
                current.load(version, OrderReason.DRAIN, f"{worker.id} stops soon", price_max_s=worth_s)


def _share_load(current: PlanningRound) -> None:
    """Load another instance where those that there are cannot run the calls that arrive."""
    for version in current.busy:
        holders = current.holders(version)
        load = version.calls_per_s * version.run_s
        if not holders or load <= LOAD_HIGH * len(holders):
            continue
        for _ in range(min(COPIES_PER_ROUND, math.ceil(load / LOAD_WANTED) - len(holders))):
            why = f"its calls take {100 * load / len(holders):.0f} % of the time of {len(holders)} instance(s)"
            if not current.load(version, OrderReason.LOAD, why, price_max_s=LOAD_WORTH * current.load_s(version)):
                break


def _prefetch(current: PlanningRound) -> None:
    """Load what is called like clockwork shortly before its call."""
    for version in current.versions:
        if not version.usage.count or not version.last_used or current.holders(version):
            continue
        expected_in_s = prefetch_in(version.usage, current.load_s(version), version.last_used, current.now)
        if expected_in_s is None:
            continue
        why = f"a call is expected in {max(0.0, expected_in_s):.0f} s"
        current.load(version, OrderReason.PREFETCH, why, price_max_s=PREFETCH_WORTH * current.load_s(version))


def prefetch_in(usage: Usage, load_s: float, last_used: float, now: float) -> float | None:
    """Return the seconds until the expected call of an unloaded version that is to be loaded now; otherwise None."""
    period_s = usage.period_s
    if not period_s:
        return None
    expected_in_s = last_used + period_s - now
    spread_s = PREFETCH_DEVIATIONS * usage.deviation_s
    if -spread_s <= expected_in_s <= load_s + spread_s + PREFETCH_LEAD_S:
        return expected_in_s
    return None


def _unload_idle(current: PlanningRound) -> None:
    """Unload what had no call for `idle_s`."""
    for version in current.versions:
        if not version.idle_s or version.pin:
            continue
        holders = current.holders(version)
        spare = len(holders) - version.instances_min
        for worker, instance in holders:
            unused_s = current.now - max(instance.last_used, instance.loaded_at)
            if spare > 0 and unused_s > version.idle_s and evictable(instance):
                current.unload(worker, version, OrderReason.IDLE, f"idle for {unused_s:.0f} s")
                spare -= 1


def _unload_surplus(current: PlanningRound) -> None:
    """Unload instances beyond `instances_max`, and copies that are not needed any longer."""
    for version in current.versions:
        holders = current.holders(version)
        if len(holders) < 2 or version.pin:
            continue
        if not (version.instances_max and _unload_beyond_max(current, version, holders)):
            _unload_copy(current, version, holders)


def _unload_beyond_max(current: PlanningRound, version: ServedVersion, holders: Sequence[Holder]) -> bool:
    """Unload instances beyond `instances_max` of each pool; return whether there are any."""
    found = False
    for pool in version.pools:
        in_pool = [one for one in holders if current.pool_of(one[0]) == pool]
        surplus = len(in_pool) - version.instances_max
        if surplus > 0:
            why = f"{len(in_pool)} instances in pool {pool}, instances_max is {version.instances_max}"
            current.unload_busiest(in_pool, version, why, surplus)
            found = True
    return found


def _unload_copy(current: PlanningRound, version: ServedVersion, holders: Sequence[Holder]) -> None:
    others = len(holders) - 1
    if others < version.instances_min or current.was_ordered(version.content_id):
        return
    if version.calls_per_s * version.run_s > LOAD_LOW * others:
        return
    busiest = max(current.utilisation(worker) for worker, _ in holders)
    # Two instances where one is enough survive the loss of a worker, so they stay unless something is short. More stay
    # while memory is plentiful: workers load by themselves what fits.
    if (others > 1 and not current.is_plentiful(holders)) or busiest > UTILISATION_HIGH or current.is_short(holders):
        current.unload_busiest(holders, version, f"{others} instance(s) can run its calls")


def _second_copies(current: PlanningRound) -> None:
    """Load a second instance of what is called regularly, where memory is plentiful: it survives a worker's loss."""
    for version in current.versions:
        usage = version.usage
        if usage.count < REGULAR_GAPS_MIN or not REGULAR_S[0] <= usage.mean_s <= REGULAR_S[1]:
            continue
        holders = current.holders(version)
        if len(holders) == 1 and current.now - version.last_used <= REGULAR_S[1]:
            current.load(version, OrderReason.REGULAR, "its second instance: it is called regularly", free_only=True)


def _spread(current: PlanningRound) -> None:
    """Load what a busy worker runs most on a worker with little to do; the copy on the busy one is surplus later."""
    for worker, utilisation in current.busiest():
        if utilisation <= UTILISATION_HIGH:
            return
        for version, share in current.shares(worker):
            if share < SHARE_MIN or current.was_ordered(version.content_id) or current.must_stay(worker, version):
                continue
            why = f"{worker} is busy for {100 * utilisation:.0f} % of the time"
            # The other worker does not become a busy one, from which something would move next.
            target_max = min(UTILISATION_HIGH, utilisation - SPREAD_GAIN) - share
            worth_s = SPREAD_WORTH * current.load_s(version)
            if current.load(version, OrderReason.SPREAD, why, price_max_s=worth_s, utilisation_max=target_max):
                break
