"""Loads in threads: which begins when, what is ended, what is found to be stuck. The loads are events of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from millstream.workers.residency.loader import (
    DEMAND_WAITS_S,
    GRACE_S,
    LOADS_MAX,
    NOT_WANTED,
    SET_ASIDE_S,
    TRIAL_START_S,
    Limits,
    Load,
    LoadAhead,
    Loader,
    LoadPolicy,
    LoadRequest,
)
from tests.contract.repositories import manifest
from tests.kit.wait import wait_until


class Policy(LoadPolicy):
    """Lets all loads begin but those of the models `refused`. `asked`: models of which it was asked."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.asked: list[str] = []
        self.ended: list[str] = []

    def admits(self, request: LoadRequest) -> bool:
        self.asked.append(request.manifest.model)
        return request.manifest.model not in self.refused

    def load_ended(self, content_id: str) -> None:
        self.ended.append(content_id)


class Bench:
    """Loads whose time is set by the test, and whose models end when the test says so, or when they are asked to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.began: list[str] = []
        self.stuck: list[str] = []
        self.reasons: dict[str, str] = {}
        self.deaf: set[str] = set()
        self.under_way: dict[str, Load] = {}
        self._end: dict[str, threading.Event] = {}
        self.loads = Loader(
            self._run, lambda load: self.stuck.append(name_of(load)), Limits(100, 200), lambda: self.now
        )
        self.policy = Policy()
        self.loads.start(self.policy)

    def _run(self, load: Load) -> None:
        name = name_of(load)
        self.under_way[name] = load
        end = self._end[name] = threading.Event()
        if name not in self.deaf:
            load.stop.on_request(end.set)
        self.began.append(name)
        end.wait()
        self.reasons[name] = load.stop.reason

    def want(self, *names: str, suspects: tuple[str, ...] = ()) -> None:
        self.loads.want([LoadRequest(manifest(name), suspect=name in suspects) for name in names])

    def end(self, name: str) -> None:
        self._end[name].set()
        wait_until(lambda: name in self.reasons)

    def until_begun(self, *names: str) -> None:
        wait_until(lambda: self.began == list(names), what=f"{self.began} is {names}")

    def close(self) -> None:
        for end in self._end.values():
            end.set()
        self.loads.stop()


def name_of(load: Load) -> str:
    return load.wanted.manifest.model


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_trial_takes_no_time_of_its_load(bench: Bench) -> None:
    bench.want("a", suspects=("a",))
    bench.until_begun("a")
    load = bench.under_way["a"]
    bench.loads.trying(load)
    assert (load.limit_s, load.deadline) == (TRIAL_START_S + 300, TRIAL_START_S + 300)
    bench.now = TRIAL_START_S + 299
    bench.loads.loading(load)
    assert (load.phase, load.deadline) == ("loading", bench.now + 100)
    bench.now += 101
    wait_until(lambda: bench.reasons == {"a": "loading took longer than 100 s"})


def test_a_trial_that_takes_too_long_is_ended(bench: Bench) -> None:
    bench.want("a", suspects=("a",))
    bench.until_begun("a")
    bench.loads.trying(bench.under_way["a"])
    bench.now = TRIAL_START_S + 301
    wait_until(lambda: bench.reasons == {"a": "loading on trial took longer than 330 s"})


def test_one_after_the_other_and_suspects_last(bench: Bench) -> None:
    bench.want("a", "b", "c", suspects=("a",))
    bench.until_begun("b")
    bench.end("b")
    bench.until_begun("b", "c")
    bench.end("c")
    bench.until_begun("b", "c", "a")
    bench.end("a")
    assert set(bench.reasons.values()) == {""}


def test_one_that_takes_long_is_set_aside(bench: Bench) -> None:
    bench.want("a", "b")
    bench.until_begun("a")
    bench.now = SET_ASIDE_S + 0.1
    bench.until_begun("a", "b")
    bench.end("a")


def test_what_a_further_demand_comes_after_is_told(bench: Bench) -> None:
    bench.want("a", "b")
    bench.until_begun("a")
    bench.loads.demand(LoadRequest(manifest("c"), demanded=True))
    bench.loads.demand(LoadRequest(manifest("d"), demanded=True))
    bench.now = 0.25
    ids = {name: manifest(name).content_id for name in "acd"}
    assert bench.loads.ahead() == [
        LoadAhead(ids["a"], 0.25, DEMAND_WAITS_S),
        LoadAhead(ids["c"], None, SET_ASIDE_S),
        LoadAhead(ids["d"], None, SET_ASIDE_S),
    ]
    bench.now = DEMAND_WAITS_S
    bench.until_begun("a", "c")
    assert bench.loads.ahead()[1] == LoadAhead(ids["c"], 0.0, SET_ASIDE_S)


def test_a_demanded_load_begins_without_waiting_for_another_thread(bench: Bench) -> None:
    wanted = LoadRequest(manifest("a"), demanded=True)
    assert bench.loads.demand(wanted)
    assert bench.loads.in_progress(wanted.content_id)
    bench.until_begun("a")


def test_their_number_is_bounded(bench: Bench) -> None:
    names = [f"m{number}" for number in range(LOADS_MAX + 1)]
    bench.want(*names)
    for number in range(LOADS_MAX):
        bench.until_begun(*names[: number + 1])
        bench.now += SET_ASIDE_S
        bench.want(*names)
    bench.now += SET_ASIDE_S
    assert bench.began == names[:LOADS_MAX]
    bench.end("m0")
    bench.until_begun(*names)


def test_each_part_has_its_time(bench: Bench) -> None:
    bench.want("a")
    bench.until_begun("a")
    bench.now = 100.5
    wait_until(lambda: bench.reasons == {"a": "loading took longer than 100 s"})
    assert bench.stuck == []


def test_what_cannot_be_ended_is_stuck_once(bench: Bench) -> None:
    bench.deaf = {"a"}
    bench.want("a", "b")
    bench.until_begun("a")
    bench.now = 100.5
    bench.until_begun("a", "b")
    wait_until(lambda: bench.under_way["a"].stop.reason)
    assert bench.stuck == []
    bench.now += GRACE_S + 0.1
    wait_until(lambda: bench.stuck == ["a"])
    bench.end("b")
    bench.now += 100
    bench.end("a")
    assert bench.stuck == ["a"]


def test_what_is_not_wanted_any_more_ends_at_once_and_makes_room(bench: Bench) -> None:
    bench.want("a", "b")
    bench.until_begun("a")
    bench.want("b")
    wait_until(lambda: bench.reasons == {"a": NOT_WANTED})
    bench.until_begun("a", "b")


def test_wanted_again_it_begins_anew_when_the_old_load_has_ended(bench: Bench) -> None:
    bench.deaf = {"a"}
    bench.want("a")
    bench.until_begun("a")
    bench.want()
    bench.want("a")
    bench.end("a")
    bench.until_begun("a", "a")


def test_the_same_wish_again_changes_nothing(bench: Bench) -> None:
    bench.want("a", "b")
    bench.until_begun("a")
    bench.want("a", "b")
    bench.end("a")
    bench.until_begun("a", "b")
    bench.end("b")
    assert bench.began == ["a", "b"]


def test_a_demanded_version_comes_first_and_waits_little_for_another(bench: Bench) -> None:
    bench.want("a", "b", "c")
    bench.until_begun("a")
    assert bench.loads.demand(LoadRequest(manifest("c"), demanded=True))
    assert bench.loads.active() == {manifest("a").content_id, manifest("c").content_id}
    bench.now += DEMAND_WAITS_S
    bench.until_begun("a", "c")
    assert not bench.loads.demand(LoadRequest(manifest("c"), demanded=True)), "it is being loaded"
    bench.end("a")
    bench.end("c")
    bench.until_begun("a", "c", "b")
    bench.end("b")
    wait_until(lambda: not bench.loads.pending)


def test_a_demanded_version_waits_for_one_that_calls_wait_for(bench: Bench) -> None:
    bench.loads.demand(LoadRequest(manifest("a"), demanded=True))
    bench.until_begun("a")
    bench.loads.demand(LoadRequest(manifest("b"), demanded=True))
    bench.loads.demand(LoadRequest(manifest("c"), demanded=True))
    bench.now += DEMAND_WAITS_S
    bench.end("a")
    bench.until_begun("a", "b")
    bench.now += SET_ASIDE_S
    bench.until_begun("a", "b", "c")


def test_demanded_versions_are_kept_if_they_are_still_there(bench: Bench) -> None:
    bench.want("a")
    bench.until_begun("a")
    for name in ("b", "c"):
        bench.loads.demand(LoadRequest(manifest(name), demanded=True))
    bench.loads.want([], kept=[manifest("b").content_id, manifest("d").content_id])
    bench.until_begun("a", "b")
    assert bench.reasons["a"] == NOT_WANTED
    bench.end("b")
    wait_until(lambda: not bench.loads.pending)
    assert bench.began == ["a", "b"]


def test_a_load_that_is_not_admitted_does_not_begin(bench: Bench) -> None:
    policy = bench.policy
    policy.refused.add("a")
    bench.want("a", "b")
    bench.until_begun("b")
    bench.end("b")
    wait_until(lambda: policy.ended == [manifest("b").content_id], what="its end is noticed")
    assert policy.asked == ["a", "b"]
