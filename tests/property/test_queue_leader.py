"""The lead of controllers, their orders and the instances of workers, against a model of them, in any order.

Faults that were planted in the scripts, each found by the machine within a second: a lead that is taken from a leader,
not renewed, or renewed with another token; a token that does not grow when the lead expires or Redis loses its data; a
step down of another's lead, or with an older token; a fence that is not checked, not raised, lowered, or raised by the
supervisor; an order to a worker that is gone; instances that stay when all are stored, are not removed, or whose loss
the beat does not say; a record that is published without its instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from millstream.services.queue.leader_lock import Delivery, Lead, LeaderLock
from millstream.services.queue.server import Binary
from millstream.services.wire.orders import Order
from tests.kit.pool import LEASE_MS, Pool
from tests.kit.redis_server import binaries, redis_server
from tests.kit.state_machines import machine_settings

CONTROLLERS = ("c0", "c1", "c2")
WORKERS = ("w0", "w1")
VERSIONS = ("a", "b", "c")
AHEAD_US = 3_600_000_000
LIFE_S = 60.0  # no test lasts that long: rules move the expiry
SOME_CONTROLLER = st.sampled_from(CONTROLLERS)
SOME_WORKER = st.sampled_from(WORKERS)
CHANGES = st.dictionaries(st.sampled_from(VERSIONS), st.sampled_from(["", "loading", "ready"]))


@dataclass
class Worker:
    """What a worker has published. `lost`: Redis has lost its instances since."""

    alive: bool = False
    instances: dict[str, str] = field(default_factory=dict)
    lost: bool = False
    record: str = ""
    beats: int = 0


class Installation:
    """A Redis with controllers and workers."""

    def __init__(self, pool: Pool, runner: asyncio.Runner) -> None:
        self.pool = pool
        self.redis: Any = pool.redis
        self.run = runner.run
        self.locks = {name: LeaderLock(pool.address, pool.keys.of_installation, name, LIFE_S) for name in CONTROLLERS}

    async def close(self) -> None:
        for lock in self.locks.values():
            await lock.close()


class LeaderMachine(RuleBasedStateMachine):
    """Rules are what controllers, the supervisor, workers and time do."""

    def __init__(self, at: Installation) -> None:
        super().__init__()
        self.at = at
        self.keys = at.pool.keys
        self.given: list[tuple[str, int]] = []  # each lead that there was, and its token
        self.leader = ""
        self.fence = 0
        self.workers = {name: Worker() for name in WORKERS}
        self.orders: dict[str, list[str]] = {name: [] for name in WORKERS}
        self.ordered = 0
        self.ahead = False

    @initialize()
    def begin(self) -> None:
        self.at.pool.clear()
        for name in WORKERS:
            self._beat(name)

    @property
    def token(self) -> int:
        return self.given[-1][1] if self.given else 0

    # Controllers.

    @rule(name=SOME_CONTROLLER)
    def acquire(self, name: str) -> None:
        lead = self.at.run(self.at.locks[name].acquire())
        if self.leader not in {"", name}:
            assert lead == Lead(0, self.leader)
            return
        if not self.leader:
            assert lead.token > self.token, "each new leader has a higher token"
            self.leader = name
            self.given.append((name, lead.token))
        assert lead == Lead(self.token, name)
        assert LIFE_S / 2 < self.at.redis.ttl(self.keys.of_installation.leader) <= LIFE_S

    @precondition(lambda self: self.leader)
    @rule()
    def renew(self) -> None:
        self.at.redis.expire(self.keys.of_installation.leader, round(LIFE_S / 3))  # time passes
        self.acquire(self.leader)

    @precondition(lambda self: not self.ahead)
    @rule()
    def the_clock_goes_back(self) -> None:
        """Tokens are times: those of a server whose clock is behind the one before it grow all the same."""
        self.ahead = True
        self.at.redis.set(self.keys.of_installation.leader_token, self.at.redis.time()[0] * 1_000_000 + AHEAD_US)

    @precondition(lambda self: self.leader)
    @rule()
    def the_lead_expires(self) -> None:
        """The leader was paused: it still believes that it leads."""
        self.at.redis.delete(self.keys.of_installation.leader)
        self.leader = ""

    @precondition(lambda self: self.given)
    @rule(data=st.data(), name=SOME_CONTROLLER)
    def step_down(self, data: st.DataObject, name: str) -> None:
        token = data.draw(st.sampled_from([token for _, token in self.given]))
        leads = self.leader == name and token == self.token
        assert self.at.run(self.at.locks[name].release(token)) == leads
        if leads:
            self.leader = ""

    @rule(data=st.data(), worker=st.sampled_from([*WORKERS, "gone"]))
    def order(self, data: st.DataObject, worker: str) -> None:
        """A controller that led at some time, or the supervisor (token 0), gives an order."""
        name, token = data.draw(st.sampled_from([("c0", 0), *self.given]))
        self.ordered += 1
        order = Order(do="load", content_id="a", why=f"order {self.ordered}", token=token)
        delivery = self.at.run(self.at.locks[name].order(self.at.pool.name, worker, order))
        if token and token < self.fence:
            assert delivery is Delivery.NEWER_LEADER
            return
        self.fence = max(self.fence, token)
        known = self.workers.get(worker)
        alive = known is not None and known.alive
        assert delivery is (Delivery.GIVEN if alive else Delivery.WORKER_GONE)
        if alive:
            self.orders[worker].append(order.model_dump_json())

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def keep_older_leaders_away(self, data: st.DataObject) -> None:
        name, token = data.draw(st.sampled_from(self.given))
        assert self.at.run(self.at.locks[name].fence([self.at.pool.name], token)) == (token >= self.fence)
        self.fence = max(self.fence, token)

    # Workers.

    @rule(name=SOME_WORKER)
    def beat(self, name: str) -> None:
        worker = self.workers[name]
        lost = worker.lost and bool(worker.instances)
        assert self._beat(name) == (not lost), "the beat says whether the instances were lost"

    @rule(name=SOME_WORKER)
    def beat_before_a_removal_is_stored(self, name: str) -> None:
        worker = self.workers[name]
        fewer = len(worker.instances) - 1
        if fewer >= 0 and not worker.lost:
            self.at.pool.worker(name).beat(b"of fewer instances", LEASE_MS, fewer)
            worker.alive = True
            assert not self.at.pool.worker(name).instances_stored

    def _beat(self, name: str) -> bool:
        worker, consumer = self.workers[name], self.at.pool.worker(name)
        worker.beats += 1
        record = f"{name} {worker.beats} {sorted(worker.instances)}"
        consumer.beat(record.encode(), LEASE_MS, len(worker.instances))
        worker.alive = True
        if consumer.instances_stored:
            worker.record = record
        return consumer.instances_stored

    @rule(name=SOME_WORKER, changes=CHANGES, whole=st.booleans())
    def store(self, name: str, changes: dict[str, str], whole: bool) -> None:
        """Some instances change. All are stored at the start, and after a beat said that they were lost."""
        worker = self.workers[name]
        whole = whole or worker.lost
        known = {} if whole else worker.instances
        worker.instances = {version: state for version, state in (known | changes).items() if state}
        self.at.pool.worker(name).store_instances(worker.instances if whole else changes, LEASE_MS, whole=whole)
        worker.lost = False

    @precondition(lambda self: any(self.orders.values()))
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in WORKERS if self.orders[name]]))
        order = self.at.pool.worker(name).take_order(1)
        assert (order or b"").decode() == self.orders[name].pop(0)

    @rule(name=SOME_WORKER)
    def instances_expire(self, name: str) -> None:
        """A worker was frozen: it does not know yet."""
        self.at.redis.delete(self.keys.instances(name))
        self.workers[name].lost = True

    @rule(name=SOME_WORKER, dies=st.booleans())
    def reclaim(self, name: str, dies: bool) -> None:
        worker = self.workers[name]
        self.at.pool.silence(name)
        assert self.at.pool.reclaim(name if dies else "")[0] == int(worker.alive or dies)
        if worker.alive or dies:
            self.orders[name] = []
            worker.alive, worker.lost, worker.record = False, True, ""

    # Redis.

    @rule()
    def lose_everything(self) -> None:
        self.at.pool.clear()
        self.at.pool.next_millisecond()
        self.leader, self.fence = "", 0
        if self.ahead:  # then tokens may be lower than before, and so is the fence
            self.given, self.ahead = [], False
        self.orders = {name: [] for name in WORKERS}
        for worker in self.workers.values():
            worker.alive, worker.lost, worker.record = False, True, ""

    @invariant()
    def sound(self) -> None:
        redis, keys = self.at.redis, self.keys
        stored = redis.get(keys.of_installation.leader)
        assert (stored or b"").decode() == (f"{self.token} {self.leader}" if self.leader else "")
        assert int(redis.get(keys.fence) or 0) == self.fence
        for name, worker in self.workers.items():
            assert [data.decode() for data in redis.lrange(keys.orders(name), 0, -1)] == self.orders[name]
            instances = {key.decode(): data.decode() for key, data in redis.hgetall(keys.instances(name)).items()}
            assert instances == ({} if worker.lost else worker.instances)
            assert (redis.get(keys.record(name)) or b"").decode() == worker.record
            assert (redis.zscore(keys.workers, name) is not None) == worker.alive
        lives = [redis.ttl(key) for key in redis.keys("*") if not key.endswith((b":workers", b":leader_token"))]
        assert -1 not in lives, "what a process leaves behind expires"


@contextmanager
def installation(pool: Pool) -> Iterator[Installation]:
    with asyncio.Runner() as runner:
        at = Installation(pool, runner)
        try:
            yield at
        finally:
            runner.run(at.close())


@pytest.fixture(scope="module", params=binaries(), ids=str)
def at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    binary: Binary = request.param
    with redis_server(binary, tmp_path_factory.mktemp("redis")) as address:
        pool = Pool(address)
        with installation(pool) as at:
            yield at
        pool.close()


@pytest.mark.state_machine
def test_one_controller_leads_and_nothing_is_published_by_halves(at: Installation) -> None:
    run_state_machine_as_test(
        lambda: LeaderMachine(at),  # type: ignore[arg-type]
        settings=machine_settings(
            max_examples=150, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
