"""A worker's calls to the queue in Redis, over a blocking link. Replies in, leases out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from millstream.services.errors import Code, Failure
from millstream.services.process.waits import Spin
from millstream.services.queue.blob import PARTS_AT_ONCE, is_last, read_command, write_commands
from millstream.services.queue.consumer_link import NOTHING, CommandRefused, ConsumerLink
from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.url import RedisAddress
from millstream.services.wire.batch import decode_batch, read_item
from millstream.workers.batches.lease import LOSSES_MAX, Lease, refusal
from millstream.workers.metrics import WorkerMetrics

_NO_GROUP = "NOGROUP"
_SCRIPTS = (
    "next", "add_lanes", "remove_lane", "release_lane", "lanes_in_use", "recover", "pass_on", "beat", "store_instances",
    "reclaim", "give_back", "running", "blame", "demand", "end_demand",
)  # fmt: skip
_BESIDE_MAIN_LOOP = -1  # instead of a number of entries: lease nothing, and leave an idle worker idle
log = logging.getLogger("millstream.consumer")

BLOB_LIFE_MS = 60_000
ALONE_MS = 3_600_000  # after which the note about the batch that runs alone expires
ATTACHED = 1000  # batches that an attached worker counts as leasing: every other idle worker is served before it
PROBES_READ_MAX = 4  # entries of a lane that `has_calls` reads; more than these are taken for calls
POOLS_LIFE_S = 86_400  # after the last beat in any pool, the list of pools expires


class Finished(NamedTuple):
    """A batch that was run, its reply, and the bytes to store in a blob key before the reply is sent (b"": none)."""

    lease: Lease
    reply: bytes
    blob: bytes


class OthersWait(NamedTuple):
    """What waits of other lanes during a long run.

    `calls`: for a worker like this. `leaves`: the run must leave this one to them. `behind`: a batch that it leased.
    """

    calls: bool
    leaves: bool
    behind: bool


class Consumer:
    """Calls of one worker over one connection. Not thread-safe.

    Raises Failure(UNAVAILABLE) when Redis cannot be reached.

    Args:
        clock: updated by every connection and every beat.
        spin: decides how long `receive_wait` busy-polls before it blocks; None: it blocks at once.
        reply_s_max: how long a reply may take; None: the address's.
        losses: counts batches that are lost; None: they are not counted.
    """

    def __init__(
        self,
        address: RedisAddress,
        keys: PoolKeys,
        worker: str,
        clock: RedisClock,
        spin: Spin | None = None,
        reply_s_max: float | None = None,
        losses: WorkerMetrics | None = None,
    ) -> None:
        self._losses = losses
        self._keys = keys
        self._worker = worker
        self._clock = clock
        self._spin = spin or Spin(0)
        self._link = ConsumerLink(address, reply_s_max)
        self._reply_s_max = reply_s_max or address.reply_s_max
        self._answer_due = 0.0  # when the answers to `send_wait` are overdue (monotonic)
        self._queued: bool | None = None  # the first answer to `send_wait`; None: not received yet
        self._requested_at = 0.0  # when the next entries were requested (monotonic); never after they were leased
        try:
            for name in _SCRIPTS:
                self._link.call("SCRIPT", "LOAD", script(name).text)
            self._link.call("CLIENT", "SETNAME", worker)
            sent = time.monotonic()
            redis_time = self._link.call("TIME")
            clock.record_measurement(sent, time.monotonic(), redis_time)
            self.client_id = int(self._link.call("CLIENT", "ID"))
        except Failure:
            self._link.close()
            raise
        self._next_head = script_call("next", keys, (keys.inbox(worker), keys.lanes(worker)), worker)

    def send_next(
        self, finished: Sequence[Finished], leased: int, wanted: int, used: Sequence[bytes | str] = ()
    ) -> None:
        """Send replies, acknowledge, and ask for up to `wanted` entries, which `receive_next` returns.

        Args:
            finished: batches that ran.
            leased: batches that the worker leases already: workers with fewer batches are served first.
            wanted: entries.
            used: run time that Redis does not know of (`RunTime.take`).
        """
        self._requested_at = time.monotonic()
        self._link.send(self._next(finished, leased, wanted, used, leave=False))

    def reply_beside_main_loop(self, finished: Sequence[Finished]) -> None:
        """Send replies and acknowledge, over a connection that is not the main loop's.

        A reply whose lease the main loop has ended, or ends later, is sent once: Redis drops the second.
        """
        self._link.call(*self._next(finished, 0, _BESIDE_MAIN_LOOP, leave=False))

    def _next(
        self,
        finished: Sequence[Finished],
        leased: int,
        wanted: int,
        used: Sequence[bytes | str] = (),
        *,
        leave: bool,
    ) -> tuple[bytes | str | int, ...]:
        words: list[bytes | str | int] = [*self._next_head, leased, wanted, int(leave), len(finished)]
        for lease, reply, blob in finished:
            outputs = b""
            if blob:
                outputs = self._keys.blob(f"reply-{lease.header.name}-{lease.attempt}")
                refused = self._store_outputs(lease, outputs, blob)
                if refused is not None:
                    log.warning("Redis refused the outputs of batch %s: %s", lease.header.name, refused.message)
                    reply = refusal(lease, self._worker, refused)
                    if self._losses is not None:
                        self._losses.reply_refused()
            inputs = self._keys.blob(lease.header.blob) if lease.header.blob else b""
            words += (lease.lane, lease.entry, lease.header.replies, reply, inputs, outputs)
        words += used
        return tuple(words)

    def _store_outputs(self, lease: Lease, key: bytes, blob: bytes) -> Failure | None:
        """Store outputs in a blob; returns why Redis refuses them, or None. Raises Failure for a lost connection."""
        if lease.losses >= LOSSES_MAX:
            return Failure(Code.UNAVAILABLE, "the connection to Redis broke each time the outputs were sent")
        lease.losses += 1
        refused: CommandRefused | None = None
        unanswered = 0
        for command in write_commands(key, blob, BLOB_LIFE_MS):
            self._link.send(command)
            unanswered += 1
            if unanswered == PARTS_AT_ONCE:
                refused, unanswered = self._read_answers(unanswered), 0
                if refused is not None:
                    break
        refused = refused or self._read_answers(unanswered)
        lease.losses -= 1
        if refused is not None:
            self._link.call("DEL", key)
        return refused

    def _read_answers(self, count: int) -> CommandRefused | None:
        """Read `count` answers; returns the first refusal, or None."""
        first: CommandRefused | None = None
        for _ in range(count):
            try:
                self._link.receive()
            except CommandRefused as refused:
                # The traceback would keep the outputs in memory.
                first = first or refused.with_traceback(None)
        return first

    def _read_blob(self, key: bytes) -> bytes:
        """Return the contents of a blob; less or nothing if it has expired, or there is no memory for it."""
        parts: list[bytes] = []
        last = False
        while not last:
            more: list[bytes] = self._link.call(*read_command(key, len(parts)))
            parts += more
            last = not more or is_last(more)
        try:
            return b"".join(parts)
        except MemoryError:
            return b""

    def receive_next(self) -> list[Lease]:
        """Return the leases that `send_next` asked for."""
        return self._leases(self._link.receive())

    def send_wait(
        self,
        finished: Sequence[Finished],
        wanted: int,
        timeout_s: float,
        leased: int = 0,
        used: Sequence[bytes | str] = (),
    ) -> None:
        """Send as `send_next` does, and block on the inbox, in one write.

        For a worker that leases nothing, or whose batches came directly; then `leased` is ATTACHED.
        """
        self._requested_at = time.monotonic()
        self._answer_due = self._requested_at + timeout_s + self._reply_s_max
        self._queued = None
        wait = ("BLMPOP", str(timeout_s), 1, self._keys.inbox(self._worker), "LEFT", "COUNT", wanted)
        self._link.send_both(self._next(finished, leased, wanted, used, leave=True), wait)

    def receive_wait(self) -> tuple[list[Lease], bool]:
        """Return the leases that `send_wait` asked for (none after the timeout), and whether batches were queued."""
        spin, began = self._spin, time.perf_counter()
        were_queued = int(self._link.receive()) > 0 if self._queued is None else self._queued
        popped = self._link.receive(spin.seconds)
        leases = self._leases(popped[1]) if popped else []
        spin.record_wait(time.perf_counter() - began, sum(len(lease.header.rows) for lease in leases))
        return leases, were_queued

    def try_receive_wait(self) -> tuple[list[Lease], bool] | None:
        """Return what `receive_wait` returns if it is there, else None. Only for a `pollable` consumer.

        Raises Failure(UNAVAILABLE) if it is overdue: a server that froze, or left the network, closes no connection.
        """
        if self._queued is None:
            queued = self._link.try_receive()
            if queued is NOTHING:
                self._check_due()
                return None
            self._queued = int(queued) > 0
        popped = self._link.try_receive()
        if popped is NOTHING:
            self._check_due()
            return None
        return self._leases(popped[1]) if popped else [], self._queued

    def _check_due(self) -> None:
        if time.monotonic() > self._answer_due:
            raise Failure(Code.UNAVAILABLE, f"Redis did not answer within {self._reply_s_max:g} s")

    @property
    def pollable(self) -> bool:
        """Whether `fileno` becomes readable with each answer."""
        return self._link.pollable

    def fileno(self) -> int:
        return self._link.fileno()

    def take_inbox(self) -> list[Lease]:
        """Empty the inbox and return its leases."""
        return self._leases(self._link.call("LPOP", self._keys.inbox(self._worker), 64) or ())

    def kill_connection(self, client_id: int) -> None:
        """Kill an earlier connection of this worker, which Redis might not know to be lost and send the next batch."""
        try:
            # Its name is compared, too: a restarted Redis numbers its connections from 1 again.
            if f"name={self._worker} ".encode() in self._link.call("CLIENT", "LIST", "ID", client_id):
                self._link.call("CLIENT", "KILL", "ID", client_id)
        except Failure as failure:  # Redis does not permit it: the connection lasts until its wait times out
            log.debug("connection %s could not be killed: %s", client_id, failure.message)

    def recover(self, known: Iterable[Lease]) -> list[Lease]:
        """Return the leases of this worker that are not in `known`: their answers were lost with the last connection.

        Empties the worker's inbox, and removes the worker from the idle workers.
        """
        keys = self._keys
        names = [name for lease in known for name in (lease.lane, lease.entry)]
        own = (keys.lanes(self._worker), keys.draining(self._worker), keys.inbox(self._worker))
        return self._leases(self._script("recover", own, self._worker, *names))

    def _leases(self, items: Iterable[Any]) -> list[Lease]:
        leases: list[Lease] = []
        for item in items:
            lane, entry, data, attempt, tried = read_item(item) if isinstance(item, bytes) else _unpacked(item)
            try:
                lease = Lease(lane, entry, data, attempt, self._requested_at)
            except (ValueError, TypeError) as error:
                self._pass_on(lane, entry, tried, error)
                continue
            if lease.header.blob:
                lease.inline = memoryview(self._read_blob(self._keys.blob(lease.header.blob)))
            leases.append(lease)
        return leases

    def _pass_on(self, lane: str, entry: bytes, tried: Sequence[str], why: Exception) -> None:
        """Pass a batch that this worker cannot read to another worker, or to its gateway when all have tried."""
        keys = self._keys
        passed = self._script("pass_on", (keys.stream(lane),), lane, entry, self._worker, *tried)
        next_step = "another worker tries" if passed else "no worker can: its gateway decides"
        log.warning("batch %s of %s cannot be read (%s); %s", entry.decode(), lane, why, next_step)
        if self._losses is not None:
            self._losses.batch_unreadable()

    def run_alone(self, lease: Lease) -> None:
        """Note in Redis that only this lease runs now: if the worker dies, this batch killed it."""
        self._link.call("SET", self._keys.running(self._worker), lease.header.name, "PX", ALONE_MS)

    def ran_alone(self) -> None:
        """Remove the note of `run_alone`."""
        self._link.call("DEL", self._keys.running(self._worker))

    def add_lanes(self, lanes: Sequence[str]) -> None:
        """Serve these lanes from now on; demands for them are met."""
        if lanes:
            own = (self._keys.lanes(self._worker), self._keys.draining(self._worker), self._keys.demands)
            self._script("add_lanes", own, self._worker, *lanes)

    def remove_lane(self, lane: str) -> None:
        """Lease no more entries of this lane. Call again when none of its entries is leased, to clean up."""
        keys = self._keys
        own = (keys.lanes(self._worker), keys.draining(self._worker), keys.stream(lane))
        self._script("remove_lane", own, self._worker, lane)

    def release_lane(self, lane: str, others_min: int) -> bool:
        """Stop serving a lane; False, without a change, if it is in use or fewer than `others_min` others serve it."""
        own = (self._keys.lanes(self._worker), self._keys.stream(lane))
        return bool(self._script("release_lane", own, self._worker, lane, others_min))

    def lanes_in_use(self, counted: Sequence[str], lanes: Sequence[str]) -> tuple[dict[str, int], set[str]]:
        """Return how many workers serve each of the `counted` lanes, and which of `lanes` have entries."""
        holders, used = self._script("lanes_in_use", (), len(counted), *counted, *lanes)
        return dict(zip(counted, map(int, holders), strict=True)), {lane.decode() for lane in used}

    def take_order(self, timeout_s: float) -> bytes | None:
        """Return the next order to this worker (wire.orders), after at most `timeout_s`; None: there is none."""
        popped = self._link.call("BLPOP", self._keys.orders(self._worker), str(timeout_s))
        return popped[1] if popped else None

    def demand(self, lane: str, life_ms: int, order: bytes) -> bool:
        """Give this worker an order, as a gateway does; False: another worker serves the lane or has such an order."""
        worker, _ = self._script("demand", (self._keys.demands,), lane, life_ms, order, self._worker)
        return bool(worker.decode() == self._worker)

    def end_demand(self, lane: str) -> None:
        """Let another worker be ordered to load the version: this worker does not load it."""
        self._script("end_demand", (self._keys.demands,), lane, self._worker)

    def pending(self, lane: str) -> int:
        """Return the number of unacknowledged entries of a lane, delivered or not."""
        return int(self._link.call("XLEN", self._keys.stream(lane)))

    def has_calls(self, lane: str) -> bool:
        """Return whether a lane has unacknowledged entries, delivered or not, that are no readiness probes."""
        entries = self._link.call("XRANGE", self._keys.stream(lane), "-", "+", "COUNT", PROBES_READ_MAX + 1)
        return len(entries) > PROBES_READ_MAX or not all(_is_probe(fields[1]) for _, fields in entries)

    def leased(self, lane: str) -> bool:
        """Return whether this worker leases entries of a lane. A lane whose stream was deleted has none."""
        try:
            return bool(self._link.call("XPENDING", self._keys.stream(lane), "w", "-", "+", 1, self._worker))
        except CommandRefused as refused:
            if refused.error_code != _NO_GROUP:
                raise
            return False

    def store_instances(self, fields: Mapping[str, str], life_ms: int, *, whole: bool) -> None:
        """Store the records of instances by content id; "" removes one. `whole`: there are no others."""
        pairs = [word for pair in fields.items() for word in pair]
        own = self._keys.instances(self._worker)
        self._link.call("EVALSHA", script("store_instances").sha, 1, own, life_ms, int(whole), *pairs)

    def beat(self, record: bytes, life_ms: int, instances: int = 0) -> bool:
        """Extend the leases and publish the record. Returns False if the worker must add its lanes again.

        `instances`: how many were stored. If Redis has lost them, `instances_stored` is False afterwards, and the
        record was not published.
        """
        keys = self._keys
        own = (keys.workers, keys.record(self._worker), keys.lanes(self._worker), keys.instances(self._worker))
        sent = time.monotonic()
        beat = ("EVALSHA", script("beat").sha, len(own), *own, self._worker, record, life_ms, instances)
        known, *redis_time, stored = self._link.call(*beat)
        self.instances_stored = bool(stored)
        self._clock.record_measurement(sent, time.monotonic(), redis_time)
        # Not in the script: this key is the installation's, and may be on another shard than the pool's keys.
        pools = keys.of_installation.pools
        self._link.send_both(("SADD", pools, keys.pool), ("EXPIRE", pools, POOLS_LIFE_S))
        self._link.receive()
        self._link.receive()
        return bool(known)

    def reply_address(self, gateway: str) -> bytes | None:
        """Return where a gateway takes replies of workers on other hosts (queue.reply_protocol); None: nowhere."""
        value: bytes | None = self._link.call("GET", self._keys.reply_address(gateway))
        return value

    def exchange_held(self, worker: str, held: bytes) -> dict[str, bytes]:
        """Store what models of keys with a quota take in a worker (b"": nothing), and return that of all workers.

        `worker`: its name, which stays the same when it is started again.
        """
        key = self._keys.of_installation.memory_taken
        told = ("HSET", key, worker, held) if held else ("HDEL", key, worker)
        self._link.send_both(told, ("HGETALL", key))
        self._link.receive()
        stored = iter(self._link.receive())
        self._link.call("EXPIRE", key, POOLS_LIFE_S)
        return {name.decode(): data for name, data in zip(stored, stored, strict=True)}

    def forget_held(self, workers: Sequence[str]) -> None:
        """Remove what workers stored with `exchange_held` that tell it no longer."""
        if workers:
            self._link.call("HDEL", self._keys.of_installation.memory_taken, *workers)

    def announce(self) -> None:
        """Publish that this worker's record changed."""
        self.publish(f"worker:{self._keys.pool}")

    def give_back(self, running: Iterable[Lease]) -> int:
        """Return to the queue all batches that this worker leases, except `running`; returns their number."""
        keys = self._keys
        own = (keys.lanes(self._worker), keys.draining(self._worker), keys.inbox(self._worker))
        names = [lease.header.name for lease in running]
        return int(self._script("give_back", own, self._worker, *names))

    def running(self, lane: str, seconds: float, long_ms: int, age_s: float, *, busy: bool, yields: bool) -> OthersWait:
        """Report a long run while it goes on.

        Args:
            lane: whose batches run.
            seconds: run time that the lane was not charged for yet.
            long_ms: how long the lane counts as one with long runs.
            age_s: how long the run has taken.
            busy: whether the worker is not idle, although Redis may take it for that because it is attached.
            yields: whether the run may be ended, to run again.
        """
        told = (lane, b"%.3f" % (seconds * 1000), long_ms, int(age_s * 1000), int(busy), int(yields))
        calls, behind = self._script("running", (), self._worker, *told)
        return OthersWait(calls > 0, calls > 1, behind > 0)

    def all_left(self, names: Sequence[str]) -> bool:
        """Return whether the callers of all these batches have gone."""
        keys = [self._keys.left(name) for name in names]
        return int(self._link.call("EXISTS", *keys)) == len(keys)

    def runs_no_longer(self) -> None:
        """Report the end of the run that `running` reported."""
        self._script("running", (), self._worker)

    def blame(self, lane: str, event: str, weight: float) -> None:
        """Count an event against a version, as gateways do (scripts/blame.lua), with this weight."""
        own = (self._keys.blamed, self._keys.counted(event))
        self._link.call("EVALSHA", script("blame").sha, len(own), *own, lane, b"%.3f" % weight)

    def leave(self, attempts_max: int, *, dying: bool = False) -> None:
        """Remove this worker from its pool, and return the batches that it leases to the queue.

        `dying`: the process ends, and the batch that it was running is answered. The other batches are not at fault,
        so they lose no attempt.
        """
        self._script("reclaim", (), 0, attempts_max, self._worker, int(dying), int(dying))

    def publish(self, message: str) -> None:
        """Publish an event to all gateways (millstream.services.queue.keys)."""
        self._link.call("PUBLISH", self._keys.of_installation.changes, message)

    def _script(self, name: str, own_keys: tuple[bytes, ...], *arguments: bytes | str | int) -> Any:
        return self._link.call(*script_call(name, self._keys, own_keys, *arguments))

    def close(self) -> None:
        self._link.close()


def _unpacked(item: Sequence[bytes]) -> tuple[str, bytes, bytes, int, tuple[str, ...]]:
    """Return a leased entry that a script returned, as `read_item` does."""
    lane, entry, data, attempt = item
    return lane.decode(), entry, data, int(attempt), ()


def _is_probe(data: bytes) -> bool:
    """Return whether a batch is a readiness probe. One that this release cannot read may be a call."""
    try:
        header, _ = decode_batch(data)
    except ValueError:
        return False
    return header.probe
