"""Direct dispatch under everything that happens to it: each batch is answered once, and none runs after it was put
into the queue instead.

Both ends are real and talk over real sockets. Rules are what callers, the worker, unloads and deaths do; each end reads
its messages when a rule says so.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millstream.gateway.scheduling import direct_dispatch
from millstream.gateway.scheduling.direct_dispatch import DirectDispatch
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Failure
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.waits import Spin
from millstream.services.queue.death_notices import Death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.reply_protocol import MESSAGE_BYTES_MAX, SOCKET_TYPE
from millstream.services.segments.pool import SegmentPool
from millstream.services.wire.batch import attach_message, decode_batch, decode_reply, detach_message, is_control
from millstream.services.wire.records import State
from millstream.workers.batches.direct_work import DirectWork
from millstream.workers.batches.lease import Lease
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from tests.kit.lane_harness import REST_S, LaneBench
from tests.kit.loopback import doubled
from tests.kit.responders import Discard
from tests.kit.state_machines import machine_settings

WORKER = "cpu-0-1"
KEYS = InstallationKeys("test").pool("cpu")


class Callers(Discard):
    """Counts the answers to each request."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        self.answers.update(map(id, requests))

    def answer_one(self, request: Request, reply: Reply) -> None:
        self.answers[id(request)] += 1

    def fail(self, request: Request, failure: Failure) -> None:
        raise AssertionError(f"a request failed: {failure}")


class Links:
    """The worker's connections to one gateway: a pair of sockets, made anew after it was given up."""

    def __init__(self) -> None:
        self.mine: socket.socket | None = None
        self.gateways: list[socket.socket] = []  # the gateway's ends, also of connections that were given up

    def direct(self, gateway: str) -> socket.socket:
        if self.mine is None:
            self.mine, theirs = socket.socketpair(socket.AF_UNIX, SOCKET_TYPE)
            for end in (self.mine, theirs):
                end.setblocking(False)
            self.gateways.append(theirs)
        return self.mine

    def drop(self, link: socket.socket, why: OSError) -> None:
        if link is self.mine:
            self.close()

    def close(self) -> None:
        if self.mine is not None:
            self.mine.close()
            self.mine = None


class DirectMachine(RuleBasedStateMachine):
    """`in_hand`: leases that the worker took and has not answered. `ran`: names of batches that were answered."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.links = Links()
        self.in_hand: list[Lease] = []
        self.ran: list[str] = []
        self.alive = True  # what Redis says of the worker
        self.callers = Callers()
        self.requests: list[Any] = []

    @initialize(instances=st.sampled_from([1, 1, 1, 2]))
    def begin(self, instances: int) -> None:
        registry = MetricsRegistry(None, "gateway")
        lanes = LaneTable()
        self.dispatch = DirectDispatch(registry, lanes, self._known, lambda: self.bench.now)
        self.bench = LaneBench(
            Path(self.folder.name), {1: 0.0001, 8: 0.0004}, instances, lanes=lanes, direct=self.dispatch
        )
        self.bench.lane.state.local_workers = frozenset({WORKER})
        self.models = LoadedModels()
        self._load()
        links: Any = self.links
        self.worker = DirectWork(links, KEYS, WORKER, self.models, RedisClock(), Spin(0.0))
        self.worker._served = "g"
        self.attach(heard=True)

    async def _known(self, pool: str, workers: Collection[str], within_s: float) -> set[str]:
        return set(workers) if self.alive else set()

    def _end(self, link: socket.socket) -> None:
        """Close a connection as the listener does."""
        if link in self.links.gateways:
            self.links.gateways.remove(link)
            self.dispatch.closed(link)
            link.close()

    def _load(self) -> None:
        instance: Any = object()
        self.models.set(LoadedModel(self.bench.lane.manifest, State.READY, instance=instance))

    async def _turns(self, act: Any) -> None:
        act()
        await asyncio.sleep(0)

    def _in_loop(self, act: Any) -> None:
        self.loop.run_until_complete(self._turns(act))

    # Callers.

    @rule(requests=st.integers(1, 3))
    def call(self, requests: int) -> None:
        for _ in range(requests):
            request = self.bench.request(timeout_s=1e9, responder=self.callers)
            self.requests.append(request)
            self.bench.lane.add(request, 16)
            self._in_loop(self.bench.turn)

    # The worker.

    @precondition(lambda self: not self.worker.attached)
    @rule(heard=st.sampled_from([True, True, True, False]))
    def attach(self, heard: bool) -> None:
        self.worker._not_before = 0.0
        self.worker.attach()
        if heard:
            self.gateway_reads()

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        """As the main loop, which keeps all; or the watchdog, which gives back what does not run."""
        kept = self.in_hand[: data.draw(st.integers(0, len(self.in_hand)))]
        was_attached = self.worker.attached
        self.worker.detach(kept)
        if was_attached:
            for lease in self.in_hand[len(kept) :]:
                if lease.gate is not None:
                    lease.gate.leave()
            self.in_hand = kept

    @precondition(lambda self: self.worker.attached)
    @rule()
    def read(self) -> None:
        link = self.worker._link
        assert link is not None
        while data := self.worker._receive(link):
            lease = self.worker._lease(link, data)
            if lease is not None:
                self.in_hand.append(lease)

    @precondition(lambda self: self.in_hand)
    @rule(large=st.booleans())
    def answer(self, large: bool) -> None:
        lease = self.in_hand.pop(0)
        reply = doubled(lease.header.name, lease.inline)
        self.worker.answer(lease, reply + bytes(MESSAGE_BYTES_MAX) if large else reply, b"")

    @rule()
    def unload(self) -> None:
        """Unload and load the version; an eviction leaves alone what is in use."""
        model = self.models.get(self.bench.lane.content_id)
        assert model is not None
        inside = [lease for lease in self.in_hand if lease.gate is model.gate]
        assert model.gate.inside == len(inside)
        if model.gate.close():
            assert not inside
            self.models.remove(self.bench.lane.content_id)
            self._load()
        else:
            assert inside

    @precondition(lambda self: self.worker.attached and self.in_hand)
    @rule(noticed=st.sampled_from(["named", "unknown", "late"]), data=st.data())
    def die(self, noticed: str, data: st.DataObject) -> None:
        """The process ends, with batches in hand and unread; another one of the same name starts."""
        ran = tuple(lease.header.name for lease in self.in_hand[: data.draw(st.integers(0, len(self.in_hand)))])
        self.worker.close()
        self.in_hand = []
        self._load()
        self.gateway_reads()
        if noticed != "late":
            death = Death(WORKER, ran if noticed == "named" else None)
            self._in_loop(lambda: self.dispatch.died(death))

    @precondition(lambda self: self.worker.attached and self.in_hand)
    @rule()
    def freeze(self) -> None:
        """The worker does not answer for longer than a lease, and Redis forgets it."""
        self.bench.now += 10.0
        self.alive = False
        for _ in range(2):
            self.loop.run_until_complete(self.dispatch.check("cpu", 2.0))
        self.alive = True
        assert not self.bench.pending.keys() & {lease.header.name for lease in self.in_hand}

    # The gateway.

    @rule()
    def gateway_reads(self) -> None:
        for link in [*self.links.gateways]:
            self._in_loop(lambda link=link: self._read_all(link))

    def _read_all(self, link: socket.socket) -> None:
        while link in self.links.gateways:
            try:
                data = link.recv(MESSAGE_BYTES_MAX + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue
            if not data:
                self._end(link)
            elif is_control(data):
                self.dispatch.message(link, data)
            else:
                decoded = decode_reply(data)
                assert not isinstance(decoded, str)
                assert decoded[0].name not in self.ran
                # No other worker has or had it: a batch that was put again has another name.
                batch = self.bench.pending[decoded[0].name]
                assert batch.direct is self.dispatch._by_link[link]
                self.ran.append(batch.name)
                self.bench.lanes.of(batch.lane).completion.resolve(batch, *decoded)

    @precondition(lambda self: self.bench.link.waiting)
    @rule()
    def queue_answers(self) -> None:
        """Another worker runs the first batch of the queue."""
        entry, _ = self.bench.link.waiting.pop(0)
        header, inline = decode_batch(entry)
        self._in_loop(lambda: self.bench.producer._on_reply(doubled(header.name, inline)))

    @rule(seconds=st.sampled_from([0.01, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds

    @invariant()
    def every_batch_is_somewhere(self) -> None:
        """In the queue, at a worker that answers it, or among those whose worker's death is not settled."""
        if not hasattr(self, "dispatch"):
            return
        queued = {decode_batch(entry)[0].name for entry, _ in self.bench.link.waiting}
        orphans = {batch.name for batches in self.dispatch._orphans.values() for batch in batches}
        for name, batch in self.bench.pending.items():
            at_worker = batch.direct is not None and name in batch.direct.outstanding
            assert at_worker + (name in queued) + (name in orphans) == 1, name
        assert all(count == 1 for count in self.callers.answers.values())

    def _finish(self) -> None:
        """Let the worker answer all that it gets: nothing is outstanding then, unless a connection was lost."""
        for _ in range(2 + len(self.requests)):  # each answer may bring a batch
            self.gateway_reads()
            if self.worker.attached:
                self.read()
            while self.in_hand:
                self.answer(large=False)
        self.gateway_reads()
        if self.worker.attached:
            assert not any(worker.outstanding for worker in self.dispatch._by_link.values())

    def teardown(self) -> None:
        if hasattr(self, "dispatch"):
            self._finish()
            self.worker.close()
            self.gateway_reads()
            self._in_loop(lambda: self.dispatch.died(Death(WORKER, ())))
            while self.bench.link.waiting:
                self.queue_answers()
            assert not self.bench.pending
            assert {id(request) for request in self.requests} == set(self.callers.answers)
            assert self.bench.admission.requests == 0
            self.loop.run_until_complete(self.dispatch.stop())
        self.loop.close()
        for link in self.links.gateways:
            with suppress(OSError):
                link.close()
        self.folder.cleanup()


def test_each_batch_is_answered_once_whatever_becomes_of_its_worker():
    run_state_machine_as_test(
        DirectMachine,
        settings=machine_settings(
            max_examples=120,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def attached(dispatch: DirectDispatch, bench: LaneBench) -> tuple[socket.socket, socket.socket]:
    """Attach a worker that serves the lane; return both ends of its connection, the worker's first."""
    bench.lane.state.local_workers = frozenset({WORKER})
    links = Links()
    worker = links.direct("g")
    [gateway] = links.gateways
    dispatch.message(gateway, attach_message(1, "cpu", WORKER))
    return worker, gateway


async def never_asked(pool: str, workers: Collection[str], within_s: float) -> set[str]:
    raise AssertionError("Redis is asked about workers")


@pytest.mark.parametrize("alive", [True, False])
def test_a_worker_that_is_gone_without_a_notice_died_unless_it_sent_a_heartbeat_since(tmp_path, monkeypatch, alive):
    """Requests that may have killed it run alone next; others keep their first attempt."""
    monkeypatch.setattr(direct_dispatch, "NOTICE_S", 0.01)

    async def known(pool: str, workers: Collection[str], within_s: float) -> set[str]:
        assert (pool, within_s) == ("cpu", 0.01)
        return set(workers) if alive else set()

    async def test() -> list[tuple[int, int]]:
        lanes = LaneTable()
        dispatch = DirectDispatch(MetricsRegistry(None, "gateway"), lanes, known)
        bench = LaneBench(tmp_path, {1: 0.0001, 8: 0.0004}, lanes=lanes, direct=dispatch)
        worker, gateway = attached(dispatch, bench)
        bench.add_requests(2)
        assert bench.link.waiting == []
        dispatch.closed(gateway)
        for end in (worker, gateway):
            end.close()
        async with asyncio.timeout(240):
            while not bench.link.waiting:
                await asyncio.sleep(0.01)
        await dispatch.stop()
        return [(batch.attempt, len(batch.requests)) for batch in bench.pending.values()]

    assert asyncio.run(test()) == ([(1, 2)] if alive else [(2, 1), (2, 1)])


@pytest.mark.parametrize("writing", [True, False])
def test_memory_of_a_batch_that_is_given_up_rests_while_its_worker_may_write_into_it(tmp_path, writing):
    async def test() -> tuple[int, int, int]:
        lanes = LaneTable()
        dispatch = DirectDispatch(MetricsRegistry(None, "gateway"), lanes, never_asked)
        segments = SegmentPool(tmp_path, "m", 1 << 30)
        bench = LaneBench(tmp_path, {1: 0.0001, 64: 0.0004}, segments=segments, lanes=lanes, direct=dispatch)
        worker, gateway = attached(dispatch, bench)
        bench.lane.add(bench.request(64), 16 * 64)
        bench.turn()
        one = segments.in_use_bytes
        assert one and not bench.link.waiting
        dispatch.message(gateway, detach_message(1, [], writing=writing))
        assert len(bench.link.waiting) == 1, "it was put again, in memory of its own"
        both = segments.in_use_bytes
        bench.now += REST_S
        bench.lane.tick(bench.now)
        for end in (worker, gateway):
            end.close()
        await dispatch.stop()
        return one, both, segments.in_use_bytes

    one, both, rested = asyncio.run(test())
    assert (both, rested) == ((2 * one, one) if writing else (one, one))


def test_no_short_batch_of_a_lane_overtakes_a_long_one_that_took_the_queue(tmp_path):
    async def test() -> None:
        lanes = LaneTable()
        dispatch = DirectDispatch(MetricsRegistry(None, "gateway"), lanes, never_asked)
        bench = LaneBench(tmp_path, {1: 0.001, 8: 2 * direct_dispatch.RUN_S_MAX}, lanes=lanes, direct=dispatch)
        worker, gateway = attached(dispatch, bench)
        bench.lane.add(bench.request(8), 16 * 8)
        bench.add_requests(1)
        assert bench.put == [8, 1]
        for _ in range(2):
            bench.answer()
        bench.now += direct_dispatch.LONG_PAUSE_S
        bench.add_requests(1)
        assert bench.put == []
        assert worker.recv(MESSAGE_BYTES_MAX)
        for end in (worker, gateway):
            end.close()
        await dispatch.stop()

    asyncio.run(test())
