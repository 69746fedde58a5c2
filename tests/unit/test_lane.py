"""When a batch leaves its lane: at once for an idle worker, ahead of time when that hides something."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from millstream.gateway.scheduling.admission import CANNOT_SERVE_RETRY_S, RETRY_S_MIN
from millstream.gateway.scheduling.batching.dispatch import DEPTH, IN_USE_S, LONG_RUN_S, SHORT_RUN_S, TURN_S
from millstream.gateway.scheduling.completion import DOUBT_S, LOSSES_MAX
from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.profile import Profile
from millstream.services.segments.pool import SegmentPool
from millstream.services.wire.batch import AGAIN, NO_ROOM, decode_batch
from millstream.workers.models.loaded_models import Exploration
from tests.kit.lane_harness import REST_S, ROW, SPIN_S, LaneBench
from tests.kit.responders import Discard


def bench_of(home: Path, seconds: float, instances: int) -> LaneBench:
    """Runs take so long whatever their rows."""
    return LaneBench(home, {1: seconds, 16: seconds}, instances)


def test_while_a_short_run_is_out_the_next_batch_waits_until_it_is_as_full(tmp_path):
    bench = bench_of(tmp_path, SHORT_RUN_S / 10, instances=1)
    bench.add_requests(3)
    assert bench.put == [3]
    bench.add_requests(2)
    assert bench.put == [3]
    bench.add_requests(1)
    assert bench.put == [3, 3]
    bench.add_requests(1)
    bench.answer()
    bench.answer()
    assert bench.put == [1]  # nothing is out any more: whatever waits leaves
    bench.answer()
    assert (bench.put, bench.lane.idle) == ([], True)


@pytest.mark.parametrize(("seconds", "most"), [(SHORT_RUN_S * 2, DEPTH + 1), (LONG_RUN_S, DEPTH)])
def test_behind_a_longer_run_a_batch_is_sent_ahead_however_small(tmp_path, seconds, most):
    bench = bench_of(tmp_path, seconds, instances=1)
    for requests in (3, 1, 2, 5, 1):
        bench.add_requests(requests)
    assert bench.put == [3, 1, 2][:most]
    bench.answer()
    assert bench.put == ([1, 2, 6] if most > DEPTH else [1, 8])
    assert len(bench.put) == most


def test_every_idle_instance_gets_a_batch_at_once(tmp_path):
    bench = bench_of(tmp_path, SHORT_RUN_S / 10, instances=2)
    bench.add_requests(3)
    bench.add_requests(1)
    assert bench.put == [3, 1]
    bench.add_requests(1)  # as full as the last one
    assert bench.put == [3, 1, 1]


def test_a_request_larger_than_a_batch_holds_back_no_full_batch(tmp_path):
    bench = bench_of(tmp_path, SHORT_RUN_S / 10, instances=1)
    bench.lane.add(bench.request(rows=64), 64 * len(ROW))
    bench.add_requests(15)
    assert bench.put == [64]
    bench.add_requests(1)
    assert bench.put == [64, 16]


def test_the_loop_turns_for_the_reply_to_a_lone_batch_if_the_last_one_came_soon(tmp_path):
    bench = bench_of(tmp_path, SHORT_RUN_S / 10, instances=1)
    bench.add_requests(1)
    assert bench.pass_time(SPIN_S / 2) == 0  # nothing is known yet
    bench.answer()
    for _ in range(3):
        bench.add_requests(1)
        assert bench.pass_time(SPIN_S / 2) == 10
        bench.answer()
        bench.pass_time(SPIN_S)
        assert bench.pass_time(SPIN_S) == 0
    bench.add_requests(1)
    assert 0 < bench.pass_time(SPIN_S * 10) < 10  # not for ever
    bench.answer()
    bench.add_requests(1)
    assert bench.pass_time(SPIN_S / 2) == 0  # the last one took long
    bench.answer()


def test_the_loop_does_not_turn_for_a_batch_of_many(tmp_path):
    bench = bench_of(tmp_path, SHORT_RUN_S / 10, instances=1)
    for _ in range(2):
        bench.add_requests(10)
        assert bench.pass_time(SPIN_S / 2) == 0
        bench.answer()


def test_an_idle_lane_tries_what_looks_hopeless(tmp_path):
    bench = bench_of(tmp_path, 1.0, instances=1)
    bench.lane.add(bench.request(timeout_s=0.1), 16)
    bench.turn()
    assert bench.put == [1]


def test_what_would_be_answered_too_late_is_refused_with_a_time_to_come_back(tmp_path):
    bench = LaneBench(tmp_path, {1: 0.1, 4: 0.1})
    bench.add_requests(4)
    bench.lane.add(bench.request(timeout_s=0.25), 16)  # behind one run
    with pytest.raises(Failure, match=r"would answer in about 0\.200 s") as refused:
        bench.lane.add(bench.request(timeout_s=0.15), 16)
    assert refused.value.code is Code.OVERLOADED
    assert refused.value.retry_after_s == pytest.approx(0.05)
    bench.now = 0.08  # the run before it is nearly over
    bench.lane.add(bench.request(timeout_s=0.15), 16)


def test_a_request_in_a_hurry_is_admitted_before_those_that_can_wait(tmp_path):
    bench = LaneBench(tmp_path, {1: 0.1})
    bench.add_requests(10)
    with pytest.raises(Failure):
        bench.lane.add(bench.request(timeout_s=0.25), 16)  # two runs are out
    hurried = bench.request(timeout_s=0.35)
    bench.lane.add(hurried, 16)
    bench.turn()
    bench.answer()
    assert hurried.taken


def test_requests_that_can_be_met_no_more_do_not_run(tmp_path):
    bench = LaneBench(tmp_path, {1: 0.1})
    bench.add_requests(2)
    late = bench.request(timeout_s=0.31)
    bench.lane.add(late, 16)
    bench.now = 0.28  # the first run took its time
    bench.answer()
    assert (late.done, late.taken, bench.put) == (True, True, [1])


def test_shared_memory_that_a_frozen_worker_may_still_write_to_rests(tmp_path):
    folder = tmp_path / "segments"
    folder.mkdir()
    segments = SegmentPool(folder, "m", 1 << 30)
    bench = LaneBench(tmp_path, {1: 0.1}, segments=segments, config=ModelConfig(rows_max=1000))
    for attempt in (1, 2):
        bench.lane.add(bench.request(rows=1000), 16_000)
        bench.turn()
        assert segments.in_use_bytes > 0
        bench.answer(attempt=attempt)
    assert segments.in_use_bytes > 0  # the worker of the first attempt may be in the middle of a copy
    bench.now += REST_S
    bench.lane.tick(bench.now)
    assert segments.in_use_bytes == 0
    segments.close()


def test_a_lane_learns_how_fast_replies_come(tmp_path):
    """Others share the workers: a batch comes back in three times its run."""
    bench = LaneBench(tmp_path, {1: 0.1})
    for _ in range(100):
        bench.add_requests(1)
        if len(bench.put) == DEPTH:
            bench.now += 0.3
            bench.answer()
    with pytest.raises(Failure, match=r"would answer in about 0\.[56]"):
        bench.lane.add(bench.request(timeout_s=0.5), 16)
    bench.lane.add(bench.request(timeout_s=1.0), 16)


def test_what_waits_for_a_slow_new_model_runs_together_from_the_beginning(tmp_path):
    """Its warm-up had time for one row. 16 callers came at once, and got runs of 1, 2, 2, 4, 4 and 3 rows."""
    measured = {1: 0.25}
    bench, exploration = LaneBench(tmp_path, measured), Exploration(measured, 64)
    rows_now, ran = Profile(measured).rows_worth_running(64), []
    for requests in (1, 15):
        bench.lane.update_instances(1, Profile({**measured}), rows_now, same_host=False, failed=None)
        bench.add_requests(requests)
    while bench.put:
        ran.append(bench.put[0])
        bench.now += 0.25
        rows_now = exploration.ran(ran[-1], 0.25, 1 << 30) or rows_now
        bench.lane.update_instances(1, Profile({**measured}), rows_now, same_host=False, failed=None)
        bench.answer()
    assert ran == [1, 8, 7]


def test_a_slow_new_model_tries_small_steps_while_other_lanes_are_in_use(tmp_path):
    bench = LaneBench(tmp_path, {1: 0.25})
    other = bench.another("other", {1: TURN_S / 2})
    other.add(bench.request(), 16)
    bench.turn()
    bench.lane.update_instances(1, Profile({1: 0.25}), 8, same_host=False, failed=None)
    bench.add_requests(16)
    assert bench.put[1:] == [2, 2]


def test_while_other_lanes_are_in_use_runs_are_short(tmp_path):
    bench = LaneBench(tmp_path, {1: TURN_S / 2, 4: TURN_S, 16: TURN_S * 3})
    other = bench.another("other", {1: TURN_S / 2})
    bench.add_requests(16)
    bench.add_requests(16)
    assert bench.put[:2] == [16, 16]
    bench.now += 1
    other.add(bench.request(), 16)
    bench.turn()
    while bench.put:
        bench.answer()
    bench.add_requests(16)
    assert bench.put == [4, 4, 4]
    bench.now += IN_USE_S
    bench.answer()
    assert bench.put == [4, 4, 4]  # what was left; the next batch is a full one again
    while bench.put:
        bench.answer()
    bench.add_requests(16)
    assert bench.put == [16]


def test_runs_are_not_cut_to_pieces_that_take_hardly_less(tmp_path):
    bench = LaneBench(tmp_path, {1: TURN_S * 2, 8: TURN_S * 2.9, 16: TURN_S * 4})
    other = bench.another("other", {1: TURN_S})
    other.add(bench.request(), 16)
    bench.turn()
    bench.add_requests(16)
    assert bench.put == [1, 8, 8]


def test_what_waits_for_a_version_that_goes_is_sent_before_it_goes(tmp_path):
    bench = bench_of(tmp_path, LONG_RUN_S, instances=1)
    for requests in (3, 1, 2, 5, 30):
        bench.add_requests(requests)
    assert bench.put == [3, 1]
    bench.lane.close()
    assert sum(bench.put) == 41
    while bench.put:
        bench.answer()
    assert (bench.lane.idle, bench.admission.requests) == (True, 0)


def test_what_waits_for_a_version_that_never_was_ready_is_told_that_it_is_gone(tmp_path):
    bench = bench_of(tmp_path, LONG_RUN_S, instances=0)
    bench.add_requests(2)
    bench.lane.close()
    assert (bench.put, bench.lane.idle, bench.admission.requests) == ([], True, 0)


class Told(Discard):
    """Remembers what a request failed with."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    def fail(self, request: Request, failure: Failure) -> None:
        self.failures.append(failure)


def test_what_is_in_flight_for_a_version_without_workers_is_told_that_it_is_gone(tmp_path):
    bench = bench_of(tmp_path, LONG_RUN_S, instances=1)
    told = Told()
    bench.lane.add(bench.request(responder=told), 16)
    bench.turn()
    assert bench.put == [1]
    bench.lane.update_instances(0, Profile({}), 1, same_host=False, failed=None)  # its only worker died
    bench.lane.close()
    assert [failure.code for failure in told.failures] == [Code.NOT_FOUND]
    assert bench.admission.requests == 0


def test_a_batch_that_is_lost_each_time_is_given_up_in_the_end(tmp_path):
    bench, told = bench_of(tmp_path, LONG_RUN_S, instances=1), Told()
    bench.lane.add(bench.request(responder=told), 16)
    bench.turn()
    for _ in range(LOSSES_MAX + 1):
        assert not told.failures
        [batch] = bench.pending.values()
        bench.lanes.of(batch.lane).recovery.put_again(batch)
    assert not bench.pending
    assert len(bench.put) == LOSSES_MAX + 1
    [failure] = told.failures
    assert failure.code is Code.UNAVAILABLE
    assert "broke each time" in failure.message


def test_requests_without_room_in_the_reply_of_their_batch_run_again_alone(tmp_path):
    bench, told = bench_of(tmp_path, LONG_RUN_S, instances=1), Told()
    for _ in range(3):
        bench.lane.add(bench.request(responder=told), 16)
    bench.turn()
    assert bench.put == [3]
    bench.answer(0, {1: [AGAIN, NO_ROOM], 2: [AGAIN, NO_ROOM]})
    assert bench.put == [1, 1]
    bench.answer()
    for _ in range(LOSSES_MAX):
        assert not told.failures
        bench.answer(0, {0: [AGAIN, NO_ROOM]})  # its worker is wrong: one that is alone has all the room there is
    assert (bench.put, bench.lane.idle) == ([], True)
    [failure] = told.failures
    assert failure.code is Code.UNAVAILABLE


def test_requests_that_bring_too_much_together_leave_apart(tmp_path):
    bench = bench_of(tmp_path, LONG_RUN_S, instances=1)
    bench.lane.add(bench.request(), bench.shared.batch_bytes_max)
    bench.lane.add(bench.request(), 16)
    bench.lane.add(bench.request(), 16)
    bench.turn()
    assert bench.put == [1, 2]


def test_a_deadline_that_a_worker_takes_for_passed_too_early_is_the_gateways_to_keep(tmp_path):
    """The clock of Redis' machine was set: until both have measured it again, worker and gateway disagree."""
    bench = bench_of(tmp_path, SHORT_RUN_S, instances=1)
    bench.add_requests(2)
    assert bench.put == [2]
    bench.answer(failures={0: [Code.EXPIRED.value, "too late"], 1: [Code.EXPIRED.value, "too late"]})
    assert bench.put == [1, 1]
    headers = [decode_batch(entry)[0] for entry, _ in bench.link.waiting]
    assert [header.deadlines_ms for header in headers] == [[math.inf], [math.inf]]
    bench.answer()
    bench.answer()
    assert bench.lane.idle
    failed: list[Code] = []
    heard = Discard()
    heard.fail = lambda request, failure: failed.append(failure.code)  # type: ignore[method-assign]
    bench.lane.add(bench.request(timeout_s=1, responder=heard), 16)
    bench.turn()
    bench.pass_time(1 - DOUBT_S / 2)
    bench.answer(failures={0: [Code.EXPIRED.value, "too late"]})
    assert (bench.put, failed) == ([], [Code.EXPIRED])  # nothing to doubt


@pytest.mark.parametrize(("retry_in_s", "told_s"), [(45.0, 45.0), (-3.0, RETRY_S_MIN), (None, CANNOT_SERVE_RETRY_S)])
def test_callers_of_a_failed_version_are_told_when_a_worker_tries_it_again(tmp_path, monkeypatch, retry_in_s, told_s):
    bench = bench_of(tmp_path, 0.01, instances=1)
    monkeypatch.setattr(bench.link.clock, "now_ms", lambda: 1_000_000.0)
    bench.lane.state.retry_at = 1000.0 + retry_in_s if retry_in_s else 0.0
    bench.lane.update_instances(0, Profile({}), 1, same_host=False, failed="damaged")
    with pytest.raises(Failure, match="damaged") as refused:
        bench.add_requests(1)
    assert refused.value.retry_after_s == told_s
