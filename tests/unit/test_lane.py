"""When a batch leaves its lane: at once for an idle worker, ahead of time when that hides something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.admission import Admission
from gateway.lane import DEPTH, LONG_RUN_S, SHORT_RUN_S, Lane
from gateway.lane_tallies import LaneTallies
from gateway.packing import Packer
from gateway.quarantine import Quarantine
from gateway.request import InputTensor, Request
from services.batch import ReplyHeader, ReplyOutput, decode_batch
from services.metrics import catalogue
from services.metrics.tally import Tally
from services.profile import Profile
from services.spin import Spin
from tests.kit.loopback import Loopback
from tests.kit.responders import NOBODY
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio
ROW = bytes(16)
SPIN_S = 0.0004


class Bench:
    """A lane whose batches the test answers. `put`: the rows of each batch that left and has no answer."""

    def __init__(self, home: Path, seconds: float, instances: int) -> None:
        loopback = Loopback(home)
        self._link, self._now = loopback.link, 0.0
        self._link.held = True
        manifest = publish(loopback.repository, "m", 1)
        tally = Tally(None, "gateway")
        refused = tally.counter(catalogue.REFUSED, "gateway_full")
        self._soon: list[Callable[[], None]] = []
        self._pending = loopback.exchange.pending
        self.lane = Lane(
            manifest,
            self._link,
            Packer(manifest.signature, None, 1 << 20),
            self._pending,
            Admission(1000, 1 << 20, tally.gauge(catalogue.REQUESTS_IN_FLIGHT), refused),
            LaneTallies(tally, manifest),
            1000,
            Quarantine(tally.gauge(catalogue.QUARANTINED), refused),
            Spin(SPIN_S),
            self._soon.append,
            lambda: self._now,
        )
        self.lane.place(instances, Profile({1: seconds, 16: seconds}), 16, shared=False, failed=None)

    def come(self, requests: int) -> None:
        """So many requests of one row, in one turn of the event loop."""
        for _ in range(requests):
            inputs = [InputTensor((1, 4), ROW, 16)]
            self.lane.add(Request(inputs, 1, 0, self._now, self._now + 60, NOBODY), 16)
        self._turn()

    def _turn(self) -> None:
        soon = self._soon.copy()
        self._soon.clear()
        for call in soon:
            call()

    def pass_time(self, seconds: float) -> int:
        """How often the event loop had to turn in that time: ten times, as long as there is something to call."""
        turned = 0
        for _ in range(10):
            self._now += seconds / 10
            turned += bool(self._soon)
            self._turn()
        return turned

    @property
    def put(self) -> list[int]:
        return [sum(decode_batch(entry)[0].rows) for entry, _ in self._link.waiting]

    def answer(self) -> None:
        """The batch that left first comes back."""
        entry, _ = self._link.waiting.pop(0)
        header, _ = decode_batch(entry)
        rows = sum(header.rows)
        output = ReplyOutput((2,), rows * 8, None, None)
        outstanding = self._pending[header.name]
        reply = ReplyHeader(header.name, "w", 0.0, 0.0, rows, {}, [output], "")
        self.lane.resolve(outstanding, reply, memoryview(bytes(rows * 8)))
        self._turn()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_while_a_short_run_is_out_the_next_batch_waits_until_it_is_as_full(tmp_path):
    bench = Bench(tmp_path, SHORT_RUN_S / 10, instances=1)
    bench.come(3)
    assert bench.put == [3]
    bench.come(2)
    assert bench.put == [3]
    bench.come(1)
    assert bench.put == [3, 3]
    bench.come(1)
    bench.answer()
    bench.answer()
    assert bench.put == [1]  # nothing is out any more: whatever waits leaves
    bench.answer()
    assert (bench.put, bench.lane.idle) == ([], True)


@pytest.mark.parametrize(("seconds", "most"), [(SHORT_RUN_S * 2, DEPTH + 1), (LONG_RUN_S, DEPTH)])
async def test_behind_a_longer_run_a_batch_is_sent_ahead_however_small(tmp_path, seconds, most):
    bench = Bench(tmp_path, seconds, instances=1)
    for requests in (3, 1, 2, 5, 1):
        bench.come(requests)
    assert bench.put == [3, 1, 2][:most]
    bench.answer()
    assert bench.put == ([1, 2, 6] if most > DEPTH else [1, 8])
    assert len(bench.put) == most


async def test_every_idle_instance_gets_a_batch_at_once(tmp_path):
    bench = Bench(tmp_path, SHORT_RUN_S / 10, instances=2)
    bench.come(3)
    bench.come(1)
    assert bench.put == [3, 1]
    bench.come(1)  # as full as the last one
    assert bench.put == [3, 1, 1]


async def test_a_request_larger_than_a_batch_holds_back_no_full_batch(tmp_path):
    bench = Bench(tmp_path, SHORT_RUN_S / 10, instances=1)
    large = Request([InputTensor((100, 4), ROW * 100, 1600)], 100, 0, 0, 60, NOBODY)
    bench.lane.add(large, 1600)
    bench.come(15)
    assert bench.put == [100]
    bench.come(1)
    assert bench.put == [100, 16]


async def test_the_loop_turns_for_the_reply_to_a_lone_batch_if_the_last_one_came_soon(tmp_path):
    bench = Bench(tmp_path, SHORT_RUN_S / 10, instances=1)
    bench.come(1)
    assert bench.pass_time(SPIN_S / 2) == 0  # nothing is known yet
    bench.answer()
    for _ in range(3):
        bench.come(1)
        assert bench.pass_time(SPIN_S / 2) == 10
        bench.answer()
        bench.pass_time(SPIN_S)
        assert bench.pass_time(SPIN_S) == 0
    bench.come(1)
    assert 0 < bench.pass_time(SPIN_S * 10) < 10  # not for ever
    bench.answer()
    bench.come(1)
    assert bench.pass_time(SPIN_S / 2) == 0  # the last one took long
    bench.answer()


async def test_the_loop_does_not_turn_for_a_batch_of_many(tmp_path):
    bench = Bench(tmp_path, SHORT_RUN_S / 10, instances=1)
    for _ in range(2):
        bench.come(10)
        assert bench.pass_time(SPIN_S / 2) == 0
        bench.answer()
