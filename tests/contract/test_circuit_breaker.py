"""How often versions end workers, as all gateways count it in Redis, and for how long they are refused then."""

from __future__ import annotations

from typing import Any

from millstream.services.queue.scripts import script

FIRST_S, MOST_S = 10, 600


class Count:
    """The script with a clock of the test's own, which `passed` moves."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._about = 0
        self._now_s = 1_700_000_000.0
        clock = b"redis.call('TIME')"
        assert clock in script("blame").text
        self._script = script("blame").text.replace(clock, b"{ARGV[3], 0}")

    def __call__(
        self, content_id: str = "", about: str = "", weight: float = 1
    ) -> tuple[int, dict[str, tuple[int, float]]]:
        """Whether it was counted, and what is refused: deaths and seconds to go."""
        keys = self._pool.keys
        self._about += 1
        what = keys.counted(about or str(self._about))
        counted, *refused = self._pool.redis.eval(self._script, 2, keys.blamed, what, content_id, weight, self._now_s)
        return counted, {name.decode(): (deaths, ms / 1000) for name, deaths, ms in refused}

    def times(self, number: int, content_id: str = "m") -> dict[str, tuple[int, float]]:
        refused: dict[str, tuple[int, float]] = {}
        for _ in range(number):
            _, refused = self(content_id)
        return refused

    def passed(self, seconds: float) -> None:
        self._now_s += seconds


def test_few_deaths_are_no_reason(pool):
    count = Count(pool)
    assert count.times(4) == {}
    count.passed(60)
    assert count.times(2) == {}, "half of the four are forgotten"


def test_a_run_that_took_seconds_from_others_counts_by_them(pool):
    count = Count(pool)
    assert count("m", weight=2)[1] == {}
    assert count("other", weight=1)[1] == {}
    assert set(count("m", weight=3)[1]) == {"m"}
    assert count("long", weight=30)[1]["long"] == (5, 30), "one that took half a minute is enough, for half a minute"
    assert count("longest", weight=6000)[1]["longest"] == (5, MOST_S)


def test_five_refuse_the_version_and_no_other(pool):
    count = Count(pool)
    count.times(4, "other")
    refused = count.times(5)
    assert set(refused) == {"m"}
    deaths, left_s = refused["m"]
    assert deaths == 5
    assert FIRST_S - 1 < left_s <= FIRST_S
    assert set(count()[1]) == {"m"}, "every gateway hears it"
    count.passed(FIRST_S + 1)
    assert count()[1] == {}


def test_one_thing_counts_once_whoever_tells_of_it(pool):
    count = Count(pool)
    for number in range(3):
        assert count("m", f"w{number}")[0] == 1
        assert count("m", f"w{number}")[0] == 0
        assert count("m", f"w{number}") == (0, {})


def test_each_time_lasts_twice_as_long_up_to_a_bound(pool):
    count = Count(pool)
    count.times(5)
    wanted = FIRST_S
    for _ in range(8):
        count.passed(wanted + 1)
        wanted = min(MOST_S, 2 * wanted)
        left_s = count.times(1)["m"][1]
        assert wanted - 1 < left_s <= wanted


def test_what_happens_while_it_is_refused_makes_it_no_longer(pool):
    count = Count(pool)
    count.times(5)
    assert count.times(3)["m"][1] <= FIRST_S


def test_a_clock_that_was_set_back_makes_no_refusal_longer_and_no_count_larger(pool):
    count = Count(pool)
    count.times(1, "other")
    count.times(5)
    count.passed(-3600)
    assert count()[1]["m"][1] <= MOST_S
    count.passed(MOST_S + 1)
    assert count() == (0, {})
    assert count.times(4, "other") == {}, "the death before has been forgotten"


def test_it_is_forgotten_and_leaves_nothing(pool):
    count = Count(pool)
    count.times(5)
    count.passed(FIRST_S + 1)
    count.times(1)
    count.passed(3600)
    assert count.times(4) == {}, "it takes five again"
    count.passed(3600)
    assert count() == (0, {})
    assert not pool.redis.exists(pool.keys.blamed)
