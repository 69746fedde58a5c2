"""What a worker holds, against a model of it: publish, delete, order, load, fail, call, unload, die, in any order.

Loads end when the test says so; Redis is a set of lanes in use. Everything else is what a worker has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.placement import preloads as headroom
from millstream.services.placement.prediction import expected, larger
from millstream.services.placement.views import Footprint
from millstream.services.repository.verdicts import NO_VERDICT
from millstream.services.wire.orders import Order
from millstream.services.wire.records import State
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from millstream.workers.models.memory_budget import MemoryBudget
from millstream.workers.models.wanted import Wanted
from millstream.workers.residency import evictions
from millstream.workers.residency.loader import LoadRequest
from millstream.workers.residency.residency import Residency
from millstream.workers.residency.unloads import EvictionReason, Unloads
from millstream.workers.residency.version_loads import FAILED_OFTEN_RETRY_S, FAILURES_MAX, FailedLoads
from tests.contract.repositories import manifest
from tests.kit.state_machines import machine_settings

BASE, BUDGET = 100, 1000
DOUBTFUL = 600, 300  # all memory for models, resident and peak
NAMES = [f"m{i}" for i in range(8)]
SOME_NAME = st.sampled_from(NAMES)


class Clock:
    """The Redis clock, which the test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.offset_ms = 0.0

    def now_ms(self) -> float:
        return self.seconds * 1000


class Memory:
    """What versions take, which is known before they are loaded."""

    def __init__(self, needs: dict[str, Footprint]) -> None:
        self.needs = needs
        self.budget = MemoryBudget(BUDGET, lambda: BASE)

    def need(self, one: Manifest) -> Footprint:
        return self.needs[one.content_id]

    def need_within(self, one: Manifest, room_bytes: int, device_room_bytes: int) -> Footprint:
        return expected(self.needs[one.content_id], None, 1, room_bytes, device_room_bytes)


class Loads:
    """Loads that begin and end when the test says so."""

    kind = "onnxruntime.cpu"

    def __init__(self, memory: Memory, clock: Clock) -> None:
        self.memory = memory
        self.failed = FailedLoads(lambda: clock.seconds, lambda: 0.0)
        self.queue: list[LoadRequest] = []
        self.running: dict[str, LoadRequest] = {}

    giving_way = False

    def give_way(self) -> bool:
        return False

    @property
    def pending(self) -> bool:
        return bool(self.queue or self.running)

    @property
    def takes_demanded(self) -> bool:
        return not self.running and not any(request.demanded for request in self.queue)

    def active(self) -> set[str]:
        return {*self.running, *(request.content_id for request in self.queue if request.demanded)}

    def in_progress(self, content_id: str) -> bool:
        return content_id in self.running

    def want(self, wanted: Sequence[LoadRequest], kept: Collection[str]) -> None:
        demanded = [request for request in self.queue if request.demanded and request.content_id in kept]
        known = {*self.running, *(request.content_id for request in demanded)}
        self.queue = [*demanded, *(request for request in wanted if request.content_id not in known)]

    def demand(self, request: LoadRequest) -> None:
        assert request.content_id not in self.active(), "one load of a version at a time"
        self.queue = [request, *(other for other in self.queue if other.content_id != request.content_id)]

    def fail(self, content_id: str) -> None:
        """Note that a load failed."""
        self.failed.note(content_id, self.failed.next(content_id, "it fails", passing=False, final=False))


class Redis:
    """What the worker asks Redis: which lanes are in use."""

    def __init__(self) -> None:
        self.in_use: set[str] = set()
        self.pinned: set[str] = set()
        self.probes: set[str] = set()  # lanes with a readiness probe that came as they were released
        self.calls: set[str] = set()  # likewise with a call
        self.demands: list[str] = []
        self.ended: set[str] = set()  # lanes whose demands were ended

    def end_demand(self, lane: str) -> None:
        self.ended.add(lane)

    def release_lane(self, lane: str, others_min: int) -> bool:
        if lane in self.in_use or others_min:
            return False
        assert lane not in self.pinned
        return True

    def lanes_in_use(self, counted: Sequence[str], lanes: Sequence[str]) -> tuple[dict[str, int], set[str]]:
        return dict.fromkeys(counted, 1), self.in_use & set(lanes)

    def pending(self, lane: str) -> int:
        return (lane in self.probes) + (lane in self.calls)

    def has_calls(self, lane: str) -> bool:
        return lane in self.calls

    def demand(self, lane: str, life_ms: int, order: bytes) -> bool:
        self.demands.append(lane)
        return True

    def leased(self, lane: str) -> bool:
        return False

    def remove_lane(self, lane: str) -> None:
        self.in_use.discard(lane)  # its batches run, or wait for another load

    def close(self) -> None: ...


class WorkerMachine(RuleBasedStateMachine):
    """Rules are what operators, gateways, models and the kernel do."""

    @initialize(sizes=st.lists(st.integers(100, 450), min_size=6, max_size=6))
    def begin(self, sizes: list[int]) -> None:
        self.clock = Clock()
        self.needs: dict[str, Footprint] = {}
        self.wanted: dict[str, Wanted] = {}
        self.numbers = dict.fromkeys(NAMES, 0)
        for name, size in zip(NAMES, sizes, strict=False):
            self._publish(name, size, 50, pin=name == NAMES[0])
        self.start()

    def start(self) -> None:
        """Start the worker, also again after its death."""
        self.redis = Redis()
        self.models = LoadedModels()
        self.memory = Memory(self.needs)
        self.loads = Loads(self.memory, self.clock)
        self.open: set[str] = set()  # content ids of orders that have not ended
        connect = cast("Any", lambda: self.redis)
        metrics = Mock()
        self.unloads = Unloads(
            connect, self.models, metrics, threading.Event(), self.memory.budget, lambda close: close()
        )
        self.residency = Residency(
            "w-0-a", 0, None, self.models, cast("Any", self.loads), self.unloads, cast("Any", self.clock)
        )
        self.update()

    def update(self) -> None:
        self.redis.pinned = {one.content_id for one in self.wanted.values() if one.placement.pin}
        self.residency.update(dict(self.wanted))
        for content_id, model in self.models.all().items():
            if content_id not in self.wanted:
                self.redis.in_use.discard(content_id)
                self.unloads.remove(model)
                self.loads.queue = [one for one in self.loads.queue if one.content_id != content_id]
        self.step()

    def step(self) -> None:
        """Do what the thread of the orders does."""
        consumer = cast("Any", self.redis)
        while self.residency.again:
            self.residency.load(self.residency.again.popleft(), consumer)
        self.residency.turns.advance(consumer)
        self.residency.evictions.repay(consumer)
        self.residency.evictions.recall(consumer)
        self.residency.evictions.unload_idle(consumer)
        self.residency.evictions.unload_ahead(consumer)
        while self.residency.ended:
            self.open.discard(self.residency.ended.popleft())
        self.open -= self.redis.ended
        self.redis.ended.clear()
        for content_id in list(self.open):
            model = self.models.get(content_id)
            if model is not None and model.state is State.READY:
                self.open.discard(content_id)  # its lane is added, which ends the demand

    def of(self, name: str) -> Wanted | None:
        return next((one for one in self.wanted.values() if one.manifest.model == name), None)

    @rule(name=SOME_NAME, resident=st.integers(0, 1000), peak=st.integers(0, 300), pin=st.booleans())
    def publish(self, name: str, resident: int, peak: int, pin: bool) -> None:
        self._publish(name, resident, peak, pin=pin)
        held = {content_id for content_id, one in self.models.all().items() if one.state is State.READY}
        self.settle_line()
        self.update()
        assert held & self.wanted.keys() <= self.models.all().keys(), "publishing unloads nothing"

    @rule(name=SOME_NAME)
    def publish_doubtful(self, name: str) -> None:
        """Publish a version that was never measured, and may take more than all memory for models."""
        self._publish(name, *DOUBTFUL, pin=False, measured=False)
        held = self.models.all().items()
        called = {
            content_id for content_id, one in held if one.state is State.READY and (one.calls.last or one.demanded)
        }
        self.settle_line()
        self.update()
        assert called & self.wanted.keys() <= self.models.all().keys(), "publishing unloads nothing that was called"

    @rule(name=SOME_NAME)
    def outdate(self, name: str) -> None:
        """Replace a version by newer ones: from now on only calls load it."""
        one = self.of(name)
        if one is None:
            return
        content_id = one.content_id
        self.wanted[content_id] = Wanted(one.manifest, NO_VERDICT, EndpointPlacement(), preloaded=False, outdated=True)
        ordered = content_id in self.residency.turns.line or content_id in self.loads.active()
        held = self.models.get(content_id)
        self.update()
        if not ordered and (held is None or held.state is State.LOADING):
            assert self.models.get(content_id) is None, "it is on standby"
        assert content_id not in {request.content_id for request in self.loads.queue if not request.demanded}

    def settle_line(self) -> None:
        """Forget the orders that wait for their turn, which comes at any time."""
        for content_id in self.residency.turns.line.content_ids():
            self.residency.turns.line.remove(content_id)
            self.open.discard(content_id)
            model = self.models.get(content_id)
            if model is not None and model.state is State.LOADING and content_id not in self.loads.active():
                self.models.remove(content_id)

    def _publish(self, name: str, resident: int, peak: int, *, pin: bool, measured: bool = True) -> None:
        known = self.of(name)
        if known is not None:
            del self.wanted[known.content_id]
        self.numbers[name] += 1
        new = Wanted(manifest(name, self.numbers[name]), NO_VERDICT, EndpointPlacement(pin=pin))
        self.needs[new.content_id] = Footprint(resident, peak, 0.1, measured)
        self.wanted[new.content_id] = new

    @rule(name=SOME_NAME, dice=st.integers(0, 2))
    def delete(self, name: str, dice: int) -> None:
        known = self.of(name)
        if known is not None and not dice:
            del self.wanted[known.content_id]
            self.update()

    @rule(which=st.integers(0, 99), evict=st.sampled_from([True, True, True, False]), late=st.integers(0, 5))
    def order(self, which: int, evict: bool, late: int) -> None:
        cold = [one for one in self.wanted.values() if self.models.get(one.content_id) is None]
        if not cold:
            return
        one = cold[which % len(cold)]
        before = {content_id for content_id, model in self.models.all().items() if model.state is State.READY}
        deadline = 0.0 if late else 0.001
        self.open.add(one.content_id)
        order = Order(do="load", content_id=one.content_id, why="a call", evict=evict, deadline=deadline)
        self.residency.load(order, cast("Any", self.redis))
        if not evict:
            assert before <= self.models.all().keys()
        self.step()

    @rule(name=SOME_NAME)
    def unload(self, name: str) -> None:
        one = self.of(name)
        if one is not None:
            self.residency.evictions.unload(one.content_id, EvictionReason.MOVED, "idle", cast("Any", self.redis))

    @rule()
    def begin_another_load(self) -> None:
        self.begin_load()

    @rule()
    def begin_load(self) -> None:
        while self.loads.queue:
            request = self.loads.queue.pop(0)
            if request.content_id in self.loads.running:
                continue
            if self.residency.admits(request):
                self.loads.running[request.content_id] = request
                self.models.set(self._loading(request))
                break
        self.step()

    @staticmethod
    def _loading(request: LoadRequest) -> LoadedModel:
        demanded = request.demanded and not request.staged
        return LoadedModel(request.manifest, State.LOADING, demanded=demanded, staged=request.staged)

    @rule(data=st.data(), how=st.sampled_from(["ready", "ready", "ready", "failed", "no memory"]))
    def end_load(self, data: st.DataObject, how: str) -> None:
        if not self.loads.running:
            return
        self.finish(data.draw(st.sampled_from(sorted(self.loads.running))), how)

    def finish(self, content_id: str, how: str = "ready") -> None:
        """End a load that is in progress."""
        request, need = self.loads.running[content_id], self.needs[content_id]
        budget = self.memory.budget
        too_large = need.load_bytes > budget.room_bytes
        if content_id not in self.wanted:
            budget.begin_unload(content_id)
            budget.freed(content_id)
        elif how == "ready" and not too_large:
            need = self.needs[content_id] = replace(need, measured=True)
            budget.settle(content_id, need)
            loading = self._loading(request)
            self.models.set(replace(loading, state=State.READY, loaded_at=self.clock.seconds, footprint=need))
        else:
            budget.begin_unload(content_id)
            budget.freed(content_id)
            if how == "no memory" and not need.measured:
                self.needs[content_id] = larger(need, budget.free_bytes)
            if how == "failed" or too_large or not self.residency.found_no_memory(request):
                self.loads.fail(content_id)
                self.models.set(LoadedModel(request.manifest, State.FAILED, "it fails"))
        del self.loads.running[content_id]
        self.residency.load_ended(content_id)
        self.step()
        self.residency.reconsider()

    @rule(which=st.integers(0, 99), seconds=st.floats(0, 30))
    def use(self, which: int, seconds: float) -> None:
        self.clock.seconds += seconds
        ready = [one for one in self.models.all().values() if one.state is State.READY]
        if ready:
            model = ready[which % len(ready)]
            self.redis.in_use.add(model.manifest.content_id)
            model.calls.add(self.clock.seconds)

    @rule(which=st.integers(0, 99), seconds=st.floats(0, 30))
    def end_use(self, which: int, seconds: float) -> None:
        self.clock.seconds += seconds
        if self.redis.in_use:
            self.redis.in_use.discard(sorted(self.redis.in_use)[which % len(self.redis.in_use)])

    @rule(dice=st.integers(0, 9))
    def die(self, dice: int) -> None:
        if not dice:
            self.start()

    @invariant()
    def the_budget_holds(self) -> None:
        if hasattr(self, "memory"):
            assert self.memory.budget.used_bytes <= BUDGET

    @invariant()
    def what_is_demanded_has_its_memory(self) -> None:
        if hasattr(self, "loads"):
            demanded = [one.content_id for one in self.loads.queue if one.demanded]
            assert all(self.memory.budget.footprint(content_id) for content_id in demanded)

    @invariant()
    def what_is_in_use_is_there(self) -> None:
        if hasattr(self, "redis"):
            ready = {content_id for content_id, one in self.models.all().items() if one.state is State.READY}
            assert self.redis.in_use <= ready

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        for _ in range(200):
            self.begin_load()
            for content_id in list(self.loads.running):
                self.finish(content_id)
            self.clock.seconds += 1.0  # residences end
            self.step()
            if not (self.loads.pending or self.residency.turns.line):
                break
        assert self.open == set(), "every order ends in an instance, a refusal, or the end of its version"
        reserved = self.memory.budget.used_bytes - BASE
        ready = [self.needs[content_id] for content_id in self.models.all() if self._is_ready(content_id)]
        expected = sum(one.resident_bytes for one in ready) + max((one.peak_bytes for one in ready), default=0)
        assert reserved == expected, "nothing is reserved for what is not there"

    def _is_ready(self, content_id: str) -> bool:
        model = self.models.get(content_id)
        return model is not None and model.state is State.READY


def test_a_worker_whatever_happens() -> None:
    run_state_machine_as_test(
        WorkerMachine,
        settings=machine_settings(
            max_examples=100, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow]
        ),
    )


def test_a_worker_that_keeps_memory_free_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It unloads ahead of calls after each load, for models of every size."""
    monkeypatch.setattr(headroom, "HEADROOM_SHARE_MAX", 0.7)
    monkeypatch.setattr(headroom, "HEADROOM_USE_MAX", 1.0)
    monkeypatch.setattr(headroom, "HEADROOM_LOADS_KNOWN", 2)
    test_a_worker_whatever_happens()


def test_a_full_worker_unloads_after_a_first_call_and_not_for_the_next_one() -> None:
    worker = WorkerMachine()
    worker.begin([0] * 6)
    for number in range(40):
        one = Wanted(manifest(f"small-{number}", 1), NO_VERDICT, EndpointPlacement())
        worker.needs[one.content_id] = Footprint(25, 0, 0.01, measured=True)
        worker.wanted[one.content_id] = one
    worker.update()
    while worker.loads.pending:
        worker.begin_load()
        for content_id in list(worker.loads.running):
            worker.finish(content_id)
    ahead, for_calls = 0, 0
    cold = [one for one in worker.wanted.values() if worker.models.get(one.content_id) is None]
    for one in cold:
        worker.clock.seconds += 1
        held = len(worker.models.all())
        order = Order(do="load", content_id=one.content_id, why="a call", evict=True)
        worker.residency.load(order, cast("Any", worker.redis))
        for_calls += held + 1 - len(worker.models.all())
        worker.begin_load()
        held = len(worker.models.all())
        worker.finish(one.content_id)
        ahead += held - len(worker.models.all())
        assert worker.models.get(one.content_id) is not None
    assert for_calls == 0
    assert ahead > 0, "the worker is full after a few of them"


def test_an_outdated_version_is_loaded_by_a_call_and_unloaded_when_no_more_come() -> None:
    worker = WorkerMachine()
    worker.begin([100] * 6)
    worker.outdate(NAMES[1])
    [old] = [one for one in worker.wanted.values() if one.outdated]
    while worker.loads.pending:
        worker.begin_load()
        for content_id in list(worker.loads.running):
            worker.finish(content_id)
    others = worker.wanted.keys() - {old.content_id}
    assert worker.models.all().keys() == others
    worker.residency.load(
        Order(do="load", content_id=old.content_id, why="a call", evict=True), Mock(wraps=worker.redis)
    )
    worker.begin_load()
    worker.finish(old.content_id)
    worker.clock.seconds += evictions.OUTDATED_IDLE_S - 1
    worker.step()
    assert old.content_id in worker.models.all()
    worker.clock.seconds += 1
    worker.step()
    assert worker.models.all().keys() == others


def test_a_staged_version_is_ordered_once_however_often_the_repository_changes() -> None:
    worker = WorkerMachine()
    worker.begin([800] * 6)
    staged = Wanted(manifest("staged", 1), NO_VERDICT, EndpointPlacement(), staged=True)
    worker.needs[staged.content_id] = Footprint(500, 50, 0.1, measured=True)
    worker.wanted[staged.content_id] = staged
    for _ in range(5):
        worker.residency.update(dict(worker.wanted))
    assert [order.content_id for order in worker.residency.again] == [staged.content_id]


def stage(worker: WorkerMachine, bytes_: int, load_s: float = 0.1) -> Wanted:
    """Have a client ask for the load of a new version."""
    staged = Wanted(manifest("staged", 1), NO_VERDICT, EndpointPlacement(), staged=True)
    worker.needs[staged.content_id] = Footprint(bytes_, 0, load_s, measured=True)
    worker.wanted[staged.content_id] = staged
    worker.update()
    return staged


def preloading() -> tuple[WorkerMachine, str]:
    """Return a worker that loads a version by itself, which fills most of its memory, and the version's content id."""
    worker = WorkerMachine()
    worker.begin([600] * 6)
    worker.delete(NAMES[0], 0)  # which is pinned
    worker.begin_load()
    [preloaded] = worker.loads.running
    return worker, preloaded


def test_a_staged_load_waits_for_a_preload_and_takes_its_memory() -> None:
    """It was refused, and its load ended on standby, because a version that nobody had asked for was being loaded."""
    worker, preloaded = preloading()
    staged = stage(worker, 600)
    assert worker.residency.refusals.of(staged.content_id) is None
    assert staged.content_id not in worker.loads.active()
    worker.residency.update(dict(worker.wanted))
    assert not worker.residency.again, "it is not ordered again meanwhile"
    worker.finish(preloaded)
    assert staged.content_id in worker.loads.active()
    assert worker.models.get(preloaded) is None, "it made room"


def test_a_staged_load_that_is_withdrawn_while_it_waits_for_a_preload_is_not_loaded() -> None:
    worker, preloaded = preloading()
    staged = stage(worker, 600)
    del worker.wanted[staged.content_id]
    worker.update()
    worker.finish(preloaded)
    assert staged.content_id not in worker.loads.active()
    assert worker.models.get(preloaded) is not None


def test_a_version_that_a_client_asked_for_is_not_unloaded_for_one_that_nobody_asked_for() -> None:
    """Both took more than was predicted. The one that was asked for loads faster, so to have it back costs less."""
    worker = WorkerMachine()
    worker.begin([600] * 6)
    worker.clock.seconds = 1.7e9  # Redis tells the time of day
    worker.delete(NAMES[0], 0)  # which is pinned
    worker.begin_load()
    [preloaded] = worker.loads.running
    worker.finish(preloaded)
    staged = stage(worker, 250, load_s=0.01)
    worker.begin_load()
    worker.wanted[staged.content_id] = Wanted(staged.manifest, NO_VERDICT, EndpointPlacement())  # it is published
    worker.needs[staged.content_id] = Footprint(600, 0, 0.01, measured=True)
    worker.update()
    worker.finish(staged.content_id)
    assert worker.models.get(preloaded) is None
    assert worker.models.get(staged.content_id) is not None
    [called] = [one for one in worker.wanted.values() if one.manifest.model == NAMES[1]]
    order = Order(do="load", content_id=called.content_id, why="a call", evict=True)
    worker.residency.load(order, cast("Any", worker.redis))
    assert called.content_id in worker.loads.active(), "it makes room for a call at once"


def with_doubtful(*, called: bool) -> tuple[WorkerMachine, str, str]:
    """Return a worker with a version of which it is not known whether it fits, and the content ids of it and another.

    Args:
        called: whether the other one, which is loaded, was called.
    """
    worker = WorkerMachine()
    worker.begin([850, 10])
    small, held = worker.wanted.values()
    worker.delete(small.manifest.model, 0)  # which is pinned
    worker.begin_load()
    worker.finish(held.content_id)
    if called:
        model = worker.models.get(held.content_id)
        assert model is not None
        model.calls.add(worker.clock.seconds)
        worker.needs[held.content_id] = replace(worker.needs[held.content_id], resident_bytes=500)
        worker.memory.budget.settle(held.content_id, worker.needs[held.content_id])
    worker.publish_doubtful(NAMES[7])
    [doubtful] = [one.content_id for one in worker.wanted.values() if one.manifest.model == NAMES[7]]
    return worker, doubtful, held.content_id


def test_a_version_that_may_fit_no_worker_is_loaded_when_it_is_published() -> None:
    worker, doubtful, held = with_doubtful(called=False)
    assert worker.models.get(held) is None, "nobody called it"
    worker.begin_load()
    worker.finish(doubtful)
    model = worker.models.get(doubtful)
    assert model is not None
    assert (model.state, model.demanded) == (State.READY, False)
    [called] = [one for one in worker.wanted.values() if one.content_id == held]
    order = Order(do="load", content_id=held, why="a call", evict=True)
    worker.residency.load(order, cast("Any", worker.redis))
    assert called.content_id in worker.loads.active(), "it makes room for a call at once"


def test_a_version_that_turns_out_to_fit_no_worker_has_failed_and_the_others_are_loaded_again() -> None:
    """It ended on standby, and its first call learnt that no worker could ever load it."""
    worker, doubtful, held = with_doubtful(called=False)
    states = []
    for _ in range(2):
        worker.begin_load()
        model = worker.models.get(doubtful)
        states.append(model.state if model is not None else None)
        if doubtful in worker.loads.running:
            worker.finish(doubtful, "no memory")
    refusal = worker.residency.refusals.of(doubtful)
    assert refusal is not None
    assert "it takes 1125 bytes of memory, and this worker has 900 bytes for models" in refusal.reason
    assert states == [State.LOADING] * 2, "it is never on standby, which those who wait would see"
    while worker.loads.pending:
        worker.begin_load()
        for content_id in list(worker.loads.running):
            worker.finish(content_id)
    model = worker.models.get(doubtful)
    assert model is not None
    assert model.state is State.FAILED
    assert worker.models.get(held) is not None


def test_a_version_that_may_fit_no_worker_does_not_displace_what_is_called_before_it_is_called_itself() -> None:
    worker, doubtful, held = with_doubtful(called=True)
    assert worker.models.get(held) is not None
    assert worker.models.get(doubtful) is None, "it is on standby"
    refusal = worker.residency.refusals.of(doubtful)
    assert refusal is not None
    assert refusal.kind == "nothing_evictable"
    worker.update()
    assert not worker.loads.pending, "it is not tried again"
    worker.clock.seconds += 10
    order = Order(do="load", content_id=doubtful, why="a call", evict=True)
    worker.residency.load(order, cast("Any", worker.redis))
    assert doubtful in worker.loads.active()
    assert worker.models.get(held) is None


@pytest.mark.parametrize(("kept", "reserved"), [(10, 890), (450, 450), (800, 100), (900, None)])
def test_a_version_that_was_never_measured_is_tried_with_the_memory_that_others_leave(
    kept: int, reserved: int | None
) -> None:
    """Its prediction takes all memory for models, 900; another version is in use, and stays."""
    worker = WorkerMachine()
    worker.begin([1000, 1000])
    used, unknown = worker.wanted.values()
    worker.needs[used.content_id] = Footprint(kept, 0, 0.1, measured=True)
    worker.needs[unknown.content_id] = Footprint(600, 300, 0.1)
    for one in (used, unknown):
        if one is unknown:
            worker.redis.in_use.add(used.content_id)
        order = Order(do="load", content_id=one.content_id, why="a call", evict=True)
        worker.residency.load(order, cast("Any", worker.redis))
        if one is used:
            worker.begin_load()
            worker.finish(used.content_id)
    held = worker.memory.budget.footprint(unknown.content_id)
    assert (held.load_bytes if held is not None else None) == reserved
    assert worker.models.get(used.content_id) is not None
    assert (worker.residency.refusals.of(unknown.content_id) is None) == (reserved is not None)


def test_a_load_that_found_no_free_memory_twice_is_refused_for_a_moment_and_did_not_fail() -> None:
    worker = WorkerMachine()
    worker.begin([300] * 6)
    [*_, one] = worker.wanted.values()
    order = Order(do="load", content_id=one.content_id, why="a call", evict=True)
    worker.residency.load(order, cast("Any", worker.redis))
    for state in (State.LOADING, None):
        [request] = [request for request in worker.loads.queue if request.content_id == one.content_id]
        worker.loads.queue.remove(request)
        worker.memory.budget.begin_unload(one.content_id)
        worker.memory.budget.freed(one.content_id)
        assert worker.residency.found_no_memory(request)
        worker.residency.load_ended(one.content_id)
        worker.residency.reconsider()
        model = worker.models.get(one.content_id)
        assert (model.state if model is not None else None) is state, "between its tries it is not on standby"
        worker.step()
    assert worker.models.get(one.content_id) is None
    refusal = worker.residency.refusals.of(one.content_id)
    assert refusal is not None
    assert refusal.kind == "nothing_evictable"
    assert "less memory than the 350 bytes that it takes" in refusal.reason


def test_the_second_try_of_a_load_that_found_no_memory_serves() -> None:
    worker = WorkerMachine()
    worker.begin([300] * 6)
    [*_, one] = worker.wanted.values()
    order = Order(do="load", content_id=one.content_id, why="a call", evict=True)
    worker.residency.load(order, cast("Any", worker.redis))
    for settles in (False, True):
        [request] = [request for request in worker.loads.queue if request.content_id == one.content_id]
        worker.loads.queue.remove(request)
        if settles:
            worker.memory.budget.settle(one.content_id, worker.needs[one.content_id])
            worker.models.set(LoadedModel(request.manifest, State.READY, footprint=worker.needs[one.content_id]))
        else:
            worker.memory.budget.begin_unload(one.content_id)
            worker.memory.budget.freed(one.content_id)
            assert worker.residency.found_no_memory(request)
        worker.residency.load_ended(one.content_id)
        worker.step()
    assert worker.residency.refusals.of(one.content_id) is None
    worker.models.remove(one.content_id)
    assert worker.residency.found_no_memory(request), "a later load has two tries of its own"
    assert worker.residency.refusals.of(one.content_id) is None


def test_a_version_that_failed_often_is_tried_again_by_orders_and_by_itself_after_five_minutes() -> None:
    worker = WorkerMachine()
    worker.begin([100] * 6)
    [*_, one] = worker.wanted.values()
    order = Order(do="load", content_id=one.content_id, why="a call", evict=True)
    for _ in range(FAILURES_MAX):
        worker.loads.fail(one.content_id)
    worker.models.set(LoadedModel(one.manifest, State.FAILED, "it fails"))
    worker.residency.load(order, cast("Any", worker.redis))
    refusal = worker.residency.refusals.of(one.content_id)
    assert refusal is not None
    assert refusal.until == worker.clock.seconds + FAILED_OFTEN_RETRY_S
    worker.clock.seconds += FAILED_OFTEN_RETRY_S
    worker.residency.load(order, cast("Any", worker.redis))
    assert one.content_id in worker.loads.active()


def test_a_load_whose_memory_is_about_to_be_free_waits_for_it_and_unloads_nothing() -> None:
    """A killed process takes a while to be gone: neither a call's load nor one that was to come ends on standby."""
    worker = WorkerMachine()
    worker.begin([300] * 6)
    held, preloaded, called = list(worker.wanted.values())[:3]
    worker.needs[held.content_id] = worker.needs[preloaded.content_id] = Footprint(300, 0, 0.1, measured=True)
    budget = worker.memory.budget
    assert budget.reserve("a race", Footprint(budget.free_bytes))
    worker.loads.giving_way = True
    request = LoadRequest(preloaded.manifest, suspect=False)
    worker.models.set(LoadedModel(preloaded.manifest, State.LOADING))
    assert not worker.residency.admits(request)
    assert worker.models.get(preloaded.content_id) is not None, "it is not on standby"
    order = Order(do="load", content_id=called.content_id, why="a call", evict=True)
    worker.residency.load(order, cast("Any", worker.redis))
    assert called.content_id in worker.residency.turns.line
    worker.loads.giving_way = False
    budget.begin_unload("a race")
    budget.freed("a race")
    worker.residency.reconsider()
    assert worker.residency.admits(request)
    worker.step()
    assert called.content_id in worker.loads.active()
    assert worker.residency.refusals.of(called.content_id) is None


def test_a_call_that_came_as_its_version_was_unloaded_has_it_loaded_and_a_readiness_probe_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evictions, "RECHECKS_S", (0.0,))
    worker = WorkerMachine()
    worker.begin([100] * 6)
    consumer = cast("Any", worker.redis)
    for _ in worker.wanted:
        worker.begin_load()
    for content_id in list(worker.loads.running):
        worker.finish(content_id)
    _, probed, called, silent, *_ = worker.wanted
    for content_id in (probed, called, silent):
        assert worker.residency.evictions.unload(content_id, EvictionReason.MOVED, "a test", consumer)
    worker.redis.probes = {probed, called}
    worker.redis.calls = {called}
    worker.residency.evictions.recall(consumer)
    assert worker.redis.demands == [called]


def test_a_version_that_is_unloaded_before_its_lane_was_added_ends_its_demand() -> None:
    """It took more than was predicted, and is unloaded at once; its calls are to order a load again, not to wait."""
    worker = WorkerMachine()
    worker.begin([1000, 1000, 1000, 1000, 500, 100])
    held, ordered = list(worker.wanted.values())[-2:]
    worker.begin_load()
    for content_id in list(worker.loads.running):
        worker.finish(content_id)
    worker.unload(name=ordered.manifest.model)
    worker.redis.in_use.add(held.content_id)
    worker.open.add(ordered.content_id)
    order = Order(do="load", content_id=ordered.content_id, why="a call", evict=True)
    worker.residency.load(order, cast("Any", worker.redis))
    worker.begin_load()
    worker.needs[ordered.content_id] = Footprint(450, 0, 0.1)
    large = ordered.content_id
    worker.finish(large)
    assert worker.models.get(large) is None
    assert worker.open == set()


def run_loads(worker: WorkerMachine) -> None:
    """Let all loads begin and succeed, one after the other."""
    while worker.loads.pending:
        worker.begin_load()
        for content_id in list(worker.loads.running):
            worker.finish(content_id)


def test_while_closes_take_long_no_more_is_unloaded_than_the_next_load_needs() -> None:
    """A machine short of CPU closes slowly: what is on its way out counts, and nothing else goes meanwhile."""
    worker = WorkerMachine()
    worker.begin([0] * 6)
    for number in range(50):
        one = Wanted(manifest(f"small-{number}", 1), NO_VERDICT, EndpointPlacement())
        worker.needs[one.content_id] = Footprint(25, 0, 0.5, measured=True)  # too long for memory that is kept free
        worker.wanted[one.content_id] = one
    worker.update()
    run_loads(worker)
    cold = [one for one in worker.wanted.values() if worker.models.get(one.content_id) is None]
    closes: list[Callable[[], None]] = []
    worker.unloads._run_apart = closes.append
    for one in cold:
        order = Order(do="load", content_id=one.content_id, why="a call", evict=True)
        worker.residency.load(order, cast("Any", worker.redis))
        run_loads(worker)
        worker.step()
    assert len(worker.residency.turns.line.content_ids()) > 5
    assert len(closes) == 1
    held = len(worker.models.all())
    while closes:
        closes.pop()()
        worker.step()
        run_loads(worker)
    assert not worker.residency.turns.line
    assert len([one for one in worker.models.all().values() if one.state is State.READY]) >= held - len(cold)
