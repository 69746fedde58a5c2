"""A request with more rows than a run takes, in a lane: what its parts wait for, and what ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.gateway.scheduling.batching.dispatch import DEPTH
from millstream.gateway.scheduling.completion import ABANDON_S
from millstream.gateway.scheduling.lane_state import InFlightBatch
from millstream.gateway.scheduling.request import Part, Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import OutputTensor, own_copies
from millstream.services.access.document import Limits
from millstream.services.access.limits import Account
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import ModelConfig, QueuePolicy
from millstream.services.model.profile import Profile
from millstream.services.wire.batch import decode_batch
from tests.kit.lane_harness import LaneBench
from tests.kit.loopback import run_batch
from tests.kit.responders import Discard

RUN_S = 0.1
ROWS_MAX = 8


class Heard(Discard):
    """Keeps the answers."""

    def __init__(self) -> None:
        self.replies: dict[int, list[OutputTensor]] = {}
        self.failures: dict[int, Failure] = {}

    def answer(self, requests: Any, outputs: Any) -> None:
        for request, reply in zip(requests, outputs.replies([one.rows for one in requests]), strict=True):
            self.answer_one(request, reply)

    def answer_one(self, request: Request, reply: Any) -> None:
        assert id(request) not in self.replies
        self.replies[id(request)] = own_copies(reply)

    def fail(self, request: Request, failure: Failure) -> None:
        self.failures[id(request)] = failure


class Parts:
    """A lane whose runs take up to `rows_max` rows, and callers that hear their answers."""

    def __init__(self, home: Path, rows_max: int = ROWS_MAX, instances: int = 1, **how: Any) -> None:
        config = how.pop("config", None) or ModelConfig(rows_max=rows_max)
        self.bench = LaneBench(home, {1: RUN_S / 2, rows_max: RUN_S}, instances, config=config, **how)
        self.lane, self.heard = self.bench.lane, Heard()

    def ask(self, rows: int, timeout_s: float = 60.0, priority: int = 0) -> tuple[Request, np.ndarray[Any, Any]]:
        request, x = self.request(rows, timeout_s, priority)
        self.lane.add(request, x.nbytes)
        self.bench.turn()
        return request, x

    def request(self, rows: int, timeout_s: float = 60.0, priority: int = 0) -> tuple[Request, np.ndarray[Any, Any]]:
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        now = self.bench.now
        request = Request([InputTensor(x.shape, x, x.nbytes)], rows, priority, now, now + timeout_s, self.heard)
        return request, x

    def run(self, at: int = 0) -> list[int]:
        """Run one of the batches that were put, and return the rows of its requests."""
        entry, blob = self.bench.link.waiting.pop(at)
        self.bench.link._on_reply(run_batch(entry, blob))
        self.bench.turn()
        return decode_batch(entry)[0].rows

    def run_all(self) -> None:
        while self.bench.link.waiting:
            self.run()

    def answered(self, request: Request, x: np.ndarray[Any, Any]) -> bool:
        reply = self.heard.replies.get(id(request))
        return reply is not None and np.array_equal(np.asarray(reply[0].array), 2 * x[:, :2])

    def nothing_left(self) -> None:
        admission = self.bench.admission
        assert (admission.requests, admission.bytes, self.lane.idle, self.lane.splits.open) == (0, 0, True, set())
        assert self.lane.rows_waiting == 0


def rows_of(batch: InFlightBatch) -> list[Part]:
    return [part for part in batch.requests if isinstance(part, Part)]


@given(data=st.data(), rows_max=st.integers(1, 20), instances=st.integers(0, 3))
@settings(deadline=None)
def test_all_rows_come_back_in_order(tmp_path_factory, data, rows_max, instances):
    parts = Parts(tmp_path_factory.mktemp("parts"), rows_max, instances)
    asked = []
    for rows in data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=6)):
        asked.append(parts.ask(rows))
        for _ in range(data.draw(st.integers(0, 3))):
            if parts.bench.link.waiting:
                taken = parts.run(data.draw(st.integers(0, len(parts.bench.link.waiting) - 1)))
                assert sum(taken) <= rows_max
    parts.lane.update_instances(2, Profile({rows_max: RUN_S}), rows_max, same_host=False, failed=None)
    parts.bench.turn()
    while parts.bench.link.waiting:
        parts.run(data.draw(st.integers(0, len(parts.bench.link.waiting) - 1)))
    assert all(parts.answered(*one) for one in asked)
    parts.nothing_left()


def test_small_requests_go_between_the_parts_of_large_ones(tmp_path):
    parts = Parts(tmp_path)
    large = [parts.ask(1000) for _ in range(2)]
    for _ in range(5):
        parts.run()
    small = parts.ask(1)
    runs = 0
    while not parts.answered(*small):
        parts.run()
        runs += 1
    assert runs <= DEPTH + len(large) + 1  # those in the workers, one that waits of each, its own
    for _ in range(10):  # and a stream of small ones does not starve the large ones
        parts.ask(1)
        parts.run()
    parts.run_all()
    assert all(parts.answered(*one) for one in large)
    parts.nothing_left()


def test_no_more_parts_are_out_than_the_workers_have_slots(tmp_path):
    parts = Parts(tmp_path, instances=2)
    large = [parts.ask(1000 + rows) for rows in range(3)]
    while parts.bench.link.waiting:
        waiting = sum(len(split.parts) for split in parts.lane.splits.open)
        assert waiting <= max(2 * DEPTH, len(large) + 2 * DEPTH)
        parts.run()
    assert all(parts.answered(*one) for one in large)


def test_a_part_that_fails_fails_the_request_with_its_error(tmp_path):
    parts = Parts(tmp_path)
    request, _ = parts.ask(100)
    parts.run()
    parts.bench.answer(failures={0: [Code.MODEL.value, "row 3 is bad"]})
    assert parts.heard.failures[id(request)].message == "in rows 8 to 15: row 3 is bad"
    assert request.done
    parts.run_all()
    assert not parts.heard.replies
    parts.nothing_left()


def test_a_part_whose_worker_died_runs_again_alone(tmp_path):
    parts = Parts(tmp_path)
    asked = parts.ask(100)
    parts.run()
    batch = next(iter(parts.bench.pending.values()))
    lost = [part.first_row for part in rows_of(batch)]
    parts.bench.link.waiting.pop(0)
    parts.lane.recovery.give_up(batch)
    parts.bench.turn()
    again = [one for one in parts.bench.pending.values() if one.attempt == 2]
    assert [[part.first_row for part in rows_of(one)] for one in again] == [lost]
    parts.run_all()
    assert parts.answered(*asked)
    parts.nothing_left()


def test_a_part_that_kills_again_is_refused_when_it_comes_back(tmp_path):
    parts = Parts(tmp_path)
    request, _ = parts.ask(100)
    for _ in range(2):
        batch = max(parts.bench.pending.values(), key=lambda one: one.attempt)
        parts.bench.link.waiting.pop(-1 if batch.attempt > 1 else 0)
        parts.lane.recovery.give_up(batch)
    assert parts.heard.failures[id(request)].code is Code.MODEL
    runs = len(parts.bench.link.waiting)
    parts.run_all()
    again, _ = parts.ask(100)
    assert parts.heard.failures[id(again)].code is Code.MODEL
    assert not parts.bench.link.waiting
    assert runs
    parts.nothing_left()


def test_the_deadline_ends_all_parts(tmp_path):
    parts = Parts(tmp_path)
    request, _ = parts.ask(100, timeout_s=5)
    parts.run()
    parts.bench.link.up = False  # what enters the lane now waits in it
    parts.run_all()
    parts.bench.now = 5.0
    parts.lane.tick(5.0)
    assert parts.heard.failures[id(request)].code is Code.EXPIRED
    assert not parts.lane.waiting
    parts.nothing_left()


def test_the_deadline_counts_behind_requests_with_earlier_turns(tmp_path):
    parts = Parts(tmp_path)
    request, _ = parts.ask(100, timeout_s=2)
    parts.bench.now = 1.0
    parts.bench.link.up = False
    parts.run()  # the next part waits, its turn is at 3
    others = [parts.ask(1, timeout_s=1.9) for _ in range(3)]
    parts.bench.now = 2.0
    for batch in list(parts.bench.pending.values()):
        parts.lane.recovery.expire(batch, 2.0)
    parts.lane.tick(2.0)
    assert parts.heard.failures[id(request)].code is Code.EXPIRED
    parts.bench.link.up = True
    parts.lane.dispatcher.dispatch()
    parts.run_all()
    assert all(parts.answered(*one) for one in others)


def test_a_caller_that_goes_ends_all_parts(tmp_path):
    parts = Parts(tmp_path)
    request, _ = parts.ask(100)
    parts.run()
    parts.lane.cancel(request)
    assert parts.lane.waiting == 0
    parts.run_all()
    assert not parts.heard.replies
    assert not parts.heard.failures
    parts.nothing_left()


def test_the_run_of_a_caller_that_went_is_ended(tmp_path):
    parts = Parts(tmp_path)
    request, _ = parts.ask(100)
    parts.lane.cancel(request)
    for batch in list(parts.bench.pending.values()):
        parts.lane.recovery.leave(batch, parts.bench.now)
    assert len(parts.bench.link.left) == DEPTH
    parts.bench.now = 60 + ABANDON_S + 1
    for batch in list(parts.bench.pending.values()):
        parts.lane.recovery.expire(batch, parts.bench.now)
    parts.nothing_left()


def test_parts_in_flight_count_for_the_key_of_a_caller_that_went(tmp_path):
    parts = Parts(tmp_path)
    account = Account("team", Limits(concurrency=4), 0.0)
    account.enter(0.0)
    request = parts.request(100)[0]
    request.account = account
    parts.lane.add(request, 1600)
    parts.bench.turn()
    account.leave()
    parts.lane.cancel(request)
    assert account.in_flight == DEPTH
    parts.run_all()
    assert account.in_flight == 0


def test_a_long_timeout_does_not_make_each_part_wait_longer(tmp_path):
    parts = Parts(tmp_path, config=ModelConfig(rows_max=ROWS_MAX, timeout_ms_default=10_000))
    asked = parts.ask(100, timeout_s=600)
    while not parts.answered(*asked):
        parts.ask(ROWS_MAX, timeout_s=20)  # as much as runs: the lane is never without one that waits
        parts.run()
        parts.bench.now += RUN_S
    assert parts.bench.now < 30
    parts.run_all()


def test_a_queue_policy_bounds_the_wait_of_each_part_and_counts_none(tmp_path):
    policy = QueuePolicy(timeout_ms_default=500, requests_max=1)
    parts = Parts(tmp_path, config=ModelConfig(rows_max=ROWS_MAX, queue=policy))
    asked = parts.ask(100)
    for _ in range(DEPTH):  # parts of the other wait, but no request
        small = parts.ask(1)
        while not parts.answered(*small):
            parts.run()
            parts.bench.now += RUN_S
            parts.lane.tick(parts.bench.now)
    while not parts.answered(*asked):
        parts.run()
        parts.bench.now += RUN_S
        parts.lane.tick(parts.bench.now)
    assert parts.bench.now > 1.0  # longer in all than a request may wait
    request, _ = parts.ask(100)
    parts.bench.link.up = False
    parts.run()
    parts.bench.now += 0.6
    parts.lane.tick(parts.bench.now)
    assert parts.heard.failures[id(request)].message == "Request timeout expired"
    parts.bench.link.up = True
    parts.run_all()
    parts.nothing_left()


def test_a_version_that_is_removed_answers_all_parts(tmp_path):
    parts = Parts(tmp_path)
    asked = parts.ask(100)
    parts.run()
    parts.lane.close()
    assert not parts.lane.splits.rows
    parts.run_all()
    assert parts.answered(*asked)


def test_outputs_that_differ_cannot_be_joined(tmp_path):
    parts = Parts(tmp_path)
    request, _ = parts.ask(100)
    parts.run()
    parts.bench.answer(columns=3)
    failure = parts.heard.failures[id(request)]
    assert failure.code is Code.INVALID
    assert "in rows 8 to 15: output 'y' has the shape [8, 3], and other dimensions for other rows" in failure.message
    assert "send at most 8 rows" in failure.message
    parts.run_all()
    parts.nothing_left()


def test_rows_that_influence_each_other_do_not_run_in_parts(tmp_path):
    parts = Parts(tmp_path)
    parts.lane.update_instances(1, Profile({8: RUN_S}), 8, same_host=False, failed=None, batching_off=True)
    with pytest.raises(Failure, match="at most 8 rows, not 9") as refusal:
        parts.ask(9)
    assert refusal.value.code is Code.INVALID
    asked = parts.ask(8)
    parts.run()
    assert parts.answered(*asked)
    parts.nothing_left()


def test_outputs_that_are_too_large_are_refused_before_a_run(tmp_path):
    parts = Parts(tmp_path, reply_bytes_max=8 * 100)
    with pytest.raises(Failure, match="take 808 bytes, more than the 800") as refusal:
        parts.ask(101)
    assert refusal.value.code is Code.TOO_LARGE
    asked = parts.ask(100)
    parts.run_all()
    assert parts.answered(*asked)
    parts.nothing_left()


def test_outputs_that_turn_out_too_large_take_no_memory(tmp_path):
    parts = Parts(tmp_path, reply_bytes_max=1 << 20)
    request, _ = parts.ask(1000)
    parts.bench.answer(columns=1000)
    assert parts.heard.failures[id(request)].message.startswith("the outputs of the request take 4000000 bytes")
    parts.run_all()
    parts.nothing_left()


def test_outputs_count_in_the_memory_of_the_gateway(tmp_path):
    parts = Parts(tmp_path)
    admission = parts.bench.admission
    first, x = parts.ask(1000)
    assert admission.bytes == x.nbytes
    parts.run()
    assert admission.bytes == x.nbytes + 1000 * 8
    other, _ = parts.ask(10)
    admission.bytes += (filled := admission._bytes_max - admission.bytes)
    parts.run_all()
    admission.bytes -= filled
    assert parts.heard.failures[id(other)].code is Code.UNAVAILABLE
    assert id(first) in parts.heard.replies
    parts.nothing_left()


def test_the_lane_bounds_the_parts_that_wait(tmp_path):
    parts = Parts(tmp_path, rows_waiting_max=3 * ROWS_MAX)
    asked = [parts.ask(100 * rows) for rows in range(1, 5)]
    with pytest.raises(Failure, match="the queue of model 'm' is full: 24 rows wait") as refusal:
        parts.ask(100)
    assert refusal.value.code is Code.OVERLOADED
    parts.run_all()
    assert all(parts.answered(*one) for one in asked)
    parts.nothing_left()


def test_a_large_request_does_not_refuse_one_that_is_a_little_larger_than_a_run(tmp_path):
    parts = Parts(tmp_path)
    large = parts.ask(10_000, timeout_s=600)
    other = parts.ask(ROWS_MAX + 1, timeout_s=2)
    runs = 0
    while not parts.answered(*other):
        parts.run()
        runs += 1
    assert runs <= 2 * DEPTH + 2
    parts.run_all()
    assert parts.answered(*large)


def test_a_request_that_would_be_late_is_refused_whole(tmp_path):
    parts = Parts(tmp_path)
    first = parts.ask(800, timeout_s=60)
    with pytest.raises(Failure, match="later than the request may wait"):
        parts.ask(800, timeout_s=5)
    assert parts.bench.admission.requests == 1
    parts.run_all()
    assert parts.answered(*first)


def test_it_counts_once(tmp_path):
    parts = Parts(tmp_path)
    parts.ask(100)
    parts.lane.tick(0.0)
    assert parts.lane.rows_waiting == 100 - DEPTH * ROWS_MAX
    assert parts.lane.splits.requests_waiting() == (1, 0)
    parts.run_all()
    assert parts.lane.metrics.answered_requests == 1
    assert parts.lane.state.rows_done == 100
    failed, _ = parts.ask(100)
    parts.run()
    parts.lane.cancel(failed)
    parts.run_all()
    assert parts.lane.state.rows_done == 200
