"""How the scripts share workers by run time: what a lane is charged for, what lanes with long runs leave to others."""

from __future__ import annotations

from millstream.services.queue.sharing import LONG_LIFE_MS_MAX, LONG_RUNS, LONG_S, long_life_ms
from millstream.workers.batches.consumer import ATTACHED, OthersWait
from tests.kit.pool import Pool, names

LONG_MS = LONG_LIFE_MS_MAX
CALLED = {"fast": (0.0, 0)}  # a worker tells that it ran this lane


def put_long(pool: Pool, lane: str, *batches: str) -> list[int]:
    """Put batches of a lane with long runs; return which of them a worker has."""
    return [pool.put(lane, name, cost_ms=1000, fill=1, long_ms=LONG_MS) for name in batches]


def running(pool: Pool, worker: str, lane: str, seconds: float, long_ms: int, *, busy: bool = False) -> OthersWait:
    """Report a run; return whether others wait, and whether it is to leave its worker."""
    return pool.worker(worker).running(lane, seconds, long_ms, 1.0, busy=busy, yields=True)


def waits(pool: Pool, worker: str, lane: str, seconds: float, long_ms: int, *, busy: bool) -> bool:
    return running(pool, worker, lane, seconds, long_ms, busy=busy).calls


def test_a_lane_with_long_runs_leaves_a_worker_to_a_lane_that_is_called(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "fast")
        pool.next(worker, used=CALLED)
    assert put_long(pool, "slow", "s1", "s2") == [1, 0]
    [idle] = pool.check().idle
    assert pool.next(idle) == [], "nor when it asks"
    assert pool.put("fast", "f1") == 1


def test_without_other_calls_it_has_all_workers(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "fast")
        pool.next(worker, used={"slow": (0.0, LONG_MS)})
    assert put_long(pool, "slow", "s1", "s2") == [1, 1]


def test_what_was_called_long_ago_is_left_no_worker(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "fast")
        pool.next(worker, used=CALLED)
    assert put_long(pool, "slow", "s1", "s2") == [1, 0]
    [idle] = pool.check().idle
    pool.redis.zincrby(pool.keys.prefix + b"called", -60_000, "fast")
    assert names(pool.next(idle)) == ["s2"]


def test_a_call_that_waits_has_a_worker_left_at_once(pool):
    """Lanes with long runs have both workers, because nothing else was called. Then one of them becomes free."""
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "fast")
        pool.next(worker)
    put_long(pool, "slow", "s1", "s2", "s3")
    pool.put("fast", "f1")
    [lease] = pool.wait("w1")
    [next_lease] = pool.next("w1", lease)
    assert next_lease.header.name == "f1"
    assert pool.next("w1", next_lease) == [], "the other one has the lane with long runs"
    [lease] = pool.wait("w2")
    assert names(pool.next("w2", lease)) == ["s3"]


def test_several_lanes_with_long_runs_leave_one_worker_together(pool):
    """Ten versions of one owner take no more than one."""
    slow = [f"slow{number}" for number in range(10)]
    for worker in ("w1", "w2", "w3"):
        pool.join(worker, "fast", *slow)
        pool.next(worker, used=CALLED)
    assert [put_long(pool, lane, lane)[0] for lane in slow] == [1, 1, *[0] * 8]
    [idle] = pool.check().idle
    assert pool.next(idle) == []


def test_a_lane_with_long_runs_leaves_a_worker_to_another_one(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "slower")
        pool.next(worker, used={"slow": (0.0, LONG_MS)})
    assert put_long(pool, "slower", "s1", "s2") == [1, 0]
    assert put_long(pool, "slow", "s3") == [1], "they share the workers"


def test_a_new_lane_is_left_a_worker_as_one_with_short_runs(pool):
    """Its own runs count as long ones until some were short."""
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "slower", "new")
        pool.next(worker, used={"new": (0.0, 1000)})
    assert put_long(pool, "slow", "s1") == [1]
    assert put_long(pool, "slower", "s2") == [0]


def test_the_only_worker_of_a_lane_is_left_to_nobody(pool):
    pool.join("w1", "slow", "fast")
    pool.join("w2", "other")
    pool.next("w1", used=CALLED)
    assert put_long(pool, "slow", "s1") == [1]


def test_what_matters_is_a_worker_that_the_called_lane_could_use(pool):
    """Three workers, and the called lane is in one of them: that one is left, and the lane has the two others."""
    for worker in ("w1", "w2"):
        pool.join(worker, "slow")
        pool.next(worker)
    pool.join("w3", "slow", "fast")
    pool.next("w3", used=CALLED)
    assert put_long(pool, "slow", "s1", "s2", "s3") == [1, 1, 0]
    assert list(pool.check().idle) == ["w3"]


def test_a_worker_that_asked_for_a_long_run_is_held_by_it(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "slower", "fast")
    put_long(pool, "slow", "s1")
    put_long(pool, "slower", "s2")
    assert names(pool.next("w1", used=CALLED)) == ["s1"]
    assert pool.check().held == {"w1": "slow"}
    assert pool.next("w2", used=CALLED) == []


def test_a_lane_that_an_idle_worker_begins_to_serve_is_kept_from_it_likewise(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "fast")
    pool.join("w1", "slow")
    for worker in ("w1", "w2"):
        pool.next(worker, used=CALLED)
    assert put_long(pool, "slow", "s1", "s2") == [1, 0]
    pool.join("w2", "slow")
    assert pool.check().waiting() == ["s2"]


def test_a_long_run_that_came_directly_holds_its_worker(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "fast")
        pool.next(worker, leased=ATTACHED if worker == "w1" else 0, used=CALLED)
    assert not waits(pool, "w1", "slow", 0.1, LONG_MS, busy=True)
    assert list(pool.check().idle) == ["w2"], "it is attached no longer"
    assert put_long(pool, "slow", "s1") == [0]
    assert not waits(pool, "w1", "slow", 0.5, LONG_MS, busy=True), "no call of another lane waits"
    pool.next("w1", used={"slow": (10.0, LONG_MS)})
    assert pool.check().leased("w1") == ["s1"]


def test_a_run_under_way_is_told_whether_calls_of_others_wait(pool):
    pool.join("w1", "slow", "fast")
    put_long(pool, "slow", "s1", "s2")
    [lease] = pool.next("w1")
    assert not waits(pool, "w1", "slow", 0.5, LONG_MS, busy=False), "its own calls wait, no others"
    pool.put("fast", "probe", probe=True)
    assert not waits(pool, "w1", "slow", 0.5, LONG_MS, busy=False), "a readiness probe is no call"
    pool.redis.zadd(pool.keys.prefix + b"called", {"fast": int(pool.redis.time()[0]) * 1000 - 5000})
    assert not waits(pool, "w1", "slow", 0.5, LONG_MS, busy=False), "nor is one of a lane called before"
    pool.put("fast", "f1")
    assert waits(pool, "w1", "slow", 0.5, LONG_MS, busy=False)
    assert names(pool.next("w1", lease, wanted=1)) == ["probe"]


def test_a_lane_is_charged_for_a_run_while_it_goes_on(pool):
    """Two lanes wait with equal times; one of them is inside a run in the other worker, longer than was expected."""
    for worker in ("w1", "w2"):
        pool.join(worker, "a", "b")
    pool.put("a", "a1", deadline_ms=1, cost_ms=1, fill=1)
    [lease] = pool.next("w1")
    for name, deadline_ms in (("a2", 2), ("a3", 3)):
        pool.put("a", name, deadline_ms=deadline_ms, cost_ms=1, fill=1)
    pool.put("b", "b1", deadline_ms=9, cost_ms=5, fill=1)
    pool.put("b", "b2", deadline_ms=9, cost_ms=5, fill=1)
    waits(pool, "w1", "a", 0.05, 0, busy=False)
    assert names(pool.next("w2", wanted=1)) == ["b1"]
    assert names(pool.next("w2", wanted=1)) == ["b2"]
    assert names(pool.next("w1", lease, wanted=1, used={"a": (100.0, 0)})) == ["a2"]
    assert pool.check().ready["a"] > 150


def test_a_lane_is_charged_for_what_an_idle_worker_got_and_for_what_came_directly(pool):
    for worker in ("w1", "w2"):
        pool.join(worker, "a", "b")
    pool.next("w1")
    assert pool.put("a", "a1", cost_ms=100) == 1
    for name in ("a2", "b1"):
        pool.put(name[0], name, deadline_ms=int(name[1]), cost_ms=10, fill=1)
    pool.put("a", "a3", deadline_ms=1, cost_ms=10, fill=1)
    pool.put("b", "b2", deadline_ms=9, cost_ms=10, fill=1)
    assert names(pool.next("w2", wanted=1, used={"b": (50.0, 0)})) == ["b1"], "100 ms against 50 ms"


def test_how_long_a_lane_counts_as_one_with_long_runs():
    assert long_life_ms(LONG_S / 2) == 0
    assert long_life_ms(LONG_S) == LONG_RUNS * LONG_S * 1000
    assert long_life_ms(1e9) == LONG_LIFE_MS_MAX


def test_the_cost_of_a_call_does_not_grow_with_the_number_of_lanes(pool):
    """A thousand lanes with long runs wait, and one with short runs is called: only pages of their names are read."""

    def calls_of_next(lanes: int) -> int:
        pool.clear()
        slow = [f"slow{number}" for number in range(lanes)]
        for worker in ("w1", "w2"):
            pool.join(worker, "fast", *slow)
            pool.next(worker, used=CALLED)
        for lane in slow:
            put_long(pool, lane, lane)
        [idle] = pool.check().idle
        before = pool.redis.info("stats")["total_commands_processed"]
        assert pool.next(idle) == []
        return int(pool.redis.info("stats")["total_commands_processed"] - before)

    assert calls_of_next(1000) <= 3 * calls_of_next(100)


def test_a_run_is_left_when_the_callers_of_all_its_batches_have_gone(pool):
    pool.join("w1", "slow")
    worker = pool.worker("w1")
    assert not worker.all_left(["s1", "s2"])
    pool.callers_left("s1")
    assert worker.all_left(["s1"])
    assert not worker.all_left(["s1", "s2"])
    pool.callers_left("s2")
    assert worker.all_left(["s1", "s2"])


def test_a_run_leaves_the_last_worker_that_others_wait_for(pool):
    """Both workers began runs of a lane before any was known to be long: one of them goes on."""
    for worker in ("w1", "w2"):
        pool.join(worker, "slow", "fast")
        pool.next(worker)
    assert [pool.put("slow", name) for name in ("s1", "s2")] == [1, 1]
    pool.put("fast", "f1")
    told = {worker: running(pool, worker, "slow", 0.1, LONG_MS) for worker in ("w1", "w2", "w1")}
    assert told == {"w1": (True, False, False), "w2": (True, True, False)}
    assert pool.check().held == {"w1": "slow"}
    [lease] = pool.wait("w2")
    assert names(pool.next("w2", lease)) == ["f1"]


def test_a_run_keeps_the_only_worker(pool):
    pool.join("w1", "slow", "fast")
    pool.next("w1")
    pool.put("slow", "s1")
    pool.put("fast", "f1")
    assert running(pool, "w1", "slow", 0.1, LONG_MS) == (True, False, False)


def test_calls_behind_a_run_of_an_attached_worker_go_to_others(pool):
    """For Redis an attached worker is idle, also while it runs what came directly."""
    pool.join("w1", "slow", "fast")
    pool.next("w1", leased=ATTACHED)
    assert pool.put("fast", "f1") == 1
    assert running(pool, "w1", "slow", 0.1, LONG_MS) == (True, False, True)
    assert pool.worker("w1").give_back([]) == 1
    assert running(pool, "w1", "slow", 0.5, LONG_MS) == (True, False, False)
