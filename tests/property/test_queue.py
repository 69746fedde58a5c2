"""The queue against a model of it, under everything that may happen: any order of puts, leases, replies, crashes,
freezes.

The model knows which batches are in flight, what each worker believes to hold, and which replies must have come. Which
worker gets a batch is read from Redis and checked for being allowed.

Faults that were planted in the scripts of many models, each of which the machine finds: a demand for a lane
that is served, without an end, with a life of zero, again while it lives, for a worker that is gone, for the
last worker instead of the first, without its order, or that is not kept; a demand that a worker ends for
another one, that does not end, that stays when its lane is served or its worker is gone, and one that ends
with another worker; orders of a worker that is gone; a lane that is released while a batch waits or is leased
in it, with one other worker too few or too many, with the worker itself counted as another one, or that stays
in Redis; lanes in use without those whose batches are leased, or with a wrong count of workers; batches that
are given back and stay, stay leased, stay in the inbox, return to the worker, are of the long run itself, or
lose an attempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

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

from millstream.services.queue.server import Binary
from millstream.services.wire.batch import decode_reply
from millstream.workers.batches.lease import Lease
from tests.kit.pool import ATTEMPTS_MAX, LEASE_MS, Key, Pool, RedisSnapshot, keys, names, reply
from tests.kit.redis_server import binaries, redis_server
from tests.kit.state_machines import machine_settings

LANES = ("l0", "l1", "l2")
GATEWAYS = ("g0", "g1")
WORKERS_MAX = 5
DEMAND_MS = 60_000  # no test lasts that long: `outlive_a_demand` changes the time in Redis
FAR_MS = 10**13  # on the Redis clock: a deadline that has not passed
LONG_MS = 60_000  # no test lasts that long
OVERDUE_MAX = 8  # entries of a lane that one call of reclaim looks at
#: lane -> run time that it was not charged for, how long it counts as one with long runs; in ms
USED = st.dictionaries(
    st.sampled_from(LANES), st.tuples(st.integers(1, 99) | st.just(0), st.sampled_from([0, LONG_MS]))
)
SOME_LANES = st.sets(st.sampled_from(LANES))


@pytest.fixture(scope="module", params=binaries(), ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    binary: Binary = request.param
    with redis_server(binary, tmp_path_factory.mktemp("redis")) as address:
        pool = Pool(address)
        yield pool
        pool.close()


@dataclass
class Batch:
    """A batch that is neither answered nor given up."""

    lane: str
    gateway: str
    deadline_ms: int
    cost_ms: int
    fill: float
    attempt: int = 1
    call: bool = True
    long_ms: int = 0


@dataclass
class Worker:
    """What a worker believes. `lanes`: that it can run; Redis knows them while the worker is `known`.

    `hand`: leases that it has received. `sent`: those whose reply is in the socket of its gateway already. `alone`: the
    batch that it said it runs alone. `awake`: neither dead nor frozen; a dead one never wakes again.
    """

    name: str
    lanes: set[str]
    hand: list[Lease] = field(default_factory=list)
    sent: set[Key] = field(default_factory=set)
    awake: bool = True
    dead: bool = False
    known: bool = True
    alone: str = ""


@dataclass
class Demand:
    """The order of a lane: its worker, and the time (ms, Redis clock) until which no other worker is ordered."""

    worker: str
    until_ms: float


def may_have(snapshot: RedisSnapshot, lane: str, worker: str) -> bool:
    """Whether a lane may have a worker: one with long runs leaves a worker to each lane that was called lately.

    A lane with short runs is left one without any long run, a lane with long runs one without this lane's.
    """
    if lane not in snapshot.long:
        return True
    peers = {peer for peer in snapshot.workers if peer != worker}

    def left(other: str) -> bool:
        """Whether another worker could run it soon."""
        able = {peer for peer in peers if other in snapshot.lanes.get(peer, ())}
        taken = {peer for peer, held in snapshot.held.items() if held == lane or other not in snapshot.long}
        return bool(able - taken)

    elsewhere = any(lane in snapshot.lanes.get(peer, ()) for peer in peers)
    others = {**snapshot.called, **snapshot.called_long}.keys() & snapshot.lanes.get(worker, set()) - {lane}
    return not elsewhere or all(left(other) for other in others)


def charge(snapshot: RedisSnapshot, lane: str, ms: float) -> None:
    """Charge a lane for run time, if it is more than a trifle."""
    if ms >= 1:
        where = snapshot.ready if lane in snapshot.ready else snapshot.vtimes
        vtimes = (snapshot.ready.get(lane, 0), snapshot.vtimes.get(lane, 0), snapshot.vtimes.get("", 0))
        where[lane] = max(vtimes) + ms


class ExchangeMachine(RuleBasedStateMachine):
    """Rules are what gateways, workers, the network and the operating system do."""

    def __init__(self, pool: Pool, others: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.others = others
        self.theirs: dict[bytes, bytes] = {}
        self.snapshot = RedisSnapshot()
        self.batches: dict[str, Batch] = {}
        self.workers: dict[str, Worker] = {}
        self.replies: dict[str, list[bytes]] = {gateway: [] for gateway in GATEWAYS}
        self.ended: list[str] = []
        self.demands: dict[str, Demand] = {}
        self.orders: dict[str, list[bytes]] = {}
        self.named = 0

    @initialize()
    def clear(self) -> None:
        self._clear()

    def _clear(self) -> None:
        """An empty Redis, but for another installation, whose lanes, workers and batches have the same names."""
        self.pool.clear()
        self.others.join("w1", *LANES)
        for name in ("b1", "b2"):
            self.others.put("l0", name)
        self.others.next("w1", wanted=1)
        self.theirs = self._of_others()

    def _of_others(self) -> dict[bytes, bytes]:
        return {key: self.pool.redis.dump(key) for key in self.pool.redis.keys(b"*:{another*")}

    # Gateways.

    @rule(
        lane=st.sampled_from(LANES),
        gateway=st.sampled_from(GATEWAYS),
        deadline_ms=st.integers(1, 99) | st.integers(FAR_MS, FAR_MS + 99),
        cost_ms=st.integers(0, 20),
        fill=st.sampled_from([0, 0.25, 0.5, 1, 2]),
        call=st.booleans(),
        long_ms=st.sampled_from([0, 0, LONG_MS]),
    )
    def put(
        self,
        lane: str,
        gateway: str,
        deadline_ms: int,
        cost_ms: int,
        fill: float,
        call: bool = True,
        long_ms: int = 0,
    ) -> None:
        self.named += 1
        name = f"b{self.named}"
        self.batches[name] = Batch(lane, gateway, deadline_ms, cost_ms, fill, call=call, long_ms=long_ms)
        self._put(name)

    def _put(self, name: str) -> None:
        batch, before = self.batches[name], self.snapshot
        if batch.long_ms:
            before.long[batch.lane] = math.inf
        waiting = before.waiting(batch.lane)
        able = {
            worker: score
            for worker, score in before.idle.items()
            if batch.lane in before.lanes.get(worker, ()) and may_have(before, batch.lane, worker)
        }
        delivered = self.pool.put(
            batch.lane,
            name,
            deadline_ms=batch.deadline_ms,
            gateway=batch.gateway,
            cost_ms=batch.cost_ms,
            fill=batch.fill,
            probe=not batch.call,
            long_ms=batch.long_ms,
        )
        assert delivered == bool(able and not waiting)
        after = self.snapshot = self.pool.snapshot()
        assert batch.lane in {**after.called, **after.called_long} or delivered or not batch.call
        if able:
            first = [*waiting, name][0]
            [worker] = [entry.worker for entry in after.entries if entry.name == first]
            assert able[str(worker)] == min(able.values())
            charge(before, batch.lane, self.batches[first].cost_ms)
            if batch.lane in before.long:
                before.held[str(worker)] = batch.lane
        assert after.held == before.held
        assert {**after.vtimes, **after.ready}.get(batch.lane, 0) == {**before.vtimes, **before.ready}.get(
            batch.lane, before.vtimes.get("", 0) if batch.lane in after.ready else 0
        )

    @rule(data=st.data(), lane=st.sampled_from(LANES))
    def demand(self, data: st.DataObject, lane: str) -> None:
        """A gateway has a version loaded."""
        workers = data.draw(st.lists(st.sampled_from([*sorted(self.workers), "gone"]), max_size=4, unique=True))
        self._demand(lane, workers)

    def _demand(self, lane: str, workers: list[str]) -> None:
        """Order the first of these workers that is alive, unless the lane is served or another one has the order."""
        before = self.snapshot
        self.named += 1
        order = f"load {lane} {self.named}".encode()
        expected = ("", False)
        known, now = self.demands.get(lane), self._now_ms()
        alive = [worker for worker in workers if worker in before.workers]
        if not any(lane in lanes for lanes in before.lanes.values()):
            if known is not None and known.until_ms > now and known.worker in before.workers:
                expected = (known.worker, False)
            elif alive:
                expected = (alive[0], True)
        assert self.pool.demand(lane, *workers, life_ms=DEMAND_MS, order=order) == expected
        if expected[1]:
            until_ms = self.pool.snapshot().demands[lane][1]
            assert now + DEMAND_MS <= until_ms <= self._now_ms() + DEMAND_MS
            self.demands[lane] = Demand(alive[0], until_ms)
            self.orders.setdefault(alive[0], []).append(order)
            assert self.pool.demand(lane, *reversed(workers), order=order) == (alive[0], False)  # by another gateway

    def _now_ms(self) -> int:
        seconds, micros = self.pool.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    @precondition(lambda self: self.demands)
    @rule(data=st.data())
    def outlive_a_demand(self, data: st.DataObject) -> None:
        """A load takes longer than the life of its demand: another worker is ordered."""
        lane = data.draw(st.sampled_from(sorted(self.demands)))
        self.pool.expire_demand(lane)
        self.demands[lane].until_ms = 1
        self._demand(lane, data.draw(st.permutations(sorted(self.workers))))

    @rule(gateway=st.sampled_from(GATEWAYS))
    def collect(self, gateway: str) -> None:
        assert self.pool.replies(gateway) == self.replies[gateway]
        self.replies[gateway].clear()

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), refused=st.booleans())
    def withdraw(self, data: st.DataObject, refused: bool) -> None:
        """A gateway waits no longer for one of its batches, or its version is refused."""
        name = data.draw(st.sampled_from(sorted(self.batches)))
        lane = self.batches[name].lane
        [entry] = [entry for entry in self.snapshot.entries if entry.name == name]
        held = any(lane in lanes for lanes in self.snapshot.lanes.values())
        removed = entry.worker is None and (refused or not held)
        assert self.pool.withdraw(lane, name, refused=refused) == removed
        if removed and refused:
            self._end(name, b"\2" + name.encode())
        elif removed:
            del self.batches[name]

    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        """The lease time has passed for some: surely dead or frozen ones, perhaps one whose heartbeat was only late."""
        registered = sorted(self.snapshot.workers)
        silent = data.draw(st.sets(st.sampled_from(registered))) if registered else set()
        self.pool.silence(*silent)
        self._reclaimed(silent, self.pool.reclaim())

    @precondition(lambda self: any(worker.dead for worker in self.workers.values()))
    @rule(data=st.data())
    def hear_of_a_death(self, data: st.DataObject) -> None:
        dead = data.draw(st.sampled_from(sorted(name for name, worker in self.workers.items() if worker.dead)))
        self._reclaimed({dead}, self.pool.reclaim(dead), died=True)

    def _reclaimed(self, workers: set[str], result: tuple[int, int, int], *, died: bool = False) -> None:
        again = given_up = 0
        for entry in self.snapshot.entries:
            if entry.worker in workers:
                batch = self.batches[entry.name]
                alone = self.workers[entry.worker].alone == entry.name
                if (died and (batch.attempt == 1 or alone)) or batch.attempt >= ATTEMPTS_MAX:
                    given_up += 1
                    self._end(entry.name, b"\1" + entry.name.encode())
                else:
                    again += 1
                    batch.attempt += not died
        assert result == (len(workers), again, given_up)
        self._end_orders(workers)
        for name in workers:
            worker = self.workers[name]
            worker.known, worker.alone = False, ""
            if worker.dead:
                del self.workers[name]
        self._drop_overdue()
        self._in_any_order(workers)

    def _drop_overdue(self) -> None:
        """What is past its deadline leaves the lanes that no worker serves, and nothing else does."""
        after = self.pool.snapshot()
        there = {entry.name for entry in after.entries}
        for lane in LANES:
            entries = [name for name, batch in self.batches.items() if batch.lane == lane]
            leased = {entry.name for entry in after.entries if entry.worker is not None}
            held = any(lane in lanes for lanes in after.lanes.values())
            overdue = {name for name in entries if self.batches[name].deadline_ms < FAR_MS} - leased
            gone = {name for name in entries if name not in there}
            assert gone <= (set() if held else overdue)
            assert held or len(entries) > OVERDUE_MAX or gone == overdue
            for name in gone:
                self._end(name, b"\2" + name.encode())

    def _end_orders(self, workers: set[str]) -> None:
        """Workers are gone, and with them what they were ordered."""
        self.demands = {lane: demand for lane, demand in self.demands.items() if demand.worker not in workers}
        self.orders = {worker: orders for worker, orders in self.orders.items() if worker not in workers}

    def _in_any_order(self, workers: set[str]) -> None:
        """Batches of several workers are given up in no particular order."""
        for gateway, expected in self.replies.items():
            there = self.pool.snapshot().replies.get(gateway, [])
            assert sorted(there) == sorted(expected), workers
            expected[:] = there

    def _end(self, name: str, answer: bytes) -> None:
        batch = self.batches.pop(name)
        self.replies[batch.gateway].append(answer)
        self.ended.append(name)

    # Workers.

    @precondition(lambda self: len(self.workers) < WORKERS_MAX)
    @rule(lanes=SOME_LANES, steps=st.permutations(["beat", "hold", "next"]))
    def join(self, lanes: set[str], steps: list[str]) -> None:
        """Heartbeat, reconciler and main loop start at the same time."""
        self.named += 1
        name = f"w{self.named}"
        worker = self.workers[name] = Worker(name, set(lanes), known=False)
        for step in steps:
            if step == "beat":
                self._beat(worker)
            elif step == "hold":
                self._hold(worker, lanes)
            else:
                self._next(worker, [], 0, 4)
            self.snapshot = self.pool.snapshot()

    def _hold(self, worker: Worker, lanes: set[str]) -> None:
        worker.lanes |= lanes
        self._serve(worker, lanes)

    def _serve(self, worker: Worker, lanes: set[str]) -> None:
        self.pool.worker(worker.name).add_lanes(sorted(lanes))
        for lane in lanes:
            self.demands.pop(lane, None)

    def _beat(self, worker: Worker) -> None:
        held = self.snapshot.lanes.get(worker.name, set())
        known = self.pool.worker(worker.name).beat(b"{}", LEASE_MS)
        assert known == (worker.known and bool(held))
        if not known:
            self._serve(worker, worker.lanes)
        worker.known = True

    def _awake(self, data: st.DataObject) -> Worker:
        return self.workers[data.draw(st.sampled_from(sorted(w.name for w in self.workers.values() if w.awake)))]

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        self._beat(self._awake(data))

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data(), lanes=SOME_LANES)
    def hold(self, data: st.DataObject, lanes: set[str]) -> None:
        self._hold(self._awake(data), lanes)

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data(), lane=st.sampled_from(LANES))
    def release(self, data: st.DataObject, lane: str) -> None:
        worker = self._awake(data)
        worker.lanes.discard(lane)
        self.pool.worker(worker.name).remove_lane(lane)

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data(), others_min=st.integers(0, 2))
    def release_unused(self, data: st.DataObject, others_min: int) -> None:
        """A worker unloads a version for want of memory: only if nobody calls it and enough others serve it."""
        worker, before = self._awake(data), self.snapshot
        lane = data.draw(st.sampled_from(sorted(worker.lanes) or LANES))
        consumer = self.pool.worker(worker.name)
        others = sum(lane in lanes for name, lanes in before.lanes.items() if name != worker.name)
        used = {entry.lane for entry in before.entries}
        holders, in_use = consumer.lanes_in_use(LANES, LANES)
        assert in_use == used
        assert holders == {lane: sum(lane in lanes for lanes in before.lanes.values()) for lane in LANES}
        assert consumer.release_lane(lane, others_min) == (lane not in used and others >= others_min)
        if lane not in used and others >= others_min:
            worker.lanes.discard(lane)

    @rule(data=st.data(), lane=st.sampled_from(LANES), asks=st.booleans())
    def give_back(self, data: st.DataObject, lane: str, asks: bool) -> None:
        """A worker has a long run before it: others have what it leases besides."""
        if not any(worker.awake and worker.hand for worker in self.workers.values()):
            if len(self.workers) < WORKERS_MAX:
                self.join({lane}, ["beat", "hold", "next"])
            self.put(lane, GATEWAYS[0], 1, 1, 0.25)
        has = [w for w in self.workers.values() if w.awake and (w.hand or self.snapshot.inbox.get(w.name))]
        if not has:
            return
        worker = data.draw(st.sampled_from(has))
        if asks and not worker.hand:
            worker.hand += self.pool.wait(worker.name)
            self.snapshot = self.pool.snapshot()
        if asks:
            self._next(worker, [], len(worker.hand), 4)
            self.snapshot = self.pool.snapshot()
        running = worker.hand[: data.draw(st.integers(0, len(worker.hand)))]
        given = set(self.snapshot.leased(worker.name)) - set(names(running))
        assert self.pool.worker(worker.name).give_back(running) == len(given)
        assert not given & set(self.pool.snapshot().leased(worker.name))

    @precondition(lambda self: any(worker.awake and worker.name in self.orders for worker in self.workers.values()))
    @rule(data=st.data(), outcome=st.sampled_from(["serves", "refuses", "loads"]))
    def obey(self, data: st.DataObject, outcome: str) -> None:
        """A worker takes the next order."""
        name = data.draw(st.sampled_from(sorted(name for name in self.orders if self.workers[name].awake)))
        worker, order = self.workers[name], self.orders[name].pop(0)
        assert self.pool.worker(name).take_order(1) == order
        if not self.orders[name]:
            del self.orders[name]
        lane = order.split()[1].decode()
        if outcome == "serves":
            self._hold(worker, {lane})
        elif outcome == "refuses":
            self._end_demand(name, lane)

    @precondition(lambda self: self.demands and any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data())
    def end_a_demand(self, data: st.DataObject) -> None:
        """A worker ends the demand of a lane that may be another one's by now."""
        self._end_demand(self._awake(data).name, data.draw(st.sampled_from(sorted(self.demands))))

    def _end_demand(self, worker: str, lane: str) -> None:
        own = lane in self.demands and self.demands[lane].worker == worker
        assert self.pool.end_demand(lane, worker) == own
        if own:
            del self.demands[lane]

    @precondition(lambda self: any(worker.awake and worker.hand for worker in self.workers.values()))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        """A worker sends replies to the sockets of gateways. It acknowledges them later, or dies or freezes before."""
        able = sorted(worker.name for worker in self.workers.values() if worker.awake and worker.hand)
        worker = self.workers[data.draw(st.sampled_from(able))]
        leases = worker.hand[: data.draw(st.integers(1, len(worker.hand)))]
        worker.sent.update(keys(leases))

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data(), wanted=st.integers(0, 4), leased=st.integers(0, 1), used=USED)
    def next(self, data: st.DataObject, wanted: int, leased: int, used: dict[str, tuple[float, int]]) -> None:
        worker = self._awake(data)
        finished = data.draw(st.integers(0, len(worker.hand)))
        self._next(worker, worker.hand[:finished], leased, wanted, used)

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(
        data=st.data(),
        lane=st.sampled_from(LANES),
        ms=st.integers(0, 99),
        busy=st.booleans(),
        yields=st.booleans(),
        ends=st.booleans(),
    )
    def run_long(self, data: st.DataObject, lane: str, ms: int, busy: bool, yields: bool, ends: bool) -> None:
        """A long run goes on, of a batch that came directly or from the queue; or it ends."""
        worker, before = self._awake(data), self.snapshot
        consumer = self.pool.worker(worker.name)
        if ends:
            consumer.runs_no_longer()
            assert worker.name not in self.pool.snapshot().held
            return
        known = worker.name in before.workers
        behind = {entry.lane for entry in before.entries if entry.worker == worker.name}
        others = (
            {**before.called, **before.called_long}.keys()
            & before.lanes.get(worker.name, set())
            & (before.ready.keys() | behind) - {lane}
        )
        with_long = replace(before, long={**before.long, lane: math.inf})
        leaves = bool(known and others) and yields and not may_have(with_long, lane, worker.name)
        waits = consumer.running(lane, ms / 1000, LONG_MS, 60, busy=busy, yields=yields)
        assert waits == (bool(known and others), leaves, bool(known and others & behind))
        after = self.pool.snapshot()
        if not known:
            assert after == before
            return
        charge(before, lane, ms)
        assert (after.ready, after.vtimes) == (before.ready, before.vtimes)
        held = {peer: had for peer, had in before.held.items() if peer != worker.name}
        assert after.held == (held if leaves else {**held, worker.name: lane})
        assert lane in after.long
        assert not (busy and worker.name in after.idle)

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data(), wanted=st.integers(1, 4))
    def finish_and_wait(self, data: st.DataObject, wanted: int) -> None:
        worker = self._awake(data)
        self._next(worker, list(worker.hand), None, wanted)

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data(), wanted=st.integers(0, 4))
    def lose_the_answer(self, data: st.DataObject, wanted: int) -> None:
        """The connection breaks while the answer of `next` is on its way; the worker comes back and asks."""
        worker = self._awake(data)
        finished = data.draw(st.integers(0, len(worker.hand)))
        hand = list(worker.hand)
        self._next(worker, hand[:finished], 0, wanted)
        worker.hand = hand
        before = self.pool.snapshot()
        recovered = self.pool.worker(worker.name).recover(hand)
        known = keys(hand)
        missing = [entry.name for entry in before.entries if entry.worker == worker.name and entry.key not in known]
        assert sorted(names(recovered)) == sorted(missing)
        worker.hand = hand + recovered

    def _next(
        self,
        worker: Worker,
        finished: list[Lease],
        leased: int | None,
        wanted: int,
        used: dict[str, tuple[float, int]] | None = None,
    ) -> None:
        """Send replies and lease; with `leased` None the worker leases nothing and blocks on its inbox."""
        before, used = self.snapshot, used or {}
        mine = {entry.key for entry in before.entries if entry.worker == worker.name}
        if leased is None:
            got = self.pool.wait(worker.name, *finished, wanted=wanted, timeout_s=0.001, sent=worker.sent)
        else:
            got = self.pool.next(worker.name, *finished, leased=leased, wanted=wanted, sent=worker.sent, used=used)
        self._note_used(before, worker.name, used)
        for lease, key in zip(finished, keys(finished), strict=True):
            if key in mine and key in worker.sent:
                self.batches.pop(lease.header.name)
                self.ended.append(lease.header.name)
            elif key in mine:
                self._end(lease.header.name, reply(lease, worker.name))
        worker.hand = [lease for lease in worker.hand if lease not in finished] + got
        if wanted == 0:
            assert got == []
            assert worker.name not in self.pool.snapshot().idle
        elif before.inbox.get(worker.name):
            assert keys(got) == before.inbox[worker.name][:wanted]
        else:
            before.held.pop(worker.name, None)
            self._check_leased(worker, before, got, wanted)

    def _note_used(self, before: RedisSnapshot, worker: str, used: dict[str, tuple[float, int]]) -> None:
        """What the script was told of run time is known to it before it chooses a lane."""
        for lane, (ms, long_ms) in used.items():
            charge(before, lane, ms)
            before.called[lane] = math.inf
            if long_ms:
                before.long[lane] = math.inf

    def _check_leased(self, worker: Worker, before: RedisSnapshot, got: list[Lease], wanted: int) -> None:
        """The front of the lane whose turn it is, a fair part of it; nothing only if there is nothing.

        Its turn has the most urgent one that had no more than its share, else the one that had least.
        """
        able = [
            (tag, lane)
            for lane, tag in before.ready.items()
            if lane in before.lanes.get(worker.name, ()) and may_have(before, lane, worker.name)
        ]
        if not able:
            assert got == []
            after = self.pool.snapshot()
            assert worker.name in after.idle
            assert after.held == before.held
            return
        now = max(before.vtimes.get("", 0), min(able)[0])
        lane = min((before.deadlines[lane], tag, lane) for tag, lane in able if tag <= now)[2]
        waiting = before.waiting(lane)
        first = self.batches[waiting[0]]
        fitting = math.floor(1 / first.fill) if first.fill else wanted
        count = max(1, min(wanted, fitting, math.ceil(len(waiting) / max(1, len(before.workers)))))
        assert names(got) == waiting[:count]
        after = self.pool.snapshot()
        assert after.held == (before.held | {worker.name: lane} if lane in before.long else before.held)
        assert after.vtimes.get("", 0) == now
        left = after.ready if count < len(waiting) else after.vtimes
        assert left[lane] == now + sum(self.batches[name].cost_ms for name in waiting[:count])

    @precondition(lambda self: any(w.awake and self.snapshot.inbox.get(w.name) for w in self.workers.values()))
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        able = sorted(w.name for w in self.workers.values() if w.awake and self.snapshot.inbox.get(w.name))
        worker = self.workers[data.draw(st.sampled_from(able))]
        got = self.pool.wait(worker.name)
        assert keys(got) == self.snapshot.inbox[worker.name][:4]
        worker.hand += got

    @rule(data=st.data(), lane=st.sampled_from(LANES), joins=st.booleans(), tries=st.booleans())
    def pass_on(self, data: st.DataObject, lane: str, joins: bool, tries: bool) -> None:
        """It cannot read a batch, and some others could not: an idle holder of the lane has it now, else any, else
        none.
        """
        while joins and len(self.workers) < min(3, WORKERS_MAX):
            self.join({lane}, ["beat", "hold", "next"])
        if not any(worker.awake and worker.hand for worker in self.workers.values()):
            self.put(lane, GATEWAYS[0], 1, 1, 0.25)
        has = [w for w in self.workers.values() if w.awake and (w.hand or self.snapshot.inbox.get(w.name))]
        if not has:
            return
        worker = data.draw(st.sampled_from(has))
        if not worker.hand:
            worker.hand += self.pool.wait(worker.name)
            self.snapshot = self.pool.snapshot()
        lease = data.draw(st.sampled_from(worker.hand))
        tried = data.draw(st.sets(st.sampled_from(sorted(self.workers)))) if tries else set()
        before = self.snapshot
        self.pool.worker(worker.name)._pass_on(
            lease.lane, lease.entry, tuple(tried), ValueError("from another release")
        )
        worker.hand.remove(lease)
        mine = {entry.key for entry in before.entries if entry.worker == worker.name}
        if not mine.intersection(keys([lease])):
            assert self.pool.snapshot() == before
            return
        others = {other for other in before.workers if lease.lane in before.lanes.get(other, ())}
        others -= tried | {worker.name}
        if not others:
            self._end(lease.header.name, b"\2" + lease.header.name.encode())
            return
        after = self.pool.snapshot()
        [now] = [str(entry.worker) for entry in after.entries if entry.key in keys([lease])]
        assert now in (others & set(before.idle) or others)
        assert after.inbox[now][-1:] == keys([lease])

    @precondition(lambda self: any(worker.awake and worker.hand for worker in self.workers.values()))
    @rule(data=st.data())
    def run_alone(self, data: st.DataObject) -> None:
        able = sorted(worker.name for worker in self.workers.values() if worker.awake and worker.hand)
        worker = self.workers[data.draw(st.sampled_from(able))]
        lease = data.draw(st.sampled_from(worker.hand))
        self.pool.worker(worker.name).run_alone(lease)
        worker.alone = lease.header.name

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._leave(self._awake(data))

    def _leave(self, worker: Worker) -> None:
        consumer = self.pool.worker(worker.name)
        self._next(worker, [], 0, 0)
        worker.hand += consumer.take_inbox()
        self._next(worker, list(worker.hand), 0, 0)
        consumer.leave(ATTEMPTS_MAX)
        self._end_orders({worker.name})
        self._drop_overdue()
        self._in_any_order({worker.name})
        del self.workers[worker.name]

    # What befalls them.

    @precondition(lambda self: any(worker.awake for worker in self.workers.values()))
    @rule(data=st.data(), dies=st.booleans())
    def stop(self, data: st.DataObject, dies: bool) -> None:
        worker = self._awake(data)
        worker.awake, worker.dead = False, dies

    @precondition(lambda self: any(worker.awake and worker.hand for worker in self.workers.values()))
    @rule(data=st.data())
    def die_at_work(self, data: st.DataObject) -> None:
        """The supervisor sees it."""
        at_work = sorted(worker.name for worker in self.workers.values() if worker.awake and worker.hand)
        name = data.draw(st.sampled_from(at_work))
        self.workers[name].awake, self.workers[name].dead = False, True
        self._reclaimed({name}, self.pool.reclaim(name), died=True)

    @precondition(lambda self: any(self.workers[one.worker].awake for one in self.demands.values()))
    @rule(data=st.data())
    def die_with_an_order(self, data: st.DataObject) -> None:
        """Another worker can be ordered at once."""
        ordered = {one.worker: lane for lane, one in self.demands.items() if self.workers[one.worker].awake}
        name = data.draw(st.sampled_from(sorted(ordered)))
        self.workers[name].awake, self.workers[name].dead = False, True
        self._reclaimed({name}, self.pool.reclaim(name), died=True)
        self.snapshot = self.pool.snapshot()
        self._demand(ordered[name], data.draw(st.permutations(sorted(self.workers))))

    @precondition(lambda self: any(not worker.awake and not worker.dead for worker in self.workers.values()))
    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        frozen = sorted(worker.name for worker in self.workers.values() if not worker.awake and not worker.dead)
        self.workers[data.draw(st.sampled_from(frozen))].awake = True

    @rule()
    def lose_everything(self) -> None:
        """Redis restarts empty; gateways put again what has no answer, as new batches."""
        self._clear()
        self.pool.next_millisecond()  # a restart takes longer than that, so entries get other ids than before
        self.snapshot = RedisSnapshot()
        for worker in list(self.workers.values()):
            worker.known, worker.alone = False, ""
            if worker.dead:
                del self.workers[worker.name]
        for expected in self.replies.values():
            expected.clear()
        self.demands, self.orders = {}, {}
        for name, batch in list(self.batches.items()):
            del self.batches[name]
            self.named += 1
            self.batches[f"b{self.named}"] = replace(batch, attempt=1)
            self._put(f"b{self.named}")

    # What holds at any time.

    @invariant()
    def sound(self) -> None:
        snapshot = self.snapshot = self.pool.snapshot()
        assert snapshot.broken() == []
        held = set().union(*snapshot.lanes.values())
        assert held == snapshot.streams - snapshot.expiring, "a stream stays exactly as long as a worker holds its lane"
        assert {entry.name: entry.attempt for entry in snapshot.entries} == {
            name: batch.attempt for name, batch in self.batches.items()
        }
        assert {gateway: replies for gateway, replies in self.replies.items() if replies} == snapshot.replies
        assert {lane: (demand.worker, demand.until_ms) for lane, demand in self.demands.items()} == snapshot.demands
        assert self.orders == snapshot.orders
        assert not any(demand.worker not in snapshot.workers for demand in self.demands.values())
        for worker in self.workers.values():
            leased = {entry.key for entry in snapshot.entries if entry.worker == worker.name}
            has = {*keys(worker.hand), *snapshot.inbox.get(worker.name, ())}
            assert leased <= has, f"{worker.name} leases what it does not have"
            if worker.known:
                assert snapshot.lanes.get(worker.name, set()) == worker.lanes
        assert {str(entry.worker) for entry in snapshot.entries if entry.worker} <= set(self.workers)
        assert snapshot.workers <= set(self.workers)
        assert self._of_others() == self.theirs, "another installation lost or got something"

    def teardown(self) -> None:
        """Whatever happened: all that was asked is answered in the end, once, and nothing is left behind."""
        for worker in list(self.workers.values()):
            if worker.dead:
                self.pool.reclaim(worker.name)
                del self.workers[worker.name]
        last = self.pool.join("last", *LANES)
        for name in self.workers:
            self.pool.worker(name).leave(10)
        while got := last.take_inbox() or self.pool.next("last"):
            self.pool.next("last", *got, wanted=0)
        last.leave(ATTEMPTS_MAX)
        self.pool.worker("last").remove_lane("l0")
        answers = [answer for gateway in GATEWAYS for answer in self.pool.replies(gateway)]
        answered = [_answered(answer) for answer in answers]
        before = [_answered(answer) for replies in self.replies.values() for answer in replies]
        assert sorted(answered) == sorted([*self.batches, *before])
        left = set(self.pool.left()) - self.theirs.keys()
        assert left <= {self.pool.keys.of_installation.pools}


def _answered(answer: bytes) -> str:
    given_up = decode_reply(answer) if answer[0] in {1, 2} else None
    return given_up if isinstance(given_up, str) else answer.decode().split()[0]


@pytest.mark.state_machine
def test_the_exchange_loses_nothing_whatever_happens(server):
    others = Pool(server.address, server.name, "another")
    try:
        run(server, others)
    finally:
        others.close()


def run(server: Pool, others: Pool) -> None:
    run_state_machine_as_test(
        lambda: ExchangeMachine(server, others),  # type: ignore[arg-type]
        settings=machine_settings(
            max_examples=150,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
