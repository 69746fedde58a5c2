"""A simulated fleet of several pools: who answers, who takes over, and what its options may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millstream.plugins.plan.pools import check_pools, parse_pools
from millstream.plugins.plan.simulation.fleet_options import FleetOptions, SimulatedPool
from millstream.plugins.plan.simulation.models import SimulatedModel, generated_models, read_models
from millstream.plugins.plan.simulation.policies import POLICIES
from millstream.plugins.plan.simulation.simulator import Outcome, Simulator
from millstream.plugins.plan.simulation.traffic import Trace, generated_trace
from millstream.services.errors import Failure
from millstream.services.placement.views import Footprint

GPU, CPU = SimulatedPool("gpu", 1, 100, runs=1, speed=4.0), SimulatedPool("cpu", 2, 100, runs=1)
END_S = 1000.0  # of traces, of which the first quarter is not counted


def model(
    name: str, size: int = 60, load_s: float = 1.0, run_s: float = 0.01, pools: tuple[str, ...] = ()
) -> SimulatedModel:
    return SimulatedModel(name, Footprint(size, 0, load_s, True), run_s, pools=pools)


def simulate(
    models: list[SimulatedModel], calls: list[tuple[float, int]], *pools: SimulatedPool, timeout_s: float = 30.0
) -> Outcome:
    options = FleetOptions(1, 1, timeout_s=timeout_s, round_s=0.0, pools=pools)
    seconds, called = zip(*sorted(calls), strict=True)
    trace = Trace(np.array(seconds), np.array(called, np.int32), END_S)
    return Simulator(models, options, POLICIES["millstream"]).run(trace)


@pytest.mark.parametrize("name", POLICIES)
def test_every_call_ends_in_one_way_and_no_budget_is_exceeded(name: str) -> None:
    pools = (SimulatedPool("gpu", 1, 2 << 30, speed=8.0), SimulatedPool("cpu", 2, 3 << 30))
    options = FleetOptions(3, 2 << 30, restart_s=700.0, pools=pools)
    simulator = Simulator(generated_models(60, seed=3), options, POLICIES[name], seed=1)

    def check(_: float) -> None:
        for worker in simulator._state.workers:
            assert 0 <= worker.used_bytes <= worker.budget_bytes

    outcome = simulator.run(generated_trace(60, hours=2.0, seed=3), check)
    assert outcome.hits + len(outcome.cold_s) + sum(outcome.refused.values()) + outcome.expired == outcome.calls
    assert set(outcome.answered) == {"gpu", "cpu"}
    assert sum(outcome.answered.values()) == outcome.calls - sum(outcome.refused.values()) - outcome.expired


def test_the_preferred_pool_answers_while_it_can() -> None:
    outcome = simulate([model("a")], [(at * 10.0, 0) for at in range(100)], GPU, CPU)
    assert outcome.answered == {"gpu": 75}
    chosen = simulate([model("a", pools=("cpu", "gpu"))], [(at * 10.0, 0) for at in range(100)], GPU, CPU)
    assert chosen.answered == {"cpu": 75}, "the model says which one it prefers"


def test_what_the_preferred_pool_would_answer_too_late_the_next_pool_answers() -> None:
    """40 calls at once of 2 s each, 0.5 s on the GPU, with 10 s for each: the GPU answers 20 of them in time."""
    warm = [(10.0, 0), (20.0, 0)]
    burst = [(500.0, 0)] * 40
    outcome = simulate([model("a", run_s=2.0)], warm + burst, GPU, CPU, timeout_s=10.0)
    assert outcome.answered["gpu"] == 20
    assert outcome.answered["cpu"] > 0, "it loaded the model for them"
    assert not outcome.refused


def test_while_the_preferred_pool_is_replaced_the_next_one_answers() -> None:
    pools = (GPU, SimulatedPool("cpu", 1, 100))
    options = FleetOptions(2, 100, round_s=0.0, restart_s=400.0, pools=pools)
    seconds = np.arange(0.0, END_S, 2.0)
    trace = Trace(seconds, np.zeros(len(seconds), np.int32), END_S)
    outcome = Simulator([model("a")], options, POLICIES["millstream"]).run(trace)
    assert outcome.hits + len(outcome.cold_s) == outcome.calls
    assert 3 <= outcome.answered["cpu"] <= 10, "until the GPU's worker serves again"


def test_a_model_that_only_the_next_pool_has_room_for_is_answered_there() -> None:
    outcome = simulate([model("a", 200)], [(300.0, 0), (400.0, 0)], GPU, SimulatedPool("cpu", 1, 300))
    assert outcome.answered == {"cpu": 2}


def test_pools_are_read_from_the_command() -> None:
    default = SimulatedPool("cpu", 2, 8 << 30, 1, 2)
    assert parse_pools(["gpu=1,memory=16GiB,speed=8", "cpu=2,runs=4,loads=2"], default) == (
        SimulatedPool("gpu", 1, 16 << 30, 1, 2, 8.0),
        SimulatedPool("cpu", 2, 8 << 30, 2, 4, 1.0),
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["gpu"], "write NAME=WORKERS"),
        (["=1"], "write NAME=WORKERS"),
        (["gpu=0"], "workers is a number from 1 to 10000"),
        (["gpu=1,memry=1GiB"], "there is no option memry; did you mean memory="),
        (["gpu=1,x=1"], "the options are memory, speed, runs, loads"),
        (["gpu=1,memory=0"], "memory is a size like 8GiB"),
        (["gpu=1,speed=0"], "speed is a number from 0.001 to 1000"),
        (["gpu=1,speed=nan"], "speed is a number"),
        (["gpu=1,runs=1.5"], "runs is a number from 1 to 1024"),
        (["gpu=1,speed=1,speed=2"], "speed is given twice"),
        (["gpu=1", "gpu=2"], "the pool gpu is named twice"),
        ([f"p{at}=1" for at in range(17)], "16 pools are the most"),
    ],
)
def test_wrong_pools_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pools(texts, CPU)


def test_a_size_that_is_none_and_a_pool_that_there_is_not_are_refused() -> None:
    with pytest.raises(Failure, match="write a size like 8GiB"):
        parse_pools(["gpu=1,memory=x"], CPU)
    with pytest.raises(Failure, match=r"model 'a': there is no pool 'gpus' \(did you mean 'gpu'\?\); the pools are"):
        check_pools([model("a", pools=("gpus",))], [GPU, CPU])


def test_the_pools_of_models_in_a_table() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "memory_bytes": "1", "pools": "gpu  cpu"},
        {"name": "b", "memory_bytes": 1, "pools": ["cpu"]},
        {"name": "c", "memory_bytes": 1, "pools": ""},
    ]
    assert [one.pools for one in read_models(rows)] == [("gpu", "cpu"), ("cpu",), ()]
    for pools, message in ((7, "write names"), ([1], "write names"), ("cpu cpu", "each pool is named once")):
        with pytest.raises(ValueError, match=message):
            read_models([{"name": "a", "memory_bytes": 1, "pools": pools}])
