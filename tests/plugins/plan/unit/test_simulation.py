"""The simulated fleet: budgets hold, calls are accounted for, equal seeds give equal results, the trace is as said."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest

from millstream.plugins.plan.simulation.fleet_options import FleetOptions
from millstream.plugins.plan.simulation.millstream import Millstream
from millstream.plugins.plan.simulation.models import SimulatedModel, generated_models, read_models
from millstream.plugins.plan.simulation.policies import POLICIES
from millstream.plugins.plan.simulation.report import summary_of
from millstream.plugins.plan.simulation.simulator import Simulator
from millstream.plugins.plan.simulation.traffic import Trace, generated_trace, read_trace
from millstream.services.placement.views import Footprint, RefusalKind
from millstream.services.wire.orders import OrderReason

MODELS = generated_models(60, seed=3)
TRACE = generated_trace(60, hours=3.0, seed=3)
OPTIONS = FleetOptions(workers=3, memory_bytes=2 << 30)


@pytest.mark.parametrize("name", POLICIES)
def test_every_call_ends_in_one_way_and_no_budget_is_exceeded(name):
    simulator = Simulator(MODELS, OPTIONS, POLICIES[name], seed=1)
    outcome = simulator.run(TRACE, lambda _: _check_budgets(simulator))
    assert outcome.calls > 500
    refused = sum(outcome.refused.values())
    assert outcome.hits + len(outcome.cold_s) + refused + outcome.expired == outcome.calls
    assert 0 < summary_of(outcome).hit_rate < 1
    _check_budgets(simulator)


def _check_budgets(simulator):
    models = simulator._state.models
    for worker in simulator._state.workers:
        assert 0 <= worker.used_bytes <= worker.budget_bytes
        for model, instance in worker.instances.items():
            ready = instance.loaded_at < float("inf") and not worker.draining
            assert (worker.index in simulator._state.holders[model]) == ready
        held = sum(models[model].footprint.resident_bytes for model in worker.instances)
        assert held <= worker.used_bytes


@pytest.mark.parametrize("name", POLICIES)
def test_equal_seeds_give_equal_results(name):
    first, second = (Simulator(MODELS, OPTIONS, POLICIES[name], seed=5).run(TRACE) for _ in range(2))
    assert summary_of(first) == summary_of(second)


def test_cost_beats_least_recently_used():
    models, trace, misses = generated_models(120, seed=1), generated_trace(120, hours=3.0, seed=1), {}
    for name in ("millstream", "byte-lru"):
        outcome = Simulator(models, FleetOptions(4, 2 << 30), POLICIES[name], seed=1).run(trace)
        misses[name] = outcome.calls - outcome.hits
    assert misses["millstream"] < misses["byte-lru"], misses


def test_memory_for_everything_means_no_eviction():
    outcome = Simulator(MODELS, FleetOptions(3, 64 << 30), POLICIES["millstream"]).run(TRACE)
    assert outcome.evictions == 0
    assert not outcome.refused


class _Watched(Millstream):
    """Counts the loads, and those that had to unload another model first."""

    def __init__(self, state, seed):
        super().__init__(state, seed)
        self.loads = self.unloading = self.ahead = 0

    def make_room(self, worker, model, now):
        victims = super().make_room(worker, model, now)
        self.loads += 1
        self.unloading += bool(victims)
        return victims

    def unload_ahead(self, worker, now):
        victims = super().unload_ahead(worker, now)
        self.ahead += len(victims)
        return victims


@pytest.mark.parametrize(("load_s", "ahead"), [(0.02, True), (1.0, False)])
def test_memory_is_kept_free_ahead_of_calls_of_models_that_load_fast(load_s, ahead):
    models = [_model(f"m{at}", 10 << 20, load_s) for at in range(300)]
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(300, dtype=np.int32), 3))
    trace = Trace(np.arange(len(order), dtype=np.float64) * 60.0, order, len(order) * 60.0)
    simulator = Simulator(models, FleetOptions(1, 1 << 30, round_s=0.0), _Watched)
    outcome = simulator.run(trace, lambda _: _check_budgets(simulator))
    watched = simulator._policy
    assert isinstance(watched, _Watched)
    assert not outcome.refused
    assert (watched.ahead > 0) == ahead
    assert (watched.unloading < 0.3 * watched.loads) == ahead, "otherwise most loads of a full worker unload another"


def _model(name, size, load_s=1.0, pin=False, run_s=0.01, instances_min=0, idle_s=0.0):
    return SimulatedModel(name, Footprint(size, 0, load_s, True), run_s, pin, instances_min, idle_s=idle_s)


def _held(simulator, model) -> int:
    return sum(model in worker.instances for worker in simulator._state.workers)


def _calls(*calls: tuple[float, int], end_s=1000.0):
    seconds, models = zip(*calls, strict=True)
    return Trace(np.array(seconds), np.array(models, np.int32), end_s)


def test_a_model_larger_than_a_worker_is_refused_with_its_reason():
    outcome = Simulator([_model("a", 100)], FleetOptions(1, 50), POLICIES["millstream"]).run(_calls((500.0, 0)))
    assert outcome.refused == {RefusalKind.TOO_LARGE: 1}


def test_pinned_models_stay():
    models = [_model("a", 60, pin=True), _model("b", 60)]
    trace = _calls((10.0, 0), (500.0, 1), (600.0, 0))
    outcome = Simulator(models, FleetOptions(1, 100), POLICIES["millstream"]).run(trace)
    assert outcome.refused == {RefusalKind.NOTHING_EVICTABLE: 1}
    assert outcome.hits == 1


def test_calls_wait_for_one_load_together():
    trace = _calls(*[(500.0 + at / 100, 0) for at in range(50)], (600.0, 0))
    outcome = Simulator([_model("a", 60)], FleetOptions(2, 100), POLICIES["millstream"]).run(trace)
    assert outcome.loads == 1
    assert len(outcome.cold_s) == 50
    assert max(outcome.cold_s) < 1.5


def test_a_load_longer_than_the_timeout_is_refused_and_made_all_the_same():
    trace = _calls((500.0, 0), (600.0, 0))
    outcome = Simulator([_model("a", 60, 40.0)], FleetOptions(1, 100), POLICIES["millstream"]).run(trace)
    assert outcome.refused == {RefusalKind.TOO_SLOW: 1}
    assert outcome.hits == 1


def test_a_timer_finds_its_model_loaded_although_others_used_the_memory_meanwhile():
    """Two models of one timer each share the memory of one: each is loaded ahead of its call."""
    models = [_model("a", 60), _model("b", 60)]
    calls = [(at * 600.0 + 300.0 * model + 10, model) for at in range(60) for model in (0, 1)]
    outcome = Simulator(models, FleetOptions(1, 100), POLICIES["millstream"]).run(_calls(*calls, end_s=36_000.0))
    assert outcome.planned[OrderReason.PREFETCH] >= 80
    assert summary_of(outcome).hit_rate > 0.95


def test_the_controller_keeps_instances_min_loaded_without_a_call():
    models = [_model("a", 60, instances_min=2), _model("b", 60)]
    simulator = Simulator(models, FleetOptions(3, 100), POLICIES["millstream"])
    outcome = simulator.run(_calls((10.0, 1), (400.0, 0), (600.0, 0)))
    assert outcome.hits == outcome.calls == 2
    assert _held(simulator, 0) == 2


def test_without_a_controller_nothing_is_loaded_ahead():
    outcome = Simulator(
        [_model("a", 60, instances_min=1)], FleetOptions(1, 100, round_s=0), POLICIES["millstream"]
    ).run(_calls((400.0, 0), (600.0, 0)))
    assert (outcome.hits, outcome.planned) == (1, {})


def test_what_is_called_regularly_gets_a_second_instance_while_memory_is_plentiful():
    calls = [(at * 600.0 + (at % 3) * 50 + 1, 0) for at in range(12)]
    for memory_bytes, held in ((1000, 2), (110, 1)):
        simulator = Simulator([_model("a", 100)], FleetOptions(2, memory_bytes), POLICIES["millstream"])
        outcome = simulator.run(_calls(*calls, end_s=7200.0))
        assert _held(simulator, 0) == held
        assert outcome.planned[OrderReason.REGULAR] == 0 or memory_bytes == 1000


def test_calls_that_one_instance_cannot_run_get_another_one():
    calls = [(100 + at * 0.5, 0) for at in range(2000)]  # 2 calls a second of 0.4 s
    simulator = Simulator([_model("a", 60, run_s=0.4)], FleetOptions(3, 100, runs=1), POLICIES["millstream"])
    simulator.run(_calls(*calls, end_s=1100.0))
    assert _held(simulator, 0) == 2


def test_what_idles_is_unloaded_and_loaded_again():
    models = [_model("a", 60, idle_s=100.0), _model("b", 10)]
    outcome = Simulator(models, FleetOptions(1, 100), POLICIES["millstream"]).run(
        _calls((300.0, 0), (320.0, 0), (500.0, 1), (700.0, 0), (720.0, 1))
    )
    assert outcome.planned[OrderReason.IDLE] == 1
    assert len(outcome.cold_s) == 3
    assert outcome.evictions == 0


def test_a_worker_that_restarts_leaves_its_models_to_others():
    """Two workers are replaced in turn every 200 s; models in use are loaded elsewhere when that begins."""
    calls = sorted((300.0 + at * 5 + model, model) for at in range(300) for model in range(4))
    counts = {}
    for round_s in (10.0, 0.0):
        options = FleetOptions(2, 1000, round_s=round_s, restart_s=200.0)
        simulator = Simulator([_model(name, 60) for name in "abcd"], options, POLICIES["millstream"])
        outcome = simulator.run(_calls(*calls, end_s=1800.0))
        assert not outcome.refused
        assert outcome.hits + len(outcome.cold_s) == outcome.calls
        counts[round_s] = outcome.calls - outcome.hits
        _check_budgets(simulator)
    assert counts[10.0] <= counts[0.0]


def test_a_gateway_that_sees_an_old_record_asks_another_worker():
    """Until its record says so, a worker that has just filled up seems to be free."""
    models = [_model("a", 60, pin=True), _model("b", 60, pin=True), _model("c", 60)]
    simulator = Simulator(models, FleetOptions(2, 100), POLICIES["millstream"])
    with patch.object(simulator._policy, "ordered"):  # the orders of another gateway
        outcome = simulator.run(_calls((500.0, 0), (500.001, 1), (500.002, 2), (520.0, 0)))
    assert outcome.loads == 2
    assert outcome.refused == {RefusalKind.NOTHING_EVICTABLE: 1}


def test_the_trace_has_the_published_statistics():
    rates = np.bincount(generated_trace(4000, 24.0, 7, rate_max=0.1).models, minlength=4000) / 24
    assert (rates <= 1).mean() == pytest.approx(0.45, abs=0.05)
    assert (rates <= 60).mean() == pytest.approx(0.81, abs=0.05)
    again = generated_trace(4000, 24.0, 7, rate_max=0.1)
    assert np.array_equal(again.seconds, np.sort(again.seconds))


def test_bad_tables_are_refused_with_row_and_column():
    for rows, message in (
        ([{"name": "a"}], "row 1, model 'a': memory_bytes"),
        ([{"name": "a", "memory_bytes": "x"}], "row 1: memory_bytes is 'x', which is no number"),
        ([{"name": "a", "memory_bytes": "1"}] * 2, "'a' is there twice"),
        ([{"memory_bytes": "1"}], "row 1: a model needs a name"),
        ([{"name": "a", "memory_bytes": 1, "load_s": -1}], "load_s is -1"),
        ([{"name": "a", "memory_bytes": 1, "instances_min": 3, "instances_max": 2}], "more than instances_max"),
        ([], "no model"),
    ):
        with pytest.raises(ValueError, match=message):
            read_models(rows)
    for calls, message in (
        ([{"model": "b", "seconds": "1"}], "row 1: there is no model 'b'"),
        ([{"model": "a", "seconds": "soon"}], "row 1: seconds is 'soon'"),
        ([{"model": "a", "seconds": "nan"}], "row 1: seconds is nan"),
        ([], "no call"),
    ):
        with pytest.raises(ValueError, match=message):
            read_trace(calls, ["a"])


def _plan(*arguments: str):
    command = [sys.executable, "-m", "millstream.services.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_answers_from_files(tmp_path):
    (tmp_path / "models.csv").write_text("name,memory_bytes,load_s\na,300000000,2\nb,300000000,2\n")
    calls = "".join(f"{'ab'[at % 2]},{at * 50}\n" for at in range(200))
    (tmp_path / "calls.csv").write_text("model,seconds\n" + calls)
    arguments = ["--models", str(tmp_path / "models.csv"), "--trace", str(tmp_path / "calls.csv"), "--workers", "1"]
    done = _plan(*arguments, "--memory", "1GiB", "--json", "--compare")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [one["policy"] for one in answer["policies"]] == ["millstream", "byte LRU", "count LRU"]
    assert answer["policies"][0]["hit_rate"] == 1.0, "both fit"
    assert answer["models"] == 2
    table = _plan(*arguments, "--memory", "1GiB")
    assert "hit rate" in table.stdout
    assert "100.00%" in table.stdout


def test_the_command_names_the_option_that_is_wrong(tmp_path):
    table = tmp_path / "models.csv"
    table.write_text("name,memory_bytes\na,much\n")
    for arguments, message in (
        (["--models", str(tmp_path / "none.csv")], "No such file"),
        (["--models", str(table)], "row 1: memory_bytes is 'much'"),
        (["--models", "0"], "--models 0"),
        (["--memory", "8 lots"], "--memory 8 lots"),
        (["--memory", "cpu=8GiB"], "give one size"),
        (["--memory", "0"], "needs a size"),
        (["--workers", "0"], "--workers"),
        (["--restart-hours", "0.01"], "--restart-hours 0.01"),
    ):
        done = _plan(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr
