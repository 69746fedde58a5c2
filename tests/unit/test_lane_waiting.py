"""How requests wait where their version says so: priority levels, queue policies, preferred sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Code, Failure
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.metrics.inference import Field, recorded
from millstream.services.model.manifest import ModelConfig, QueuePolicy
from millstream.services.model.profile import Profile
from millstream.services.wire.batch import decode_batch
from tests.kit.lane_harness import LaneBench

RUN_S = 0.05  # so long that what waits behind one run waits


class Heard:
    """Who was answered, in order, and what the others were told."""

    protocol = RequestProtocol.V2

    def __init__(self) -> None:
        self.answered: list[Request] = []
        self.failed: list[tuple[Request, Code, str]] = []

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        self.answered += requests

    def answer_one(self, request: Request, reply: Reply) -> None:
        self.answered.append(request)

    def fail(self, request: Request, failure: Failure) -> None:
        self.failed.append((request, failure.code, failure.message))


@pytest.fixture
def heard() -> Heard:
    return Heard()


def bench_of(home: Path, **config: object) -> LaneBench:
    """One worker that runs one row after the other, both of its slots taken."""
    bench = LaneBench(home, {1: RUN_S}, config=ModelConfig.model_validate({"timeout_ms_default": 10_000, **config}))
    bench.add_requests(1)
    bench.add_requests(1)
    assert bench.put == [1, 1]
    return bench


def add(bench: LaneBench, heard: Heard, priority: int = 0, timeout_s: float = 10.0) -> Request:
    request = bench.request(priority=priority, timeout_s=timeout_s, responder=heard)
    bench.lane.add(request, 16)
    bench.turn()
    return request


def run_all(bench: LaneBench) -> None:
    while bench.put:
        bench.answer()


def test_a_priority_that_is_no_level_is_the_default(tmp_path: Path, heard: Heard) -> None:
    bench = bench_of(tmp_path, priority_levels=3, priority_default=2, rows_max=1)
    order = [add(bench, heard, priority) for priority in (3, 0, 9, 2, 1)]
    run_all(bench)
    low, unnamed, beyond, middle, high = order
    assert heard.answered == [high, unnamed, beyond, middle, low]
    assert [request.priority for request in order] == [3, 2, 2, 2, 1]


def test_what_waited_too_long_is_refused_in_the_references_words(tmp_path: Path, heard: Heard) -> None:
    bench = bench_of(tmp_path, queue={"timeout_ms_default": 100})
    short = add(bench, heard, timeout_s=0.001)  # its own timeout says nothing here
    bench.now = 0.099
    bench.lane.tick(bench.now)
    assert heard.failed == []
    bench.now = 0.101
    bench.lane.tick(bench.now)
    assert heard.failed == [(short, Code.UNAVAILABLE, "Request timeout expired")]
    assert (short.inputs, bench.lane.waiting) == ((), 0)
    [counted] = [known for known in recorded(bench.tally.totals()).values() if known.failed]
    assert counted.values[Field.REJECTED] == 1


def test_once_it_left_it_has_the_versions_own_deadline(tmp_path: Path, heard: Heard) -> None:
    bench = bench_of(tmp_path, queue={"timeout_ms_default": 100})
    request = add(bench, heard)
    bench.answer()
    assert bench.put == [1, 1]
    assert request.deadline == 10.0
    entry, _ = bench.link.waiting[1]
    [deadline_ms] = decode_batch(entry)[0].deadlines_ms
    assert deadline_ms - decode_batch(entry)[0].created_ms == pytest.approx(10_000)
    bench.now = 5.0
    bench.lane.tick(bench.now)
    run_all(bench)
    assert heard.answered == [request]


@pytest.mark.parametrize(("override", "refused"), [(True, True), (False, False)])
def test_a_requests_own_timeout_may_only_shorten_the_wait(
    tmp_path: Path, heard: Heard, override: bool, refused: bool
) -> None:
    bench = bench_of(tmp_path, queue={"timeout_ms_default": 100, "timeout_override": override})
    add(bench, heard, timeout_s=0.05)
    longer = add(bench, heard, timeout_s=60)
    bench.now = 0.06
    bench.lane.tick(bench.now)
    assert len(heard.failed) == refused
    bench.now = 0.11
    bench.lane.tick(bench.now)
    assert [request for request, _, _ in heard.failed][-1] is longer
    assert len(heard.failed) == 2


def test_who_is_delayed_waits_behind_all_others_and_is_not_refused(tmp_path: Path, heard: Heard) -> None:
    policies = {1: {"timeout_ms_default": 50, "timeout_action": "delay"}}
    bench = bench_of(tmp_path, priority_levels=2, priority_default=2, queue_by_priority=policies, rows_max=1)
    first = add(bench, heard, priority=1)
    bench.now = 0.06
    bench.lane.tick(bench.now)
    later = [add(bench, heard, priority=2) for _ in range(3)]
    urgent = add(bench, heard, priority=1)
    run_all(bench)
    assert heard.answered == [urgent, *later, first]
    assert heard.failed == []


def test_a_delayed_request_still_has_a_deadline(tmp_path: Path, heard: Heard) -> None:
    bench = bench_of(tmp_path, queue={"timeout_ms_default": 50, "timeout_action": "delay"})
    request = add(bench, heard)
    for bench.now in (0.06, 9.9):
        bench.lane.tick(bench.now)
        assert (bench.lane.waiting, heard.failed) == (1, [])
    bench.now = 10.1
    bench.lane.tick(bench.now)
    assert [(who, code) for who, code, _ in heard.failed] == [(request, Code.EXPIRED)]


def test_a_full_queue_is_refused_by_priority_and_what_left_makes_room(tmp_path: Path, heard: Heard) -> None:
    bench = bench_of(tmp_path, priority_levels=2, priority_default=1, queue_by_priority={2: {"requests_max": 2}})
    waiting = [add(bench, heard, priority=2) for _ in range(2)]
    with pytest.raises(Failure, match="Exceeds maximum queue size") as refused:
        add(bench, heard, priority=2)
    assert refused.value.code is Code.OVERLOADED
    add(bench, heard, priority=1)
    bench.lane.cancel(waiting[0])
    add(bench, heard, priority=2)
    with pytest.raises(Failure, match="Exceeds maximum queue size"):
        add(bench, heard, priority=2)
    run_all(bench)
    for _ in range(2):
        add(bench, heard, priority=2)


def test_without_a_policy_a_requests_timeout_is_its_deadline(tmp_path: Path, heard: Heard) -> None:
    bench = bench_of(tmp_path, priority_levels=2, priority_default=1)
    request = add(bench, heard, timeout_s=0.2)
    bench.now = 0.21
    bench.lane.tick(bench.now)
    assert [(who, code) for who, code, _ in heard.failed] == [(request, Code.EXPIRED)]


@pytest.mark.parametrize(
    ("ready", "staffed", "why"),
    [
        (True, True, "the request waited too long in the queue"),
        (False, True, "passed before its model was loaded"),
        (False, False, "passed while pool cpu had no worker"),
    ],
)
def test_a_request_that_is_late_is_told_what_it_waited_for(
    tmp_path: Path, heard: Heard, ready: bool, staffed: bool, why: str
) -> None:
    bench = bench_of(tmp_path)
    bench.owner.staffed["cpu"] = staffed
    add(bench, heard, timeout_s=0.2)
    if not ready:
        bench.lane.update_instances(0, Profile({1: RUN_S}), 1, same_host=True, failed=None)
    bench.now = 0.21
    bench.lane.tick(bench.now)
    [(_, code, message)] = heard.failed
    assert code is Code.EXPIRED
    assert why in message


def test_batches_are_cut_to_the_largest_preferred_size_that_is_there(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, {1: RUN_S, 16: RUN_S}, config=ModelConfig(rows_preferred=(4, 8)))
    bench.add_requests(13)
    assert bench.put == [8, 4]
    bench.answer()
    assert bench.put == [4, 1]


def test_a_request_is_never_split_for_a_preferred_size(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, {1: RUN_S, 16: RUN_S}, config=ModelConfig(rows_preferred=(4,)))
    for rows in (3, 3, 5):
        bench.lane.add(bench.request(rows=rows), 16 * rows)
    bench.turn()
    assert bench.put == [3, 3]
    bench.answer()
    assert bench.put == [3, 5]


def test_a_batch_of_a_preferred_size_is_not_delayed(tmp_path: Path) -> None:
    config = ModelConfig(rows_preferred=(4, 8), queue_delay_ms_max=1000)
    bench = LaneBench(tmp_path, {1: RUN_S, 16: RUN_S}, config=config)
    bench.add_requests(3)
    assert bench.put == []
    bench.add_requests(1)
    assert bench.put == [4]
    bench.add_requests(1)
    bench.now = 1.1
    bench.lane.tick(bench.now)
    assert bench.put == [4, 1]


def test_between_preferred_sizes_requests_wait_for_the_delay_and_then_go_together(tmp_path: Path) -> None:
    config = ModelConfig(rows_preferred=(4, 8), queue_delay_ms_max=1000)
    bench = LaneBench(tmp_path, {1: RUN_S, 16: RUN_S}, config=config)
    bench.add_requests(6)
    assert bench.put == [4], "the largest preferred size that is there leaves at once"
    bench.add_requests(1)
    bench.answer()
    assert bench.put == [], "three are no preferred size: they wait for a fourth"
    bench.now = 0.9
    bench.lane.tick(bench.now)
    assert bench.put == []
    bench.now = 1.1
    bench.add_requests(2)
    assert bench.put == [5], "the delay has passed: what waits goes in one batch, cut to no preferred size"


def test_requests_that_add_up_to_no_preferred_size_wait_together(tmp_path: Path) -> None:
    config = ModelConfig(rows_preferred=(4, 8), queue_delay_ms_max=1000)
    bench = LaneBench(tmp_path, {1: RUN_S, 16: RUN_S}, config=config)
    for rows in (3, 3):
        bench.lane.add(bench.request(rows=rows), 16 * rows)
    bench.turn()
    assert bench.put == [], "six rows are no preferred size, and three would leave the others to wait out the delay"
    bench.lane.add(bench.request(rows=2), 32)
    bench.turn()
    assert bench.put == [8]


def test_requests_that_cannot_make_a_preferred_size_any_more_do_not_wait(tmp_path: Path) -> None:
    config = ModelConfig(rows_preferred=(4,), queue_delay_ms_max=1000)
    bench = LaneBench(tmp_path, {1: RUN_S, 16: RUN_S}, config=config)
    for rows in (3, 3):
        bench.lane.add(bench.request(rows=rows), 16 * rows)
    bench.turn()
    assert bench.put == [3], "with the next request it would be more than the largest preferred size"


def test_preferred_sizes_count_more_than_what_was_measured_as_efficient(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, {1: RUN_S}, config=ModelConfig(rows_preferred=(6,)))
    bench.add_requests(7)
    assert bench.put == [6, 1]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"priority_levels": 3}, "priority_default must be one of the 3 priority_levels"),
        ({"priority_levels": 3, "priority_default": 4}, "priority_default must be"),
        ({"priority_default": 1}, "priority_default needs priority_levels"),
        ({"priority_levels": 2, "priority_default": 1, "queue_by_priority": {3: {}}}, "3 is no priority"),
        ({"rows_preferred": [0]}, "rows_preferred: 0 is not between 1 and rows_max"),
        ({"rows_preferred": [65]}, "rows_preferred: 65 is not between 1 and rows_max, which is 64"),
        ({"rows_preferred": list(range(1, 66)), "rows_max": 100}, "at most 64 sizes"),
        ({"warmup": [{"name": "w"}] * 65}, "at most 64 requests"),
        ({"queue": {"timeout_action": "drop"}}, "reject"),
        ({"queue": {"requests_max": -1}}, "greater than or equal to 0"),
    ],
)
def test_a_config_that_says_nothing_sensible_is_refused(config: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ModelConfig.model_validate(config)


def test_policies_have_defaults_that_change_nothing() -> None:
    assert ModelConfig().queue == QueuePolicy()
