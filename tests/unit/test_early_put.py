"""A cold lane has one request ahead of its load: a worker answers it once it serves, or it is refused with the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millstream.gateway.scheduling.dispatcher import EARLY_LANES_MAX
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Code, Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.profile import Profile
from millstream.services.wire.batch import INLINE_BYTES_MAX
from tests.kit.lane_harness import LaneBench

NO_ROOM = Failure(Code.UNAVAILABLE, "no worker has room", retry_after_s=1)


class Caller:
    """The answers and failures of its requests."""

    protocol = RequestProtocol.V2

    def __init__(self) -> None:
        self.answers = 0
        self.failures: list[Code] = []

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        self.answers += len(requests)

    def answer_one(self, request: Request, reply: Reply) -> None:
        self.answers += 1

    def fail(self, request: Request, failure: Failure) -> None:
        self.failures.append(failure.code)


class Bench(LaneBench):
    """A lane without an instance, in a pool with a worker."""

    def __init__(self, home: Path, config: ModelConfig | None = None, *, early: bool = True) -> None:
        super().__init__(home, {1: 0.01, 16: 0.01}, instances=0, config=config, early=early)
        self.caller = Caller()

    def call(self, requests: int = 1, rows: int = 1) -> None:
        for _ in range(requests):
            self.lane.add(self.request(rows, responder=self.caller), 16 * rows)
        self.turn()

    def ready(self, instances: int = 1, failed: str | None = None) -> None:
        """A record says so."""
        profile = Profile({1: 0.01, 16: 0.01})
        self.lane.update_instances(instances, profile, 16, same_host=False, failed=failed)
        self.turn()

    def counted(self, metric: catalogue.Metric) -> float:
        labels = (self.lane.manifest.model, str(self.lane.manifest.version))
        if metric is catalogue.COLD_REQUESTS:
            return self.tally.counter(metric, *labels, "cpu").value
        return self.tally.counter(metric, *labels).value


def test_one_request_is_put_before_the_version_is_loaded_and_the_others_after(tmp_path):
    bench = Bench(tmp_path)
    bench.call(3)
    assert (bench.put, bench.lane.waiting) == ([1], 2)
    bench.call()
    assert (bench.put, bench.lane.waiting) == ([1], 3)
    bench.ready()
    assert bench.put == [1, 3]
    bench.answer()
    bench.answer()
    assert bench.caller.answers == 4


def test_an_answer_that_comes_before_the_workers_record_lets_the_next_request_follow(tmp_path):
    bench = Bench(tmp_path)
    bench.call(2)
    bench.now += 1.0
    bench.answer()
    assert (bench.caller.answers, bench.put) == (1, [1])
    bench.answer()
    bench.call()  # a hit: the version is loaded, although no record says so
    bench.answer()
    assert bench.caller.answers == 3
    bench.ready()
    bench.call()
    bench.answer()
    assert bench.caller.answers == 4
    assert bench.counted(catalogue.COLD_REQUESTS) == 2
    assert bench.counted(catalogue.CACHE_MISSES) == 2


def test_waits_for_a_load_are_counted_once_each(tmp_path):
    bench = Bench(tmp_path)
    bench.call(3)
    bench.now += 2.0
    bench.ready()
    bench.answer()
    bench.answer()
    assert bench.counted(catalogue.COLD_REQUESTS) == bench.counted(catalogue.CACHE_MISSES) == 3


def test_a_refusal_withdraws_the_request_ahead_and_fails_it_once(tmp_path):
    bench = Bench(tmp_path)
    bench.call(3)
    bench.lane.refuse_cold(NO_ROOM)
    assert bench.caller.failures == [Code.UNAVAILABLE] * 3
    assert bench.lane.idle
    bench.answer()  # a worker took it all the same
    assert (bench.caller.answers, len(bench.caller.failures)) == (0, 3)


def test_requests_of_a_version_that_was_ready_before_outlive_a_refusal(tmp_path):
    bench = Bench(tmp_path)
    bench.ready()
    bench.now += 1.0
    bench.call()
    bench.now += 1.0
    bench.ready(instances=0)
    bench.call()
    assert bench.put == [1], "one is in flight"
    bench.lane.refuse_cold(NO_ROOM)
    assert bench.caller.failures == [Code.UNAVAILABLE]
    bench.ready()
    bench.answer()
    assert bench.caller.answers == 1


def test_a_failed_version_has_no_request_ahead(tmp_path):
    bench = Bench(tmp_path)
    bench.call()
    bench.ready(instances=0, failed="damaged")
    bench.lane.refuse_cold(NO_ROOM)
    assert (bench.caller.failures, bench.lane.idle) == ([Code.UNAVAILABLE], True)


def test_large_requests_wait_in_the_gateway(tmp_path):
    rows = INLINE_BYTES_MAX // 16 + 1
    bench = Bench(tmp_path, ModelConfig(rows_max=rows))
    bench.call(rows=rows)
    assert (bench.put, bench.lane.waiting) == ([], 1)


def test_without_workers_that_read_the_newest_format_nothing_is_put_ahead(tmp_path):
    bench = Bench(tmp_path, early=False)
    bench.call()
    assert (bench.put, bench.lane.waiting) == ([], 1)


def test_requests_of_a_version_with_queue_rules_wait_in_the_gateway(tmp_path):
    bench = Bench(tmp_path, ModelConfig(priority_levels=2, priority_default=1))
    bench.call()
    assert (bench.put, bench.lane.waiting) == ([], 1)


def test_few_lanes_of_a_pool_have_a_request_ahead(tmp_path):
    bench = Bench(tmp_path)
    lanes = [bench.another(f"n{i}", {1: 0.01, 16: 0.01}, 0) for i in range(EARLY_LANES_MAX + 2)]
    for lane in lanes:
        lane.add(bench.request(), 16)
    bench.turn()
    assert [lane.waiting for lane in lanes] == [0] * EARLY_LANES_MAX + [1, 1]
    bench.answer()
    lanes[-1].add(bench.request(), 16)
    bench.turn()
    assert lanes[-1].waiting == 1, "its next request finds that there is room"


def test_a_request_ahead_whose_deadline_passes_is_told_so(tmp_path):
    bench = Bench(tmp_path)
    request = Request([InputTensor((1, 4), bytes(16), 16)], 1, 0, bench.now, bench.now + 1.0, bench.caller)
    bench.lane.add(request, 16)
    bench.turn()
    bench.now += 2.0
    [batch] = bench.pending.values()
    bench.lane.recovery.expire(batch, bench.now)
    assert bench.caller.failures == [Code.EXPIRED]
