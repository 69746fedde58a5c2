"""A pool in a real Redis: the calls of gateways and workers, and a snapshot of its keys that checks the invariants.

put, reclaim (scripts of gateways) ── worker(name) -> Consumer ── snapshot() -> RedisSnapshot ── broken()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from millstream.services.queue.blob import write_commands
from millstream.services.queue.consumer_link import ConsumerLink
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.url import RedisAddress, client
from millstream.services.wire.batch import BatchHeader, encode_batch, read_item
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.lease import Lease

LEASE_MS = 60_000  # no test lasts that long: tests call `silence` instead of waiting
ATTEMPTS_MAX = 3


Key = tuple[str, str]  # an entry's lane and id


class Entry(NamedTuple):
    """An entry of a stream; `worker` leases it, or None. Entries of two streams may have the same id."""

    lane: str
    id: str
    name: str
    attempt: int
    worker: str | None

    @property
    def key(self) -> Key:
        return self.lane, self.id


@dataclass
class RedisSnapshot:
    """All keys of a pool at one moment.

    `called`, `called_long`, `long` and `held` are what the scripts know of calls and long runs.
    `expiring` are streams that have an expiry; `others` are keys of no known kind. `demands` are the ordered worker of
    each lane, and until when in milliseconds on the Redis clock.
    """

    entries: list[Entry] = field(default_factory=list)
    streams: set[str] = field(default_factory=set)
    expiring: set[str] = field(default_factory=set)
    ready: dict[str, float] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    vtimes: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)
    lanes: dict[str, set[str]] = field(default_factory=dict)
    draining: dict[str, set[str]] = field(default_factory=dict)
    inbox: dict[str, list[Key]] = field(default_factory=dict)
    replies: dict[str, list[bytes]] = field(default_factory=dict)
    demands: dict[str, tuple[str, float]] = field(default_factory=dict)
    orders: dict[str, list[bytes]] = field(default_factory=dict)
    called: dict[str, float] = field(default_factory=dict)
    called_long: dict[str, float] = field(default_factory=dict)
    long: dict[str, float] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)

    def waiting(self, lane: str | None = None) -> list[str]:
        """Return the names of batches that no worker leases, in order."""
        return [entry.name for entry in self.entries if entry.worker is None and lane in {None, entry.lane}]

    def leased(self, worker: str | None = None) -> list[str]:
        """Return the names of batches that `worker` leases, or any worker if it is None."""
        return [entry.name for entry in self.entries if entry.worker and worker in {None, entry.worker}]

    def broken(self) -> list[str]:
        """Return descriptions of violated invariants, which hold after every script whatever happened before."""
        undelivered = {entry.lane for entry in self.entries if entry.worker is None}
        lanes, draining = self.lanes, self.draining
        found = [f"in `ready` are {sorted(self.ready)}, but {sorted(undelivered)} have undelivered entries"]
        if set(self.ready) == undelivered:
            found = []
        if set(self.ready) != set(self.deadlines):
            found.append(f"in `ready` are {sorted(self.ready)}, in `deadlines` {sorted(self.deadlines)}")
        for worker in self.idle:
            waits = lanes.get(worker, set()) & undelivered
            # A lane with long runs may be kept from it; when it no longer is, the next call of `next` finds out.
            found += [f"{worker} is idle while {lane} waits" for lane in sorted(waits - self.long.keys())]
            found += [f"{worker} is idle with a full inbox"] if self.inbox.get(worker) else []
        for kind, owners in (
            ("is idle", self.idle),
            ("serves a lane", lanes),
            ("drains", draining),
            ("has an inbox", self.inbox),
            ("has a long run", self.held),
        ):
            found += [
                f"{worker} {kind} and no gateway would reclaim it" for worker in owners if worker not in self.workers
            ]
        leases = {entry.key: entry for entry in self.entries if entry.worker is not None}
        for entry in leases.values():
            worker = str(entry.worker)
            if worker not in self.workers or entry.lane not in lanes.get(worker, set()) | draining.get(worker, set()):
                found.append(f"no gateway would reclaim {entry}")
        for worker, keys in self.inbox.items():
            found += [f"{key} is in the inbox of {worker}" for key in keys if leases[key].worker != worker]
        doubled = Counter(entry.name for entry in self.entries)
        return found + [f"{name} is {count} times there" for name, count in doubled.items() if count > 1]


class Pool:
    """One pool in a Redis of the test. Worker connections are reused by the next test on the same server."""

    def __init__(self, address: RedisAddress, name: str = "cpu", installation: str = "test") -> None:
        self.address = address
        self.name = name
        self.keys = InstallationKeys(installation).pool(name)
        self.clock = RedisClock()
        self.redis: Any = client(address)
        self._link = ConsumerLink(address)
        self._consumers: dict[str, Consumer] = {}
        self.load()

    def load(self) -> None:
        """Load the gateways' scripts into Redis."""
        for scripted in ("put", "reclaim", "withdraw", "demand", "end_demand"):
            self._link.call("SCRIPT", "LOAD", script(scripted).text)

    def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()
        self._link.close()
        self.redis.close()

    def clear(self) -> None:
        self.redis.flushall()

    def next_millisecond(self) -> None:
        """Wait until the Redis clock has advanced by at least one millisecond."""

        def clock() -> int:
            seconds, micros = self.redis.time()
            return int(seconds) * 1000 + int(micros) // 1000

        now = clock()
        while clock() == now:
            pass

    # Calls of a gateway.

    def put(
        self,
        lane: str,
        name: str,
        *,
        deadline_ms: float = 1e13,  # in some three hundred years
        gateway: str = "g0",
        attempt: int = 1,
        blob: bytes = b"",
        entry: bytes = b"",
        cost_ms: float = 1,
        fill: float = 0.25,
        probe: bool = False,
        long_ms: int = 0,
    ) -> int:
        """Put a batch of one request without tensors; return 1 if an idle worker got it at once, else 0."""
        replies = self.keys.replies(gateway)
        header = BatchHeader(name, replies, 0.0, [1], [deadline_ms], [], [], name if blob else "", probe)
        if blob:
            for command in write_commands(self.keys.blob(name), blob, LEASE_MS):
                self._link.call(*command)
        delivered = self._link.call(
            *script_call(
                "put", self.keys, (self.keys.stream(lane),), lane,
                entry or encode_batch(header, []), attempt, b"%d" % deadline_ms, replies, name, str(cost_ms), str(fill),
                int(not probe), long_ms,
            )
        )  # fmt: skip
        return int(delivered)

    def reclaim(
        self, worker: str = "", attempts_max: int = ATTEMPTS_MAX, ran: tuple[str, ...] | None = None
    ) -> tuple[int, int, int]:
        """Reclaim the batches of silent workers, or of `worker`, which is known to be dead.

        Returns (workers removed, batches put again, batches given up). `ran` are the batches that the dead worker was
        running; None: unknown.
        """
        known: tuple[str | int, ...] = () if ran is None else (1, *ran)
        got = self._link.call(
            *script_call("reclaim", self.keys, (), LEASE_MS, attempts_max, worker, int(bool(worker)), *known)
        )
        return cast("tuple[int, int, int]", tuple(got))

    def withdraw(self, lane: str, name: str, *, refused: bool = False) -> bool:
        """Withdraw a batch; return whether it was removed. `refused`: because its version is refused."""
        keys = self.keys
        got = self._link.call(*script_call("withdraw", keys, (keys.stream(lane),), lane, name, int(refused)))
        return bool(got)

    def callers_left(self, name: str) -> None:
        """Tell that all callers of a batch have gone, as its gateway does."""
        self._link.call("SET", self.keys.left(name), "1", "PX", 60_000)

    def demand(self, lane: str, *workers: str, life_ms: int = 60_000, order: bytes = b"{}") -> tuple[str, bool]:
        """Order one of `workers` to load a version; return the worker that is ordered, and whether it was now."""
        got = self._link.call(*script_call("demand", self.keys, (self.keys.demands,), lane, life_ms, order, *workers))
        return got[0].decode(), bool(got[1])

    def end_demand(self, lane: str, worker: str) -> bool:
        """End the demand of a lane as a worker does; return whether it was the worker's."""
        return bool(self._link.call(*script_call("end_demand", self.keys, (self.keys.demands,), lane, worker)))

    def expire_demand(self, lane: str) -> None:
        """Let the life of a demand pass, without waiting for it."""
        worker = self.redis.hget(self.keys.demands, lane).rpartition(b" ")[0]
        self.redis.hset(self.keys.demands, lane, worker + b" 1")

    def orders(self, worker: str) -> list[bytes]:
        """Remove the orders of a worker and return them."""
        taken: list[bytes] = self.redis.lpop(self.keys.orders(worker), 10_000) or []
        return taken

    def blob(self, name: str) -> bytes:
        """Return the contents of a blob; b"" if it does not exist."""
        return b"".join(self.redis.lrange(self.keys.blob(name), 0, -1))

    def replies(self, gateway: str = "g0") -> list[bytes]:
        """Remove the replies in a gateway's list and return them."""
        taken: list[bytes] = self.redis.lpop(self.keys.replies(gateway), 10_000) or []
        return taken

    # Calls of workers.

    def worker(self, name: str) -> Consumer:
        if name not in self._consumers:
            self._consumers[name] = Consumer(self.address, self.keys, name, self.clock)
        return self._consumers[name]

    def lose_connection(self, name: str) -> None:
        """Close the connection of a worker; the next `worker(name)` opens another."""
        self._consumers.pop(name).close()

    def join(self, name: str, *lanes: str) -> Consumer:
        """Return a worker that has sent a heartbeat and serves `lanes`."""
        consumer = self.worker(name)
        consumer.beat(b"{}", LEASE_MS)
        consumer.add_lanes(lanes)
        return consumer

    def next(
        self,
        name: str,
        *finished: Lease,
        leased: int = 0,
        wanted: int = 4,
        sent: Collection[Key] = (),
        used: Mapping[str, tuple[float, int]] | None = None,
    ) -> list[Lease]:
        """Acknowledge leases, with a reply for those whose reply was not `sent` before, and return further ones.

        `used`: lane -> run time that it was not charged for, how long it counts as one with long runs; in ms.
        """
        consumer = self.worker(name)
        told = [str(word) for lane, times in (used or {}).items() for word in (lane, *times)]
        consumer.send_next(_finished(name, finished, sent), leased, wanted, told)
        return consumer.receive_next()

    def wait(
        self, name: str, *finished: Lease, wanted: int = 4, timeout_s: float = 1, sent: Collection[Key] = ()
    ) -> list[Lease]:
        """Do as `next` does, and block on the inbox, as a worker without leases does; return the leases."""
        consumer = self.worker(name)
        consumer.send_wait(_finished(name, finished, sent), wanted, timeout_s)
        return consumer.receive_wait()[0]

    def silence(self, *names: str) -> None:
        """Set the last heartbeat of these workers to long ago."""
        for name in names:
            self.redis.zadd(self.keys.workers, {name: 1}, xx=True)

    # State.

    def snapshot(self) -> RedisSnapshot:
        snapshot = RedisSnapshot()
        prefix = self.keys.prefix.decode()
        tag = b"ms:*:{%s[:}]*" % self.keys.of_installation.installation.encode()
        found = sorted(key.decode() for key in self.redis.keys(tag))
        pipeline = self.redis.pipeline(transaction=False)
        read = {
            "stream": lambda key: (
                pipeline.ttl(key),
                pipeline.xrange(key),
                pipeline.xpending_range(key, "w", "-", "+", 9999),
            ),
            "ready": lambda key: pipeline.zrange(key, 0, -1, withscores=True),
            "deadlines": pipeline.hgetall,
            "vtimes": lambda key: pipeline.zrange(key, 0, -1, withscores=True),
            "idle": lambda key: pipeline.zrange(key, 0, -1, withscores=True),
            "called": lambda key: pipeline.zrange(key, 0, -1, withscores=True),
            "called_long": lambda key: pipeline.zrange(key, 0, -1, withscores=True),
            "long": lambda key: pipeline.zrange(key, 0, -1, withscores=True),
            "held": pipeline.hgetall,
            "workers": lambda key: pipeline.zrange(key, 0, -1),
            "lanes": pipeline.smembers,
            "draining": pipeline.smembers,
            "inbox": lambda key: pipeline.lrange(key, 0, -1),
            "replies": lambda key: pipeline.lrange(key, 0, -1),
            "demands": pipeline.hgetall,
            "orders": lambda key: pipeline.lrange(key, 0, -1),
        }
        kinds = [(key, *key.removeprefix(prefix).partition(":")[::2]) for key in found]
        for key, kind, _ in kinds:
            read.get(kind, lambda _: None)(key)
        answers = iter(pipeline.execute(raise_on_error=False))
        for key, kind, name in kinds:
            if kind == "stream":
                snapshot.streams.add(name)
                if next(answers) >= 0:
                    snapshot.expiring.add(name)
                snapshot.entries += _entries(name, next(answers), next(answers))
            elif kind in read:
                setattr(snapshot, kind, _merged(kind, name, next(answers), getattr(snapshot, kind)))
            else:
                snapshot.others.add(key)
        return snapshot

    def left(self) -> list[bytes]:
        """Return all keys but those that tell, for some seconds, which lanes were called or had long runs."""
        lately = {self.keys.prefix + name for name in (b"called", b"called_long", b"long")}
        keys: list[bytes] = self.redis.keys()
        return [key for key in keys if key not in lately]

    def check(self) -> RedisSnapshot:
        """Return the current state. Raises AssertionError if it violates an invariant."""
        snapshot = self.snapshot()
        assert snapshot.broken() == [], snapshot
        return snapshot


def reply(lease: Lease, worker: str) -> bytes:
    """Return the reply of a worker: its name, the batch and the attempt."""
    return f"{lease.header.name} {lease.attempt} {worker}".encode()


def _finished(worker: str, leases: Sequence[Lease], sent: Collection[Key]) -> list[Finished]:
    return [
        Finished(lease, b"" if key in sent else reply(lease, worker), b"")
        for lease, key in zip(leases, keys(leases), strict=True)
    ]


def keys(leases: Iterable[Lease]) -> list[Key]:
    return [(lease.lane, lease.entry.decode()) for lease in leases]


def names(leases: Iterable[Lease]) -> list[str]:
    return [lease.header.name for lease in leases]


def _key(lane: str, id_: bytes, *_: object) -> Key:
    return lane, id_.decode()


def _entries(lane: str, entries: Any, pending: Any) -> list[Entry]:
    # Without a group there are no leases.
    leased = {} if isinstance(pending, Exception) else {row["message_id"]: row["consumer"].decode() for row in pending}
    return [
        Entry(lane, id_.decode(), fields[b"b"].decode(), int(fields[b"a"]), leased.get(id_)) for id_, fields in entries
    ]


def _merged(kind: str, name: str, answer: Any, known: Any) -> Any:
    if kind == "held":
        return {worker.decode(): lane.decode() for worker, lane in answer.items()}
    if kind in {"ready", "vtimes", "idle", "called", "called_long", "long"}:
        return {member.decode(): score for member, score in answer}
    if kind == "deadlines":
        return {lane.decode(): float(deadline) for lane, deadline in answer.items()}
    if kind == "demands":
        pairs = {lane.decode(): known.decode().rpartition(" ") for lane, known in answer.items()}
        return {lane: (worker, float(until)) for lane, (worker, _, until) in pairs.items()}
    if kind == "workers":
        return {member.decode() for member in answer}
    if kind in {"lanes", "draining"}:
        return known | {name: {lane.decode() for lane in answer}}
    if kind == "inbox":
        return known | {name: [_key(*read_item(item)) for item in answer]}
    return known | {name: answer}
