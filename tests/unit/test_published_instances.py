"""What a worker publishes about its instances, and what gateways make of it: only changes travel, and none is lost."""

from __future__ import annotations

import random

from millstream.services.queue.worker_records import Fetched, RecordCache
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord
from millstream.workers.heartbeat import RECENT_MAX, RECENT_S, PublishedInstances


class _Redis:
    """The two keys of a worker, as the scripts write them."""

    def __init__(self) -> None:
        self.record = b""
        self.instances: dict[str, bytes] = {}
        self.published = PublishedInstances()
        self.stored = 0  # instances written so far

    def beat(self, instances: dict[str, InstanceRecord], now: float) -> None:
        records = tuple(instances.values())
        if self.published.count != len(self.instances):
            self.published.forget()
        changes = self.published.changes(records)
        if changes is not None:
            if changes.whole:
                self.instances.clear()
            for content_id, text in changes.fields.items():
                if text:
                    self.instances[content_id] = text.encode()
                else:
                    self.instances.pop(content_id, None)
            self.stored += len(changes.fields)
            self.published.stored(records, changes, now)
        head = WorkerRecord(
            id="w", pool="cpu", device="cpu", backend="onnxruntime", pid=1, host="here", started=now,
            **self.published.changed_lately(now)._asdict(),
        )  # fmt: skip
        self.record = head.model_dump_json().encode()


class _Gateway:
    """Reads the keys as ClusterState does."""

    def __init__(self) -> None:
        self.cache = RecordCache()
        self.fetched = 0  # instances read so far

    def read(self, redis: _Redis) -> WorkerRecord:
        need = self.cache.needed("w", redis.record)
        fetched = None
        if need.whole:
            fetched = Fetched(dict(redis.instances), whole=True)
        elif need.content_ids:
            fetched = Fetched({name: redis.instances.get(name) for name in need.content_ids}, whole=False)
        self.fetched += len(fetched.fields) if fetched else 0
        return self.cache.record("w", redis.record, fetched)


def _instance(number: int, **changed: object) -> InstanceRecord:
    given = {"content_id": f"m{number}:1:x", "model": f"m{number}", "version": 1, "state": State.READY}
    return InstanceRecord.model_validate(given | changed)


def _many(count: int) -> dict[str, InstanceRecord]:
    return {one.content_id: one for one in map(_instance, range(count))}


def _seen(record: WorkerRecord) -> dict[str, InstanceRecord]:
    return {one.content_id: one for one in record.instances}


def test_an_idle_instance_is_neither_written_nor_read_again() -> None:
    redis, gateway, instances = _Redis(), _Gateway(), _many(1000)
    redis.beat(instances, 0.0)
    assert _seen(gateway.read(redis)) == instances
    instances["m7:1:x"] = _instance(7, profile={1: 0.5})
    for second in range(1, 100):
        redis.beat(instances, float(second))
        assert _seen(gateway.read(redis)) == instances
    assert redis.stored == gateway.fetched == 1001
    assert len(redis.record) < 500


def test_an_unchanged_instance_is_the_same_object() -> None:
    redis, gateway, instances = _Redis(), _Gateway(), _many(3)
    redis.beat(instances, 0.0)
    first = gateway.read(redis)
    redis.beat(instances, 1.0)
    assert gateway.read(redis).instances is first.instances
    del instances["m1:1:x"]
    redis.beat(instances, 2.0)
    second = gateway.read(redis)
    assert _seen(second) == instances
    assert all(one is _seen(first)[one.content_id] for one in second.instances)


def test_every_reader_sees_every_change_however_seldom_it_reads() -> None:
    """Random changes, losses of Redis' data and readers: each read equals what was last published."""
    draw = random.Random(7)
    redis, instances, now = _Redis(), _many(20), 0.0
    gateways = [_Gateway() for _ in range(4)]
    redis.beat(instances, now)
    for _ in range(1500):
        now += draw.choice((0.0, 0.1, 1.0, RECENT_S + 0.1))
        for _ in range(draw.choice((0, 1, 3, RECENT_MAX + 10)) if draw.random() < 0.3 else draw.randrange(3)):
            one = _instance(draw.randrange(400), rows_max=draw.randrange(9))
            if draw.random() < 0.4:
                instances.pop(one.content_id, None)
            else:
                instances[one.content_id] = one
        if draw.random() < 0.02:
            redis.instances.clear()
        if draw.random() < 0.02:
            redis.published.forget()
        redis.beat(instances, now)
        for gateway in draw.sample(gateways, draw.randrange(3)):
            assert _seen(gateway.read(redis)) == instances


def test_an_instance_in_a_state_of_another_release_is_left_out() -> None:
    redis, gateway = _Redis(), _Gateway()
    redis.beat(_many(2), 0.0)
    redis.instances["m0:1:x"] = b'{"content_id": "m0:1:x", "model": "m0", "version": 1, "state": "dreaming"}'
    assert list(_seen(gateway.read(redis))) == ["m1:1:x"]
