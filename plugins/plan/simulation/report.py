"""The figures of a simulation. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millstream.plugins.plan.simulation.simulator import Outcome
from millstream.services.wire.orders import OrderReason


@dataclass(frozen=True, slots=True)
class Summary:
    """What a policy did with a trace.

    Args:
        hit_rate: share of the calls that found their model loaded.
        cold_p50_s: median of the seconds until the answer of calls that waited for a load.
        in_time_share: share of the calls that were answered within 100 ms beyond their run.
        refused: kind of refusal -> calls.
        expired: calls whose time was over before the answer.
        prefetches: loads ahead of a call.
        planned: reason -> orders of the controller, prefetches among them.
        memory_share: mean used share of the fleet's memory.
        answered: pool -> calls that it answered.
        mean_wait_s: of the calls that were answered, seconds beyond their runs; those that found their model, too.
        starved: models that were called, and of whose calls none was answered.
    """

    policy: str
    calls: int
    hits: int
    hit_rate: float
    cold_calls: int
    cold_p50_s: float
    cold_p99_s: float
    in_time_share: float
    refused: dict[str, int]
    refused_calls: int
    expired: int
    loads: int
    prefetches: int
    planned: dict[str, int]
    evictions: int
    memory_share: float
    answered: dict[str, int]
    mean_wait_s: float
    starved: int


def summary_of(outcome: Outcome) -> Summary:
    """Return the figures of an outcome."""
    cold_s = np.array(outcome.cold_s or [0.0])
    calls = max(1, outcome.calls)
    return Summary(
        policy=outcome.policy,
        calls=outcome.calls,
        hits=outcome.hits,
        hit_rate=outcome.hits / calls,
        cold_calls=len(outcome.cold_s),
        cold_p50_s=float(np.percentile(cold_s, 50)),
        cold_p99_s=float(np.percentile(cold_s, 99)),
        in_time_share=outcome.in_time / calls,
        refused={kind.value: number for kind, number in sorted(outcome.refused.items())},
        refused_calls=sum(outcome.refused.values()),
        expired=outcome.expired,
        loads=outcome.loads,
        prefetches=outcome.planned[OrderReason.PREFETCH],
        planned={reason.value: number for reason, number in sorted(outcome.planned.items())},
        evictions=outcome.evictions,
        memory_share=float(np.mean(outcome.memory_shares)) if outcome.memory_shares else 0.0,
        answered=dict(sorted(outcome.answered.items())),
        mean_wait_s=outcome.wait_s / max(1, outcome.answered.total()),
        starved=sum(number > 0 and not outcome.served[model] for model, number in outcome.called.items()),
    )
