"""Workers that die, freeze, come back or lose their connection: what the queue does about it, on every installed
server.
"""

from __future__ import annotations

import pytest

from millstream.services.wire.batch import decode_reply
from millstream.workers.batches.consumer import Finished
from tests.kit.pool import ATTEMPTS_MAX, LEASE_MS, names


def test_a_reply_to_a_lost_lease_is_dropped(pool):
    pool.join("w", "m")
    pool.put("m", "b1", blob=b"tensors")
    [stale] = pool.next("w")
    pool.silence("w")
    assert pool.reclaim() == (1, 1, 0)
    assert pool.next("w", stale) == []
    assert pool.replies() == []
    assert pool.blob("b1") == b"tensors"
    pool.join("v", "m")
    [lease] = pool.next("v")
    assert (lease.header.name, lease.attempt) == ("b1", 2)
    pool.next("v", lease)
    pool.next("w", stale)
    assert pool.replies() == [b"b1 2 v"]


def test_a_reply_that_is_dropped_leaves_no_outputs_behind(pool):
    stale = pool.join("w", "m")
    pool.put("m", "b1")
    [lease] = pool.next("w")
    pool.silence("w")
    pool.reclaim()
    stale.send_next([Finished(lease, b"one", b"outputs")], 0, 0)
    stale.receive_next()
    assert pool.replies() == []
    assert not pool.redis.exists(pool.keys.blob("reply-b1-1"))


def test_only_silent_workers_are_reclaimed(pool):
    for worker in ("a", "b"):
        pool.join(worker, "m")
    pool.put("m", "b1")
    pool.next("a")
    assert pool.reclaim() == (0, 0, 0)
    pool.silence("a")
    pool.worker("a").beat(b"{}", LEASE_MS)
    assert pool.reclaim() == (0, 0, 0)
    pool.silence("b")
    assert pool.reclaim() == (1, 0, 0)
    snapshot = pool.check()
    assert (snapshot.workers, snapshot.leased("a"), snapshot.lanes) == ({"a"}, ["b1"], {"a": {"m"}})


def test_a_heartbeat_from_before_the_clock_was_set_back_ages_from_then_on(pool):
    pool.join("w", "m")
    pool.redis.zincrby(pool.keys.workers, 3_600_000, "w")
    assert pool.reclaim() == (0, 0, 0)
    seconds, microseconds = pool.redis.time()
    beat_ms = pool.redis.zscore(pool.keys.workers, "w")
    assert beat_ms <= seconds * 1000 + microseconds // 1000
    assert pool.reclaim() == (0, 0, 0)
    assert pool.redis.zscore(pool.keys.workers, "w") == beat_ms


def test_what_a_silent_worker_had_goes_to_an_idle_one_at_once(pool):
    pool.join("dead", "m")
    pool.put("m", "in hand")
    pool.next("dead")
    pool.next("dead")
    pool.put("m", "in its inbox")
    pool.join("idle", "m")
    pool.next("idle")
    pool.silence("dead")
    assert pool.reclaim() == (1, 2, 0)
    snapshot = pool.check()
    assert snapshot.leased("idle") == ["in hand"]
    assert snapshot.waiting() == ["in its inbox"]
    assert snapshot.workers == {"idle"}
    assert "dead" not in {
        consumer["name"].decode() for consumer in pool.redis.xinfo_consumers(pool.keys.stream("m"), "w")
    }


def test_workers_that_die_together_use_up_one_attempt(pool):
    for number in range(8):
        pool.join(f"w{number}", "m")
        pool.next(f"w{number}")
    pool.put("m", "b1")
    pool.silence(*(f"w{number}" for number in range(8)))
    assert pool.reclaim() == (8, 1, 0)
    assert [(entry.name, entry.attempt, entry.worker) for entry in pool.check().entries] == [("b1", 2, None)]


def test_a_batch_that_workers_fall_silent_with_is_given_up_in_the_end(pool):
    pool.put("m", "b1")
    for attempt in range(1, ATTEMPTS_MAX + 1):
        pool.join(f"w{attempt}", "m")
        [lease] = pool.next(f"w{attempt}")
        assert lease.attempt == attempt
        pool.silence(f"w{attempt}")
        last = attempt == ATTEMPTS_MAX
        assert pool.reclaim() == (1, 0 if last else 1, 1 if last else 0)
    assert [decode_reply(data) for data in pool.replies()] == ["b1"]
    assert pool.check().streams == set()


def test_what_a_worker_died_with_for_the_first_time_is_for_its_gateway_to_judge(pool):
    pool.put("m", "b1")
    pool.put("m", "b2", gateway="g1")
    pool.join("w", "m")
    assert len(pool.next("w")) == 2
    assert pool.reclaim("w") == (1, 0, 2)
    assert [[decode_reply(data) for data in pool.replies(gateway)] for gateway in ("g0", "g1")] == [["b1"], ["b2"]]


def test_of_suspects_the_one_that_ran_alone_is_at_fault(pool):
    for name in ("b1", "b2"):
        pool.put("m", name, attempt=2)
    worker = pool.join("w", "m")
    leases = pool.next("w")
    assert [lease.isolated for lease in leases] == [True, True]
    worker.run_alone(leases[1])
    assert pool.reclaim("w") == (1, 1, 1)
    assert [decode_reply(data) for data in pool.replies()] == ["b2"]
    assert [(entry.name, entry.attempt) for entry in pool.check().entries] == [("b1", 2)]
    assert not pool.redis.keys("*running*")


def test_where_it_is_known_what_ran_the_rest_is_no_suspect(pool):
    for name in ("b1", "b2", "b3"):
        pool.put("m", name)
    pool.join("w", "m")
    assert len(pool.next("w")) == 3
    assert pool.reclaim("w", ran=("b1", "b3")) == (1, 1, 2)
    assert [decode_reply(data) for data in pool.replies()] == ["b1", "b3"]
    assert [(entry.name, entry.attempt) for entry in pool.check().entries] == [("b2", 1)]
    pool.join("v", "m")
    assert names(pool.next("v")) == ["b2"]
    assert pool.reclaim("v", ran=()) == (1, 1, 0)
    assert [(entry.name, entry.attempt) for entry in pool.check().entries] == [("b2", 1)]


def test_a_suspect_that_ran_is_given_up_again_and_others_are_not(pool):
    for name in ("b1", "b2"):
        pool.put("m", name, attempt=2)
    pool.join("w", "m")
    assert len(pool.next("w")) == 2
    assert pool.reclaim("w", ran=("b2",)) == (1, 1, 1)
    assert [decode_reply(data) for data in pool.replies()] == ["b2"]


def test_a_worker_that_ends_itself_leaves_no_suspects(pool):
    worker = pool.join("w", "m")
    pool.put("m", "b1")
    assert len(pool.next("w")) == 1
    worker.leave(ATTEMPTS_MAX, dying=True)
    assert [(entry.name, entry.attempt) for entry in pool.check().entries] == [("b1", 1)]


def test_what_waits_behind_a_long_run_goes_to_others(pool):
    worker = pool.join("w", "m", "n")
    for number in range(150):
        pool.put("m", f"b{number:03}", fill=0)
    pool.put("n", "other")
    leased = pool.next("w", wanted=200)
    while (more := pool.next("w", wanted=200)) != []:
        leased += more
    assert len(leased) == 151
    running = [lease for lease in leased if lease.header.name == "b120"]
    pool.join("idle", "n")
    pool.next("idle")
    assert worker.give_back(running) == 150
    snapshot = pool.check()
    assert snapshot.leased("w") == ["b120"]
    assert snapshot.leased("idle") == ["other"]
    assert len(snapshot.waiting("m")) == 149
    assert {entry.attempt for entry in snapshot.entries} == {1}
    # It gives its reply to what it ran, and none to what is another's now.
    pool.next("w", *leased, wanted=0)
    assert pool.replies() == [b"b120 1 w"]


def test_a_worker_with_very_many_leases_loses_all_of_them(pool):
    pool.join("w", "m")
    for number in range(250):
        pool.put("m", f"b{number:03}", fill=0)
    assert len(pool.next("w", wanted=250)) == 250
    pool.silence("w")
    assert pool.reclaim() == (1, 250, 0)
    assert pool.check().waiting() == [f"b{number:03}" for number in range(250)]


def test_leases_of_lanes_that_a_worker_released_are_reclaimed_too(pool):
    worker = pool.join("w", "m")
    pool.put("m", "b1")
    pool.next("w")
    worker.remove_lane("m")
    pool.join("v", "m")
    pool.silence("w")
    assert pool.reclaim() == (1, 1, 0)
    assert names(pool.next("v")) == ["b1"]


def test_beats(pool):
    worker = pool.worker("w")
    assert not worker.beat(b'{"id": "w"}', 5000)
    assert pool.redis.get(pool.keys.record("w")) == b'{"id": "w"}'
    assert 0 < pool.redis.pttl(pool.keys.record("w")) <= 5000
    assert pool.redis.smembers(pool.keys.of_installation.pools) == {b"cpu"}
    assert not worker.beat(b"{}", 5000)  # it holds nothing yet, or what it held was lost on the way
    worker.add_lanes(["m"])
    assert worker.beat(b"{}", 5000)
    pool.silence("w")
    pool.reclaim()
    assert not worker.beat(b"{}", 5000)


def test_a_reclaimed_worker_must_hold_its_lanes_again_whatever_it_does_first(pool):
    worker = pool.join("w", "m", "n")
    pool.silence("w")
    pool.reclaim()
    assert pool.next("w") == []
    worker.add_lanes(["new"])
    assert not worker.beat(b"{}", LEASE_MS)


@pytest.mark.parametrize("first", ["hold", "next"])
def test_a_worker_that_dies_before_its_first_beat_is_reclaimed(pool, first):
    worker = pool.worker("w")
    if first == "hold":
        worker.add_lanes(["m"])
        pool.put("m", "b1")
        pool.next("w")
    else:
        pool.next("w")
        worker.add_lanes(["m"])
        pool.put("m", "b1")
    pool.check()
    pool.silence("w")
    assert pool.reclaim() == (1, 1, 0)
    snapshot = pool.check()
    assert (snapshot.idle, snapshot.lanes, snapshot.waiting()) == ({}, {}, ["b1"])


def test_leases_whose_answer_was_lost_with_the_connection_are_recovered(pool):
    worker = pool.join("w", "m", "n")
    for name in ("b1", "b2", "b3"):
        pool.put("m", name)
    leased = pool.next("w", wanted=1)
    worker.send_next([], 1, 4)
    pool.redis.ping()
    pool.lose_connection("w")
    worker = pool.worker("w")
    assert sorted(names(worker.recover(leased))) == ["b2", "b3"]
    assert pool.check().idle == {}
    assert worker.recover([]) != []


def test_recovering_takes_what_lies_in_the_inbox_once(pool):
    worker = pool.join("w", "m", "n")
    pool.next("w")
    pool.put("n", "b1")
    worker.remove_lane("n")
    [lease] = worker.recover([])
    assert (lease.lane, lease.header.name, lease.attempt) == ("n", "b1", 1)
    assert worker.take_inbox() == []
    assert pool.next("w", lease) == []
    assert pool.replies() == [b"b1 1 w"]
