"""What gateways and workers publish becomes facts: differences of counters, work of rows, measured start times."""

from __future__ import annotations

import pytest

from millstream.plugins.fleet.controller.autoscale.facts import (
    GATEWAYS_MAX,
    PROCESS_S_DEFAULT,
    ROW_S_DEFAULT,
    FactsOfPools,
    Starts,
    serves,
)
from millstream.plugins.fleet.scaling import GatewayLoads, PoolLoad
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from tests.kit.catalog import worker


def loads(**counters: float) -> GatewayLoads:
    return GatewayLoads(pools={"cpu": PoolLoad.model_validate(counters)})


def serving(name: str = "cpu-0", state: State = State.READY, **fields: object) -> WorkerRecord:
    one = InstanceRecord(content_id="m:1", model="m", version=1, state=state, load_s=2.0)
    return worker(one, name=name).model_copy(update={"token": "a", **fields})


def test_workers_that_start_run_and_those_that_drain_do_not():
    workers = [serving("a"), serving("b", State.LOADING), serving("c", draining=True), serving("d", pool="gpu")]
    found = FactsOfPools().take(["cpu"], {}, workers, 0)["cpu"]
    assert (found.ready, found.running) == (1, 2)


def test_arrivals_are_differences_and_the_first_look_counts_none():
    facts = FactsOfPools()
    assert facts.take(["cpu"], {"a": loads(rows=500, work_s=5)}, [], 0)["cpu"].rows == 0
    found = facts.take(["cpu"], {"a": loads(rows=530, work_s=5.6)}, [], 1)["cpu"]
    assert found.rows == 30
    assert found.work_s == pytest.approx(0.6)
    assert found.row_s == pytest.approx(0.02)


def test_a_new_gateway_counts_from_its_start_and_one_that_ended_not_at_all():
    facts = FactsOfPools()
    facts.take(["cpu"], {"a": loads(rows=500)}, [], 0)
    assert facts.take(["cpu"], {"b": loads(rows=7)}, [], 1)["cpu"].rows == 7
    assert facts.take(["cpu"], {"b": loads(rows=7)}, [], 2)["cpu"].rows == 0


def test_a_gateway_that_could_not_report_for_a_while_counts_only_what_arrived_meanwhile():
    """Spread over that time: the share of this round."""
    facts = FactsOfPools()
    facts.take(["cpu"], {"a": loads(rows=5000)}, [], 0)
    assert facts.take(["cpu"], {}, [], 1)["cpu"].rows == 0
    assert facts.take(["cpu"], {}, [], 2)["cpu"].rows == 0
    assert facts.take(["cpu"], {"a": loads(rows=5030)}, [], 3)["cpu"].rows == pytest.approx(10)
    assert facts.take(["cpu"], {"a": loads(rows=5037)}, [], 4)["cpu"].rows == 7


def test_a_gateway_that_is_older_than_the_controller_counts_from_when_it_is_first_seen():
    facts = FactsOfPools()
    facts.take(["cpu"], {}, [], 100)  # Redis has just lost its data
    old = loads(rows=10**9).model_copy(update={"counted_s": 1e6})
    assert facts.take(["cpu"], {"a": old}, [], 101)["cpu"].rows == 0
    later = loads(rows=10**9 + 5).model_copy(update={"counted_s": 1e6 + 1})
    assert facts.take(["cpu"], {"a": later}, [], 102)["cpu"].rows == 5


def test_gateways_that_ended_are_forgotten_in_the_end():
    facts = FactsOfPools()
    for number in range(3 * GATEWAYS_MAX):
        facts.take(["cpu"], {f"g{number}": loads(rows=1)}, [], number)
    assert len(facts._before) <= GATEWAYS_MAX


def test_a_counter_that_fell_counts_nothing():
    facts = FactsOfPools()
    facts.take(["cpu"], {"a": loads(rows=500)}, [], 0)
    assert facts.take(["cpu"], {"a": loads(rows=2)}, [], 1)["cpu"].rows == 0


def test_rows_without_a_measured_time_take_the_time_of_the_others():
    facts = FactsOfPools()
    facts.take(["cpu"], {"a": loads()}, [], 0)
    assert facts.take(["cpu"], {"a": loads(rows=10, unmeasured_rows=10)}, [], 1)["cpu"].work_s == 10 * ROW_S_DEFAULT
    facts.take(["cpu"], {"a": loads(rows=20, unmeasured_rows=10, work_s=5)}, [], 2)
    found = facts.take(["cpu"], {"a": loads(rows=24, unmeasured_rows=14, work_s=5)}, [], 3)["cpu"]
    assert found.work_s == pytest.approx(4 * 0.5)


def test_queues_of_gateways_add_up():
    found = FactsOfPools().take(
        ["cpu"],
        {
            "a": loads(queue_rows=3, queue_work_s=0.3, oldest_wait_s=1.5, run_s=0.1),
            "b": loads(queue_rows=4, queue_work_s=0.4, oldest_wait_s=0.5, run_s=0.2),
        },
        [serving("cpu-0"), serving("cpu-1"), serving("cpu-2", draining=True)],
        0,
    )["cpu"]
    assert (found.queue_rows, found.oldest_wait_s, found.run_s, found.ready) == (7, 1.5, 0.2, 2)
    assert found.queue_work_s == pytest.approx(0.7)
    assert found.start_s == PROCESS_S_DEFAULT + 2.0


@pytest.mark.parametrize(
    ("record", "known_s", "expected"),
    [
        (serving(), 0, True),
        (serving(state=State.LOADING), 100, False),
        (serving(state=State.FAILED), 100, False),
        (serving(draining=True), 100, False),
        (serving(token="", instances=()), 0, False),
        (serving(token="", instances=()), 100, True),  # the repository is empty
        (serving(instances=()), 0, True),
    ],
)
def test_a_worker_serves_when_it_has_loaded_what_it_loads_at_its_start(record, known_s, expected):
    assert serves(record, known_s, answered=False) is expected


def test_a_worker_whose_loads_all_failed_adds_no_capacity():
    facts, other = FactsOfPools(), serving("cpu-1", State.FAILED)
    assert facts.take(["cpu"], {}, [serving(), other], 0)["cpu"].ready == 1
    both = serving("cpu-1", State.FAILED).model_copy(
        update={"instances": (*serving(state=State.READY).instances, *other.instances)}
    )
    assert facts.take(["cpu"], {}, [serving(), both], 1)["cpu"].ready == 2, "one failed, another answers"
    assert facts.take(["cpu"], {}, [serving(), other], 2)["cpu"].ready == 2, "it unloaded what was idle"
    assert facts.take(["cpu"], {}, [serving()], 3)["cpu"].ready == 1
    assert facts.take(["cpu"], {}, [serving(), other], 4)["cpu"].ready == 1, "a process of the same name"


def test_start_times_are_measured_from_the_decision():
    starts = Starts()
    starts.ready({"a"}, 0)
    starts.wanted(1, 3, 10)
    starts.ready({"a"}, 12)
    starts.ready({"a", "b"}, 15)
    starts.ready({"a", "b", "c"}, 17)
    assert starts.start_s(99) == pytest.approx((5 + 7) / 2)


def test_a_worker_that_was_not_wanted_is_not_measured():
    starts = Starts()
    starts.ready({"a"}, 0)
    starts.wanted(1, 2, 10)
    starts.wanted(2, 1, 11)
    starts.ready({"a", "restarted"}, 30)
    assert starts.start_s(1.0) == PROCESS_S_DEFAULT + 1.0


def test_a_worker_that_comes_much_later_is_not_measured():
    starts = Starts()
    starts.ready((), 0)
    starts.wanted(0, 1, 10)
    starts.ready({"a"}, 5000)
    assert starts.start_s(0) == PROCESS_S_DEFAULT
