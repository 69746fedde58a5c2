"""Traces of more models than fit: no call is refused, none is starved, and the mean wait is at most that of LRU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from millstream.plugins.plan.simulation.fleet_options import FleetOptions
from millstream.plugins.plan.simulation.models import SimulatedModel, generated_models
from millstream.plugins.plan.simulation.policies import POLICIES
from millstream.plugins.plan.simulation.report import Summary, summary_of
from millstream.plugins.plan.simulation.simulator import Simulator
from millstream.plugins.plan.simulation.traffic import Trace, generated_trace, sorted_trace
from millstream.services.placement.views import Footprint, RefusalKind

MIB = 1 << 20
NOISE = 1.03  # the order of equal calls alone changes a mean wait by this much; and LRU knows of loads at once


def model(name: str, size: int = 100 * MIB, load_s: float = 0.6, run_s: float = 0.015) -> SimulatedModel:
    return SimulatedModel(name, Footprint(size, size // 10, load_s, measured=True), run_s)


def cyclic(number: int, gap_s: float, end_s: float) -> Trace:
    """Return calls in turn: the one that was called longest ago is the next."""
    instants = np.arange(0.0, end_s, gap_s)
    return sorted_trace(instants.tolist(), [at % number for at in range(len(instants))])


def poisson(rates: Sequence[float], end_s: float) -> Trace:
    random, seconds, models = np.random.default_rng(1), [], []
    for at, rate in enumerate(rates):
        instants = np.cumsum(random.exponential(1 / rate, int(1.3 * rate * end_s) + 20))
        seconds += instants[instants < end_s].tolist()
        models += [at] * int((instants < end_s).sum())
    return sorted_trace(seconds, models)


def simulated(policy: str, models: list[SimulatedModel], fleet: FleetOptions, trace: Trace) -> Summary:
    return summary_of(Simulator(models, fleet, POLICIES[policy], 1).run(trace))


FOUR = [model(f"m{at}") for at in range(4)]
NINE = [model(f"m{at}") for at in range(9)]
FOR_THREE = FleetOptions(1, 340 * MIB)
FOR_EIGHT = FleetOptions(2, 430 * MIB)
TRACES = {
    "each once a second": (FOUR, FOR_THREE, cyclic(4, 0.25, 600.0)),
    "in turn": (FOUR, FOR_THREE, cyclic(4, 1.0, 1200.0)),
    "in turn, seldom": (FOUR, FOR_THREE, cyclic(4, 10.0, 6000.0)),
    "in turn, two workers": (NINE, FOR_EIGHT, cyclic(9, 0.25, 600.0)),
    "at random": (FOUR, FOR_THREE, poisson([1.0] * 4, 600.0)),
    "at random, two workers": (NINE, FOR_EIGHT, poisson([0.5] * 9, 900.0)),
    "memory for one of two": (FOUR[:2], FleetOptions(1, 150 * MIB), poisson([1.0, 1.0], 600.0)),
    "hot and seldom": (NINE[:8], FleetOptions(1, 640 * MIB), poisson([3, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02], 1200.0)),
    "loads that take long": (
        [model(f"m{at}", load_s=5.0) for at in range(4)],
        FOR_THREE,
        cyclic(4, 0.25, 600.0),
    ),
    "a hog and a neighbour": (
        [model(f"hog-{at}") for at in range(20)] + [model("neighbour")],
        FleetOptions(1, 640 * MIB),
        poisson([0.2] * 20 + [0.5], 600.0),
    ),
    "called without a pause": (FOUR, FOR_THREE, poisson([20.0] * 4, 120.0)),
    "like Azure Functions": (generated_models(60, 202), FleetOptions(2, 2 << 30), generated_trace(60, 1.0, 202)),
}


@pytest.mark.parametrize("name", TRACES)
def test_no_call_is_refused_and_none_waits_longer_than_with_lru(name: str) -> None:
    models, fleet, trace = TRACES[name]
    ours = simulated("millstream", models, fleet, trace)
    assert (ours.refused, ours.expired, ours.starved) == ({}, 0, 0)
    assert ours.hits + ours.cold_calls == ours.calls
    for other in ("byte-lru", "count-lru"):
        theirs = simulated(other, models, fleet, trace)
        assert ours.mean_wait_s <= NOISE * theirs.mean_wait_s, (name, other)


def test_only_what_cannot_be_loaded_in_time_is_refused() -> None:
    """Loads take 3 s, and calls wait 1 s: each is refused, and its model loaded for the next one."""
    models = [model(f"m{at}", load_s=3.0) for at in range(2)]
    trace = cyclic(2, 2.0, 400.0)
    for memory_bytes, refused in ((340 * MIB, 0), (150 * MIB, None)):
        outcome = Simulator(
            models, FleetOptions(1, memory_bytes, timeout_s=1.0, round_s=0.0), POLICIES["millstream"]
        ).run(trace)
        assert outcome.refused.keys() <= {RefusalKind.TOO_SLOW}
        assert refused is None or outcome.refused.total() == refused
        assert outcome.hits > 0, "what was loaded serves calls that come again"


def test_a_model_that_never_pauses_gives_way() -> None:
    """Its calls fill its worker, whose memory is for one model; the other one is answered all the same."""
    models = [model("endless", run_s=0.5), model("seldom")]
    trace = poisson([1.5, 0.05], 1200.0)
    outcome = Simulator(models, FleetOptions(1, 150 * MIB, runs=1), POLICIES["millstream"]).run(trace)
    assert outcome.served[1] == outcome.called[1]
    assert outcome.served[0] > 0.9 * outcome.called[0]
