"""The queue's scripts as gateways and workers call them, on every installed Redis server."""

from __future__ import annotations

import asyncio
import threading

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.sharing import Share
from millstream.services.wire.batch import BatchHeader, BatchInput, encode_batch
from millstream.workers.batches.consumer import PROBES_READ_MAX, Consumer, Finished
from tests.kit.pool import ATTEMPTS_MAX, Pool, names
from tests.kit.wait import wait_until


def test_what_nobody_can_run_waits_and_goes_away_in_the_end(pool):
    assert pool.put("m", "b1", deadline_ms=5000) == 0
    snapshot = pool.check()
    assert snapshot.waiting("m") == ["b1"]
    assert snapshot.deadlines == {"m": 5000}
    assert 3600 < pool.redis.ttl(pool.keys.stream("m")) <= 3660


def test_what_nobody_can_run_is_withdrawn_by_its_gateway(pool):
    for name in ("b1", "b2"):
        pool.put("m", name)
    assert not pool.withdraw("m", "b0")
    assert pool.withdraw("m", "b1")
    assert pool.check().waiting() == ["b2"]
    assert pool.withdraw("m", "b2")
    assert pool.left() == []
    assert not pool.withdraw("m", "b2")


def test_what_a_worker_can_run_or_runs_is_not_withdrawn(pool):
    pool.join("w", "m")
    pool.put("m", "b1")
    assert not pool.withdraw("m", "b1")
    [lease] = pool.next("w")
    pool.worker("w").remove_lane("m")
    pool.put("m", "b2")
    assert not pool.withdraw("m", "b1")
    assert pool.withdraw("m", "b2")
    pool.next("w", lease, wanted=0)
    assert pool.replies() == [b"b1 1 w"]


def test_what_no_worker_has_of_a_refused_version_returns_to_its_gateway(pool):
    pool.join("w", "m")
    pool.next("w")
    assert pool.put("m", "b1") == 1
    for name in ("b2", "b3"):
        pool.put("m", name)
    [lease] = pool.wait("w")
    assert not pool.withdraw("m", "b1", refused=True), "a worker has it"
    assert pool.withdraw("m", "b2", refused=True)
    assert pool.replies() == [b"\2b2"]
    assert pool.check().waiting() == ["b3"]
    assert pool.withdraw("m", "b3", refused=True)
    assert pool.check().ready == {}
    assert pool.replies() == [b"\2b3"]
    pool.next("w", lease, wanted=0)
    assert pool.replies() == [b"b1 1 w"]


def test_what_nobody_waits_for_leaves_a_lane_without_workers(pool):
    """Its gateway could not withdraw it: a worker, dead already, had it at the time."""
    pool.join("w", "m")
    pool.put("m", "late", deadline_ms=1)
    pool.put("m", "early")
    assert names(pool.next("w")) == ["late", "early"]
    assert not pool.withdraw("m", "late")
    pool.silence("w")
    assert pool.reclaim() == (1, 2, 0)
    assert pool.replies() == [b"\2late"]
    assert pool.check().waiting() == ["early"]
    assert pool.reclaim() == (0, 0, 0)
    assert pool.replies() == []
    assert pool.withdraw("m", "early")
    pool.reclaim()
    assert pool.left() == [pool.keys.of_installation.pools]


def test_what_is_overdue_stays_where_a_worker_serves_or_leases_it(pool):
    pool.join("w", "m")
    for name in ("b1", "b2"):
        pool.put("m", name, deadline_ms=1)
    [lease] = pool.next("w", wanted=1)
    assert pool.reclaim() == (0, 0, 0)
    assert pool.check().waiting() == ["b2"]
    pool.worker("w").remove_lane("m")
    assert pool.reclaim() == (0, 0, 0)
    assert pool.replies() == [b"\2b2"]
    pool.next("w", lease, wanted=0)
    assert pool.replies() == [b"b1 1 w"]


def test_what_is_overdue_in_a_lane_is_removed_bit_by_bit(pool):
    late, now_ms = [f"b{n}" for n in range(12)], int(pool.redis.time()[0]) * 1000
    for name in late:
        pool.put("m", name, deadline_ms=1)
    pool.put("m", "just", deadline_ms=now_ms)
    left = []
    while waiting := pool.check().waiting()[:-1]:
        left.append(len(waiting))
        pool.reclaim()
    assert left == [12, 4]
    assert pool.replies() == [b"\2" + name.encode() for name in late]
    assert pool.check().waiting() == ["just"]


def test_what_waited_for_a_worker_is_there_for_the_first_that_comes(pool):
    pool.put("m", "b1")
    pool.put("m", "b2")
    pool.join("w", "m")
    assert pool.redis.ttl(pool.keys.stream("m")) == -1
    assert pool.check().waiting() == ["b1", "b2"]
    assert names(pool.next("w")) == ["b1", "b2"]
    assert pool.check().ready == {}


def test_an_idle_worker_gets_a_batch_at_once(pool):
    pool.join("w", "m")
    assert pool.next("w") == []
    assert pool.put("m", "b1") == 1
    snapshot = pool.check()
    assert (snapshot.idle, snapshot.ready, snapshot.leased("w")) == ({}, {}, ["b1"])
    [lease] = pool.wait("w")
    assert (lease.lane, lease.header.name, lease.attempt) == ("m", "b1", 1)
    assert pool.next("w", lease) == []
    assert pool.replies() == [b"b1 1 w"]
    assert pool.check().entries == []


def test_what_waited_comes_through_the_inbox_of_a_worker_that_would_block(pool):
    for name in ("b1", "b2", "b3"):
        pool.put("m", name)
    worker = pool.join("w", "m")
    worker.send_wait([], 2, 1)
    leases, waited = worker.receive_wait()
    assert (names(leases), waited) == (["b1", "b2"], True)
    assert pool.check().waiting() == ["b3"]
    assert names(pool.wait("w", *leases)) == ["b3"]
    assert pool.replies() == [b"b1 1 w", b"b2 1 w"]


def test_a_connection_that_redis_does_not_know_to_be_gone_takes_nothing(pool):
    """As when a cable was pulled: the old connection still blocks on the inbox."""
    old = pool.join("w", "m")
    old.send_wait([], 4, 300)
    wait_until(lambda: blocked(pool))
    new = Consumer(pool.address, pool.keys, "w", pool.clock)
    new.kill_connection(pool.redis.client_id())  # of another consumer: left alone
    new.kill_connection(old.client_id)
    wait_until(lambda: not blocked(pool))
    new.recover([])
    new.send_wait([], 4, 300)
    wait_until(lambda: blocked(pool))
    pool.put("m", "b1")
    assert names(new.receive_wait()[0]) == ["b1"]
    new.close()
    pool.lose_connection("w")


def test_an_idle_worker_that_nobody_wants_comes_back_after_its_time(pool):
    worker = pool.join("w", "m")
    worker.send_wait([], 4, 0.01)
    assert worker.receive_wait() == ([], False)
    assert "w" in pool.check().idle


def test_a_worker_that_blocks_is_woken(pool):
    pool.join("w", "m")
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.extend(names(pool.wait("w", timeout_s=300))))
    thread.start()
    while not blocked(pool):
        pass
    pool.put("m", "b1")
    thread.join(120)
    assert got == ["b1"]


def blocked(pool: Pool) -> int:
    return int(pool.redis.info("clients")["blocked_clients"])


def test_an_idle_worker_that_does_not_hold_the_lane_gets_nothing(pool):
    pool.join("w", "m")
    pool.next("w")
    assert pool.put("other", "b1") == 0
    assert "w" in pool.check().idle


def test_of_idle_workers_the_one_with_the_fewest_leases_comes_first(pool):
    for worker, leased in (("a", 1), ("b", 0)):
        pool.join(worker, "m")
        assert pool.next(worker, leased=leased) == []
    assert [pool.put("m", name) for name in ("b1", "b2", "b3")] == [1, 1, 0]
    snapshot = pool.check()
    assert (snapshot.leased("b"), snapshot.leased("a"), snapshot.waiting()) == (["b1"], ["b2"], ["b3"])


def test_a_worker_is_found_behind_many_idle_ones_that_do_not_hold_the_lane(pool):
    for number in range(70):
        pool.redis.zadd(pool.keys.idle, {f"a{number}": 0})
        pool.redis.zadd(pool.keys.workers, {f"a{number}": 1})
    pool.join("z", "m")
    pool.next("z")
    assert pool.put("m", "b1") == 1


def test_of_lanes_that_had_no_more_than_their_share_the_earliest_deadline_comes_first(pool):
    for lane, deadline in (("late", 9000), ("early", 1000), ("soon", 2000), ("not held", 10)):
        pool.put(lane, f"{lane} 1", deadline_ms=deadline)
        pool.put(lane, f"{lane} 2", deadline_ms=deadline + 4000)
    pool.join("w")
    pool.redis.sadd(pool.keys.lanes("w"), "late", "early", "soon")
    order = [names(pool.next("w", wanted=1)) for _ in range(6)]
    assert order == [["early 1"], ["soon 1"], ["late 1"], ["early 2"], ["soon 2"], ["late 2"]]
    assert pool.check().deadlines == {"not held": 10}


def test_very_many_lanes_that_wait_are_served_in_turn(pool):
    lanes = [f"l{number:03}" for number in range(300)]
    pool.join("w", *lanes)
    for number in range(2):
        for lane in lanes:
            pool.put(lane, f"{lane} {number}", cost_ms=5)
    assert sorted(take_turns(pool, 300)) == lanes
    assert sorted(take_turns(pool, 300)) == lanes


def take_turns(pool: Pool, number: int) -> list[str]:
    """The lanes that get the next so many runs."""
    return [lease.lane for _ in range(number) for lease in pool.next("w", wanted=1)]


def test_lanes_share_a_worker_by_the_time_that_they_run(pool):
    pool.join("w", "long", "short")
    for number in range(40):
        pool.put("long", f"long {number}", deadline_ms=1, cost_ms=9)
        pool.put("short", f"short {number}", deadline_ms=2, cost_ms=3)
    turns = take_turns(pool, 40)
    assert (turns.count("long"), turns.count("short")) == (10, 30)
    assert all("short" in turns[i : i + 2] for i in range(39))
    pool.check()


def test_a_lane_that_rarely_asks_does_not_wait_for_one_that_always_does(pool):
    pool.join("w", "flood", "rare")
    for number in range(100):
        pool.put("flood", f"flood {number}", deadline_ms=1, cost_ms=15)
    assert take_turns(pool, 20) == ["flood"] * 20
    for number in range(5):  # however late its deadline is
        pool.put("rare", f"rare {number}", deadline_ms=1e9, cost_ms=2)
        assert take_turns(pool, 3) == ["rare", "flood", "flood"]


def test_who_did_not_ask_for_long_saved_nothing(pool):
    pool.join("w", "a", "b")
    for number in range(100):
        pool.put("a", f"a {number}", cost_ms=10)
    take_turns(pool, 50)
    for number in range(100):
        pool.put("b", f"b {number}", cost_ms=10)
    turns = take_turns(pool, 20)
    assert (turns.count("a"), turns.count("b")) == (10, 10)


def test_lanes_that_are_not_ahead_are_forgotten_in_time_and_all_when_nothing_waits(pool):
    lanes = [f"l{number:03}" for number in range(200)]
    pool.join("w", *lanes)
    for lane in lanes:
        pool.put(lane, lane, cost_ms=500)
    take_turns(pool, 199)
    assert len(pool.check().vtimes) == 200
    for number in range(3):
        pool.put(lanes[0], f"again {number}", cost_ms=500)
    assert take_turns(pool, 4) == [lanes[-1], *lanes[:1] * 3]
    assert set(pool.check().vtimes) <= {"", lanes[0]}
    assert pool.next("w") == []
    assert pool.check().vtimes == {}


def test_a_lease_is_what_fits_into_one_run(pool):
    pool.join("w", "m")
    for number, fill in enumerate([1, 1, 0.4, 0.4, 0.4, 2, 0]):
        pool.put("m", f"b{number}", fill=fill)
    got = [names(pool.next("w")) for _ in range(5)]
    assert got == [["b0"], ["b1"], ["b2", "b3"], ["b4", "b5"], ["b6"]]  # b5 is met only when it is leased: it runs next


def test_a_held_lane_is_found_behind_many_ready_ones_that_are_not(pool):
    for number in range(150):
        pool.put(f"other {number}", f"b{number}", deadline_ms=number)
    pool.put("m", "mine", deadline_ms=1e6)
    pool.join("w", "m")
    assert names(pool.next("w")) == ["mine"]
    assert len(pool.check().ready) == 150


@pytest.mark.parametrize(("waiting", "workers", "taken"), [(3, 2, 2), (8, 2, 4), (1, 3, 1), (9, 1, 4)])
def test_a_worker_takes_no_more_than_its_part(pool, waiting, workers, taken):
    for number in range(waiting):
        pool.put("m", f"b{number}", deadline_ms=1000 + number)
    for number in range(workers):
        pool.join(f"w{number}", "m")
    assert names(pool.next("w0", wanted=4)) == [f"b{number}" for number in range(taken)]
    assert len(pool.check().waiting()) == waiting - taken


def test_a_reply_goes_to_the_gateway_that_asked_and_takes_the_blob_along(pool):
    worker = pool.join("w", "m")
    pool.put("m", "b1", gateway="g1", blob=b"tensors")
    pool.put("m", "b2", gateway="g2")
    leases = pool.next("w")
    assert [bytes(lease.inline) for lease in leases] == [b"tensors", b""]
    worker.send_next([Finished(leases[0], b"one", b"outputs"), Finished(leases[1], b"two", b"")], 0, 0)
    assert worker.receive_next() == []
    assert 0 < pool.redis.ttl(pool.keys.replies("g1")) <= 60
    assert (pool.replies("g1"), pool.replies("g2")) == ([b"one"], [b"two"])
    assert not pool.redis.exists(pool.keys.blob("b1"))
    assert (pool.blob("reply-b1-1"), 0 < pool.redis.ttl(pool.keys.blob("reply-b1-1")) <= 60) == (b"outputs", True)
    assert pool.check().entries == []


def test_a_worker_that_only_replies_is_not_idle(pool):
    pool.join("w", "m")
    pool.next("w")
    assert pool.next("w", wanted=0) == []
    assert pool.put("m", "b1") == 0


def test_the_last_holder_takes_an_empty_stream_with_it(pool):
    for worker in ("a", "b"):
        pool.join(worker, "m")
    pool.worker("a").remove_lane("m")
    assert pool.check().streams == {"m"}
    pool.worker("b").remove_lane("m")
    snapshot = pool.check()
    assert (snapshot.streams, snapshot.lanes, snapshot.draining) == (set(), {}, {})


def test_of_a_stream_that_another_took_with_it_a_worker_leases_nothing(pool):
    one, other = pool.join("a", "m"), pool.join("b", "m")
    one.remove_lane("m")
    other.remove_lane("m")
    assert pool.redis.exists(pool.keys.stream("m")) == 0
    assert (one.leased("m"), one.pending("m")) == (False, 0)


def test_a_stream_with_leases_goes_when_they_are_done(pool):
    worker = pool.join("w", "m")
    pool.put("m", "b1")
    [lease] = pool.next("w")
    worker.remove_lane("m")
    assert pool.check().draining == {"w": {"m"}}
    assert worker.leased("m")
    assert pool.redis.ttl(pool.keys.stream("m")) > 0
    assert pool.next("w", lease) == []
    assert (pool.replies(), worker.leased("m"), worker.pending("m")) == ([b"b1 1 w"], False, 0)
    worker.remove_lane("m")
    snapshot = pool.check()
    assert (snapshot.streams, snapshot.draining) == (set(), {})


def test_readiness_probes_in_a_lane_are_no_calls(pool):
    worker = pool.join("w", "m")
    worker.remove_lane("m")
    assert not worker.has_calls("m")
    for number in range(PROBES_READ_MAX):
        pool.put("m", f"probe {number}", probe=True)
    assert (worker.pending("m"), worker.has_calls("m")) == (PROBES_READ_MAX, False)
    pool.put("m", "beyond what is read", probe=True)
    assert worker.has_calls("m"), "it may be a call"


@pytest.mark.parametrize("entry", [b"", b"a batch that this release cannot read"])
def test_a_call_behind_a_readiness_probe_is_seen(pool, entry):
    worker = pool.join("w", "m")
    worker.remove_lane("m")
    pool.put("m", "probe", probe=True)
    pool.put("m", "call", entry=entry)
    assert worker.has_calls("m")


def test_a_released_lane_is_not_leased_from(pool):
    worker = pool.join("w", "m")
    pool.next("w")
    worker.remove_lane("m")
    assert pool.put("m", "b1") == 0
    assert pool.next("w") == []
    worker.add_lanes(["m"])
    assert names(pool.wait("w")) == ["b1"]


def test_an_idle_worker_that_takes_up_a_lane_gets_what_waits_in_it(pool):
    worker = pool.join("w")
    pool.put("m", "b1")
    pool.put("n", "b2")
    pool.put("n", "b3")
    assert pool.next("w") == []
    worker.add_lanes(["m", "n"])
    snapshot = pool.check()
    assert (snapshot.leased("w"), snapshot.waiting("n"), snapshot.idle) == (["b1"], ["b2", "b3"], {})
    assert names(worker.take_inbox()) == ["b1"]


def test_streams_that_expired_are_forgotten(pool):
    pool.put("m", "b1")
    pool.redis.delete(pool.keys.stream("m"))
    assert pool.reclaim() == (0, 0, 0)
    assert pool.check().ready == {}


def test_a_lane_heals_when_redis_evicted_its_stream(pool):
    pool.join("w", "m")
    pool.put("m", "gone")
    pool.redis.delete(pool.keys.stream("m"))
    assert pool.next("w") == []
    assert pool.check().ready == {}
    pool.redis.delete(pool.keys.stream("m"))
    assert pool.put("m", "b1") == 1
    assert names(pool.worker("w").take_inbox()) == ["b1"]
    assert pool.check().expiring == set()


def test_a_batch_that_cannot_be_read_holds_up_no_other(pool, caplog):
    pool.join("old", "m")
    pool.put("m", "b1", entry=b"\x05\0\0\0" + b"\x91\x63...")
    pool.put("m", "b2")
    assert names(pool.next("old")) == ["b2"]
    assert "cannot be read" in caplog.text
    assert pool.replies() == [b"\2b1"]
    pool.worker("old").leave(ATTEMPTS_MAX)


def test_nothing_is_left_when_all_is_done_and_all_have_left(pool):
    for number in range(5):
        pool.put("m" if number % 2 else "n", f"b{number}")
    for worker in ("a", "b"):
        pool.join(worker, "m", "n")
    for worker in ("a", "b", "a", "b"):
        pool.next(worker, *pool.next(worker), wanted=0)
    for worker in ("a", "b"):
        pool.worker(worker).leave(ATTEMPTS_MAX)
    assert len(pool.replies()) == 5
    assert pool.left() == [pool.keys.of_installation.pools]


def test_scripts_that_redis_forgot_are_loaded_with_the_next_connection(pool):
    pool.join("w", "m")
    pool.redis.script_flush()
    try:
        with pytest.raises(Failure, match="NOSCRIPT") as failure:
            pool.next("w")
        assert failure.value.code is Code.UNAVAILABLE
        pool.lose_connection("w")
        assert pool.next("w") == []
    finally:
        pool.load()
        pool.lose_connection("w")


def test_what_a_batch_costs_redis_does_not_grow_with_lanes_or_models(pool):
    def commands(lanes: int) -> int:
        pool.clear()
        pool.join("w", *(f"m{number}" for number in range(lanes)))
        for number in range(1, lanes):
            pool.put(f"m{number}", f"waits {number}", deadline_ms=1e9)
        pool.redis.config_resetstat()
        pool.put("m0", "b1", deadline_ms=1)
        [lease] = pool.next("w", wanted=1)
        pool.next("w", lease, wanted=0)
        return sum(row["calls"] for name, row in pool.redis.info("commandstats").items() if "config" not in name)

    assert commands(2) == commands(1000)


def test_a_batch_from_a_gateways_link_to_a_worker_and_back(pool):
    replies: list[bytes] = []

    async def serve() -> None:
        came, puts = asyncio.Event(), []

        def on_reply(data: bytes) -> None:
            replies.append(data)
            came.set()

        link = ProducerLink(
            pool.address, pool.keys, "gw", on_reply, lambda _: None, lambda name, answer: puts.append((name, answer))
        )
        await link.start()
        pool.join("w", "m")
        name = link.new_name()
        header = BatchHeader(name, link.replies_key, 0.0, [1], [1e12], [BatchInput((), 3, [3], None)], [], "")
        link.put("m", name, encode_batch(header, [b"abc"]), b"", 1e12, 1, Share(0.5, 0.25))
        await link.call("PING")
        assert puts == [(name, 0)]
        [lease] = await asyncio.to_thread(pool.next, "w")
        assert bytes(lease.inline) == b"abc"
        await asyncio.to_thread(pool.next, "w", lease, wanted=0)
        await came.wait()
        await link.stop()
        assert replies == [f"{name} 1 w".encode()]

    asyncio.run(asyncio.wait_for(serve(), 120))


def test_an_exchange_that_cannot_load_its_scripts_closes_its_connection(pool):
    pool.redis.config_set("requirepass", "x")
    try:
        with pytest.raises(Failure, match="NOAUTH"):
            Consumer(pool.address, pool.keys, "w", pool.clock)
    finally:
        pool.redis.config_set("requirepass", "")


def test_a_batch_that_a_worker_cannot_read_goes_to_another_at_once(pool):
    """It stayed leased for good: the worker that holds a lane may be of another release than the gateway that writes to
    it.
    """
    pool.join("a", "m")
    pool.join("b", "m")
    pool.join("c", "other")
    assert pool.next("b") == []  # idle, so it comes before those that are busy
    assert pool.put("m", "b1", entry=b"from the future") == 1
    assert pool.wait("b", timeout_s=0.01) == []
    snapshot = pool.check()
    assert (snapshot.leased("a"), snapshot.leased("b"), snapshot.waiting()) == (["b1"], [], [])
    assert pool.next("a") == []
    snapshot = pool.check()
    assert (snapshot.entries, snapshot.inbox) == ([], {})
    assert pool.replies() == [b"\2b1"]  # no worker is left: its gateway decides
    for worker in ("a", "b", "c"):
        pool.worker(worker).leave(ATTEMPTS_MAX)


def test_an_idle_worker_gets_what_another_cannot_read_and_a_lost_lease_is_nobodys_to_pass_on(pool):
    for worker in ("a", "busy", "idle"):
        pool.join(worker, "m")
    pool.put("m", "b1", entry=b"from the future")
    pool.redis.zadd(pool.keys.idle, {"idle": 0})
    assert pool.next("a") == []
    assert pool.check().leased("idle") == ["b1"]
    entry = pool.check().entries[0].id
    lost = pool.worker("busy")._script("pass_on", (pool.keys.stream("m"),), "m", entry, "busy")
    assert lost == 0
    assert pool.check().leased("idle") == ["b1"]
    pool.redis.delete(pool.keys.inbox("idle"))
    for worker in ("a", "busy", "idle"):
        pool.worker(worker).leave(ATTEMPTS_MAX)


def test_a_batch_whose_gateway_reads_no_reply_of_ours_is_passed_on(pool):
    header = BatchHeader("b1", pool.keys.replies("g0"), 0.0, [1], [1e12], [], [], "", reply_formats=(99,))
    pool.join("a", "m")
    pool.put("m", "b1", entry=encode_batch(header, []))
    assert pool.next("a") == []
    assert pool.replies() == [b"\2b1"]
    pool.worker("a").leave(ATTEMPTS_MAX)
