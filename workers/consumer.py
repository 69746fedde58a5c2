"""A worker's side of the exchange: the scripts it calls, over blocking links. Commands in, leases out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from millstream.services.errors import Code, Failure
from millstream.services.process.spin_wait import Spin
from millstream.services.queue.blob import PARTS_AT_ONCE, is_last, read_command, write_commands
from millstream.services.queue.clock import RedisClock
from millstream.services.queue.consumer_link import CommandRefused, ConsumerLink
from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.url import RedisAddress
from millstream.workers.lease import Lease
from millstream.workers.reply_limits import LOSSES_MAX, refusal

_NO_GROUP = "NOGROUP"
_SCRIPTS = ("next", "add_lanes", "remove_lane", "recover", "pass_on", "beat", "reclaim", "give_back")
log = logging.getLogger("millstream.consumer")

BLOB_LIFE_MS = 60_000
ALONE_MS = 3_600_000
POOLS_LIFE_S = 86_400  # of the list of pools, after the last beat in any of them


class Finished(NamedTuple):
    """A run batch: its lease, its reply, and bytes that go to a blob key first."""

    lease: Lease
    reply: bytes
    blob: bytes


class Consumer:
    """Calls of one worker over one connection. Not shared between threads."""

    def __init__(
        self,
        address: RedisAddress,
        keys: PoolKeys,
        worker: str,
        clock: RedisClock,
        spin: Spin | None = None,
        on_refused: Callable[[], object] = lambda: None,
        on_unreadable: Callable[[], object] = lambda: None,
    ) -> None:
        """`clock`: is measured with every connection and beat. `spin`: how `receive_wait` waits; None: asleep.
        `on_refused`: Redis did not take the outputs of a batch. `on_unreadable`: a batch cannot be read, and is passed on.

        Raises Failure(UNAVAILABLE) when Redis cannot be reached.
        """
        self._on_refused = on_refused
        self._on_unreadable = on_unreadable
        self._keys = keys
        self._worker = worker
        self._clock = clock
        self._spin = spin or Spin(0)
        self._link = ConsumerLink(address)
        self._asked = 0.0  # when what comes next was asked for: it was leased after that
        try:
            for name in _SCRIPTS:
                self._link.call("SCRIPT", "LOAD", script(name).text)
            self._link.call("CLIENT", "SETNAME", worker)
            asked = time.monotonic()
            redis_time = self._link.call("TIME")
            clock.record_measurement(asked, time.monotonic(), redis_time)
            self.client_id = int(self._link.call("CLIENT", "ID"))
        except Failure:
            self._link.close()
            raise
        self._next_head = script_call("next", keys, (keys.inbox(worker), keys.lanes(worker)), worker)

    def send_next(self, finished: Sequence[Finished], in_hand: int, wanted: int) -> None:
        """Send replies, acknowledge, ask for `wanted` entries; read what comes with `receive_next`."""
        self._asked = time.monotonic()
        self._link.send(self._next(finished, in_hand, wanted, leave=False))

    def _next(
        self, finished: Sequence[Finished], in_hand: int, wanted: int, *, leave: bool
    ) -> tuple[bytes | str | int, ...]:
        words: list[bytes | str | int] = [*self._next_head, in_hand, wanted, int(leave), len(finished)]
        for lease, reply, blob in finished:
            outputs = b""
            if blob:
                outputs = self._keys.blob(f"reply-{lease.header.name}-{lease.attempt}")
                refused = self._leave(lease, outputs, blob)
                if refused is not None:
                    log.warning("the outputs of batch %s were not taken: %s", lease.header.name, refused.message)
                    reply = refusal(lease, self._worker, refused)
                    self._on_refused()
            inputs = self._keys.blob(lease.header.blob) if lease.header.blob else b""
            words += (lease.lane, lease.entry, lease.header.replies, reply, inputs, outputs)
        return tuple(words)

    def _leave(self, lease: Lease, key: bytes, blob: bytes) -> Failure | None:
        """Leave outputs in a blob; returns why Redis does not take them. Raises Failure when the connection is lost."""
        if lease.losses >= LOSSES_MAX:
            return Failure(Code.UNAVAILABLE, "the connection to Redis broke each time the outputs were sent")
        lease.losses += 1
        refused: CommandRefused | None = None
        on_their_way = 0
        for command in write_commands(key, blob, BLOB_LIFE_MS):
            self._link.send(command)
            on_their_way += 1
            if on_their_way == PARTS_AT_ONCE:
                refused, on_their_way = self._answers(on_their_way), 0
                if refused is not None:
                    break
        refused = refused or self._answers(on_their_way)
        lease.losses -= 1
        if refused is not None:
            self._link.call("DEL", key)
        return refused

    def _answers(self, count: int) -> CommandRefused | None:
        """Read answers; the first by which Redis refused."""
        first: CommandRefused | None = None
        for _ in range(count):
            try:
                self._link.receive()
            except CommandRefused as refused:
                # Its traceback would keep the outputs that were being sent.
                first = first or refused.with_traceback(None)
        return first

    def _blob(self, key: bytes) -> bytes:
        """What a blob holds; what there is of it where it has expired, or there is no memory for it."""
        parts: list[bytes] = []
        last = False
        while not last:
            got: list[bytes] = self._link.call(*read_command(key, len(parts)))
            parts += got
            last = not got or is_last(got)
        try:
            return b"".join(parts)
        except MemoryError:
            return b""

    def receive_next(self) -> list[Lease]:
        return self._leases(self._link.receive())

    def send_wait(self, finished: Sequence[Finished], wanted: int, timeout_s: float) -> None:
        """`send_next` for a worker with empty hands, which then blocks on its inbox: both leave in one write."""
        self._asked = time.monotonic()
        wait = ("BLMPOP", str(timeout_s), 1, self._keys.inbox(self._worker), "LEFT", "COUNT", wanted)
        self._link.send_both(self._next(finished, 0, wanted, leave=True), wait)

    def receive_wait(self) -> tuple[list[Lease], bool]:
        """What `send_wait` brought, after the timeout nothing; and whether it had been waiting for a worker."""
        spin, began = self._spin, time.perf_counter()
        waited = int(self._link.receive()) > 0
        got = self._link.receive(spin.seconds)
        leases = self._leases(got[1]) if got else []
        spin.waited(time.perf_counter() - began, sum(len(lease.header.rows) for lease in leases))
        return leases, waited

    def leftovers(self) -> list[Lease]:
        """What lies in the inbox now."""
        return self._leases(self._link.call("LPOP", self._keys.inbox(self._worker), 64) or ())

    def end(self, client_id: int) -> None:
        """End an earlier connection of ours that Redis may not know to be gone: it would be served what comes next."""
        try:
            # By its name, too: a Redis that was started again numbers its connections anew.
            if f"name={self._worker} ".encode() in self._link.call("CLIENT", "LIST", "ID", client_id):
                self._link.call("CLIENT", "KILL", "ID", client_id)
        except Failure as failure:  # not allowed to: then the time of its wait is the bound
            log.debug("connection %s could not be ended: %s", client_id, failure.message)

    def recover(self, known: Iterable[Lease]) -> list[Lease]:
        """After a lost connection: what this worker leases beside the `known`, since the answer that brought it was lost.

        The worker's inbox is emptied by it, and the worker is not idle.
        """
        keys = self._keys
        names = [name for lease in known for name in (lease.lane, lease.entry)]
        own = (keys.lanes(self._worker), keys.draining(self._worker), keys.inbox(self._worker))
        return self._leases(self._script("recover", own, self._worker, *names))

    def _leases(self, items: Iterable[Any]) -> list[Lease]:
        leases: list[Lease] = []
        for item in items:
            lane, entry, data, attempt, *tried = msgpack.unpackb(item, raw=True) if isinstance(item, bytes) else item
            try:
                lease = Lease(lane.decode(), entry, data, int(attempt), self._asked)
            except (ValueError, TypeError) as error:
                self._pass_on(lane.decode(), entry, tried[0] if tried else (), error)
                continue
            if lease.header.blob:
                lease.inline = memoryview(self._blob(self._keys.blob(lease.header.blob)))
            leases.append(lease)
        return leases

    def _pass_on(self, lane: str, entry: bytes, tried: Sequence[bytes], why: Exception) -> None:
        """Give a batch back at once that this worker cannot read: to another, or to its gateway when all have tried."""
        keys = self._keys
        passed = self._script("pass_on", (keys.stream(lane),), lane, entry, self._worker, *tried)
        where = "another worker has it now" if passed else "no worker can: its gateway is told"
        log.warning("batch %s of %s cannot be read (%s); %s", entry.decode(), lane, why, where)
        self._on_unreadable()

    def run_alone(self, lease: Lease) -> None:
        """Say that this lease runs now, and nothing beside it: should the worker die, it is known what killed it."""
        self._link.call("SET", self._keys.running(self._worker), lease.header.name, "PX", ALONE_MS)

    def ran_alone(self) -> None:
        """What `run_alone` said holds no more."""
        self._link.call("DEL", self._keys.running(self._worker))

    def add_lanes(self, lanes: Sequence[str]) -> None:
        """Serve these lanes from now on."""
        if lanes:
            own = (self._keys.lanes(self._worker), self._keys.draining(self._worker))
            self._script("add_lanes", own, self._worker, *lanes)

    def remove_lane(self, lane: str) -> None:
        """Lease no more entries of this lane. To be called again when none of it is leased any longer, to clean up."""
        keys = self._keys
        own = (keys.lanes(self._worker), keys.draining(self._worker), keys.stream(lane))
        self._script("remove_lane", own, self._worker, lane)

    def pending(self, lane: str) -> int:
        """Entries of a lane that nobody has acknowledged, delivered or not."""
        return int(self._link.call("XLEN", self._keys.stream(lane)))

    def leased(self, lane: str) -> bool:
        """Whether this worker has unacknowledged entries of a lane. Of one that others have tidied up it has none."""
        try:
            return bool(self._link.call("XPENDING", self._keys.stream(lane), "w", "-", "+", 1, self._worker))
        except Failure as failure:
            if _NO_GROUP not in failure.message:
                raise
            return False

    def beat(self, record: bytes, life_ms: int) -> bool:
        """Extend leases and publish the record. False: as far as Redis knows this worker holds nothing: hold again."""
        keys = self._keys
        own = (keys.workers, keys.record(self._worker), keys.lanes(self._worker))
        asked = time.monotonic()
        beat = ("EVALSHA", script("beat").sha, len(own), *own, self._worker, record, life_ms)
        known, *redis_time = self._link.call(*beat)
        self._clock.record_measurement(asked, time.monotonic(), redis_time)
        # Not in the script: these keys are the installation's, and may be on another shard than the pool's.
        pools = keys.of_installation.pools
        self._link.send_both(("SADD", pools, keys.pool), ("EXPIRE", pools, POOLS_LIFE_S))
        self._link.receive()
        self._link.receive()
        return bool(known)

    def announce(self) -> None:
        """Tell the gateways that this worker's record changed."""
        self.publish(f"worker:{self._keys.pool}")

    def give_back(self, running: Iterable[Lease]) -> int:
        """Put again for others what this worker leases beside the batches that it runs; returns how many."""
        keys = self._keys
        own = (keys.lanes(self._worker), keys.draining(self._worker), keys.inbox(self._worker))
        names = [lease.header.name for lease in running]
        return int(self._script("give_back", own, self._worker, *names))

    def leave(self, attempts_max: int, *, dying: bool = False) -> None:
        """Take this worker out; whatever it still leases is put again for others.

        `dying`: what it was running is answered, and the rest has no part in it: no attempt is used up.
        """
        self._script("reclaim", (), 0, attempts_max, self._worker, int(dying), int(dying))

    def publish(self, message: str) -> None:
        """Tell all gateways something (millstream.services.queue.keys)."""
        self._link.call("PUBLISH", self._keys.of_installation.changes, message)

    def _script(self, name: str, own_keys: tuple[bytes, ...], *arguments: bytes | str | int) -> Any:
        return self._link.call(*script_call(name, self._keys, own_keys, *arguments))

    def close(self) -> None:
        self._link.close()
