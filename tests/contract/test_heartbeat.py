"""What a worker's heartbeat writes to Redis, on every installed server."""

from __future__ import annotations

import threading

from millstream.services.wire.records import InstanceRecord, State
from millstream.workers.batches.consumer import Consumer
from millstream.workers.batches.lease import LeaseValidity
from millstream.workers.heartbeat import Heartbeat
from millstream.workers.models.record_parts import BeatSignal
from tests.kit.catalog import worker
from tests.kit.pool import ATTEMPTS_MAX, Pool
from tests.kit.wait import wait_until

NAME = "beating"


class Served:
    """One lane."""

    changing_lanes = threading.Lock()

    def lanes(self) -> dict[str, object]:
        return {"m": None}


def test_lanes_are_held_again_over_a_new_connection(pool: Pool) -> None:
    """It may lead to a replica that became the master before it was told of the lane: the record is there, though."""
    held = pool.keys.lanes(NAME)
    signal = BeatSignal()
    heartbeat = Heartbeat(
        lambda: Consumer(pool.address, pool.keys, NAME, pool.clock),
        lambda: worker(name=NAME),
        Served(),
        LeaseValidity(120.0),
        signal,
    )
    heartbeat.start()
    wait_until(lambda: pool.redis.smembers(held) == {b"m"}, what="held")
    pool.redis.sadd(held, "an earlier one")
    pool.redis.srem(held, "m")
    for connection in pool.redis.client_list():
        if connection["name"] == NAME:
            pool.redis.client_kill_filter(_id=connection["id"])
    signal.now()
    wait_until(lambda: b"m" in pool.redis.smembers(held), what="held again")
    assert pool.redis.exists(pool.keys.record(NAME))
    heartbeat.stop()
    pool.worker(NAME).leave(ATTEMPTS_MAX)
    pool.lose_connection(NAME)


def test_instances_that_redis_lost_are_published_again(pool: Pool) -> None:
    """One at a time: the record, and the instances, are not there without each other for a reader."""
    ready = worker(name=NAME).model_copy(update={"instances": tuple(map(_instance, range(30)))})
    signal = BeatSignal()
    heartbeat = Heartbeat(
        lambda: Consumer(pool.address, pool.keys, NAME, pool.clock),
        lambda: ready,
        Served(),
        LeaseValidity(120.0),
        signal,
    )
    heartbeat.start()
    wait_until(lambda: pool.redis.exists(pool.keys.record(NAME)), what="published")
    assert len(pool.redis.get(pool.keys.record(NAME))) < 1000
    assert pool.redis.hlen(pool.keys.instances(NAME)) == 30
    for lost in (pool.keys.instances(NAME), pool.keys.record(NAME)):
        pool.redis.delete(lost)
        signal.now()
        wait_until(lambda lost=lost: pool.redis.exists(lost), what="published again")  # type: ignore[misc]
        assert pool.redis.hlen(pool.keys.instances(NAME)) == 30
        assert 0 < pool.redis.pttl(pool.keys.instances(NAME)) <= 240_000
    heartbeat.stop()
    pool.worker(NAME).leave(ATTEMPTS_MAX)
    assert not pool.redis.exists(pool.keys.instances(NAME))
    pool.lose_connection(NAME)


def _instance(number: int) -> InstanceRecord:
    return InstanceRecord(content_id=f"m:{number}:x", model="m", version=number, state=State.READY)


def test_progress_is_published_soon_and_a_change_at_once(pool: Pool) -> None:
    published = worker(name=NAME)
    signal = BeatSignal()
    heartbeat = Heartbeat(
        lambda: Consumer(pool.address, pool.keys, NAME, pool.clock),
        lambda: published,
        Served(),
        LeaseValidity(20_000.0),
        signal,
    )
    heartbeat.start()
    wait_until(lambda: pool.redis.exists(pool.keys.record(NAME)), what="published")
    for number, ask in enumerate((signal.soon, signal.now, signal.soon)):
        published = published.model_copy(update={"used_bytes": number + 1})
        ask()
        text = b'"used_bytes":%d' % (number + 1)
        wait_until(lambda text=text: text in pool.redis.get(pool.keys.record(NAME)), what="published again")  # type: ignore[misc]
    heartbeat.stop()
    pool.worker(NAME).leave(ATTEMPTS_MAX)
    pool.lose_connection(NAME)
