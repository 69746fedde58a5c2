"""Refusals in a worker's record: replaced, removed, over after a time, bounded."""

from __future__ import annotations

from millstream.services.placement.views import Refusal, RefusalKind
from millstream.workers.models.record_parts import LOGGED_AGAIN_S, REFUSALS_MAX, RETRY_S_MIN, BeatSignal, Refusals

FULL = Refusal(RefusalKind.NOTHING_EVICTABLE, "all others are in use", 0.1)
FAILED = Refusal(RefusalKind.FAILED, "it failed", 30.0)


class Time:
    now = 1000.0


def test_a_refusal_is_there_until_its_time_has_passed() -> None:
    changes: list[float] = []

    class Signal(BeatSignal):
        def now(self) -> None:
            changes.append(Time.now)

    refusals = Refusals(Signal(), lambda: Time.now)
    refusals.add("m", FULL)
    [record] = refusals.records()
    assert (record.kind, record.until) == ("nothing_evictable", 1000.0 + RETRY_S_MIN)
    refusals.add("m", FAILED)
    [record] = refusals.records()
    assert (record.kind, record.reason, record.until) == ("failed", "it failed", 1030.0)
    assert refusals.of("m") == record
    Time.now = 1030.0
    assert refusals.of("m") is None
    assert refusals.records() == ()
    refusals.remove("m")
    assert len(changes) == 2
    Time.now = 1000.0


def test_a_clock_of_redis_that_is_set_makes_no_refusal_shorter_or_longer() -> None:
    ahead_s = [5000.0]
    refusals = Refusals(BeatSignal(), lambda: Time.now, lambda at: at + ahead_s[0])
    refusals.add("m", FAILED)
    assert [one.until for one in refusals.records()] == [6030.0]
    ahead_s[0] = 1400.0
    assert [one.until for one in refusals.records()] == [2430.0]
    assert refusals.of("m")


def test_a_version_that_is_loaded_or_removed_is_no_longer_refused() -> None:
    refusals = Refusals(BeatSignal(), lambda: Time.now)
    refusals.add("m", FULL)
    refusals.remove("m")
    assert refusals.records() == ()


def test_refusals_are_bounded() -> None:
    refusals = Refusals(BeatSignal(), lambda: Time.now)
    for i in range(REFUSALS_MAX + 5):
        refusals.add(f"m{i}", FULL)
    assert len(refusals.records()) == REFUSALS_MAX
    assert refusals.of("m0") is None


def test_a_kind_of_refusal_is_worth_a_line_once_a_minute_for_a_version() -> None:
    now = [1000.0]
    refusals = Refusals(BeatSignal(), lambda: now[0])
    assert [refusals.first("m", FULL.kind) for _ in range(3)] == [True, False, False]
    assert refusals.first("m", FAILED.kind)
    assert refusals.first("other", FULL.kind)
    now[0] += LOGGED_AGAIN_S
    assert refusals.first("m", FAILED.kind)
    for number in range(REFUSALS_MAX):
        refusals.first(str(number), FULL.kind)
    assert refusals.first("m", FAILED.kind), "what is remembered is bounded"
