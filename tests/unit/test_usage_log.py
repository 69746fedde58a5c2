"""Calls of versions: gaps between them, kept across instances, published in records a few seconds late at most."""

from __future__ import annotations

import pytest

from millstream.services.placement.usage import HALVE_AT, Usage
from millstream.services.wire.records import State
from millstream.workers.models import usage_log
from millstream.workers.models.loaded_models import USAGE_PUBLISHED_S, LoadedModel, LoadedModels
from millstream.workers.models.usage_log import GAPS_MAX, Calls, Known, UsageLog
from tests.contract.repositories import manifest


def test_gaps_between_calls_are_counted_and_the_first_call_has_none() -> None:
    log, calls = UsageLog(), Calls()
    for now in (1000.0, 1010.0, 1020.0, 1020.05):
        calls.add(now)
    known = log.fold("m", calls)
    assert known == Known(Usage().with_gap(10.0).with_gap(10.0).with_gap(0.05), 1020.05)
    assert log.fold("m", calls) is known, "nothing was called since"


def test_a_version_that_is_loaded_again_continues() -> None:
    log, calls = UsageLog(), Calls()
    calls.add(1000.0)
    log.fold("m", calls)
    again = log.calls("m")
    again.add(1060.0)
    assert log.fold("m", again) == Known(Usage().with_gap(60.0), 1060.0)


def test_many_calls_between_two_folds_are_bounded() -> None:
    log, calls = UsageLog(), Calls()
    for i in range(10 * GAPS_MAX):
        calls.add(1000.0 + i)
        calls.add(1000.0 + i)
    usage = log.fold("m", calls).usage
    assert len(calls.gaps) == calls.bursts == 0
    assert sum(usage.gaps.values()) <= 2 * HALVE_AT


def test_what_others_know_is_continued_if_it_is_more() -> None:
    log, calls = UsageLog(), Calls()
    log.continue_from("m", Usage({5: 3.0}))
    log.continue_from("m", Usage({6: 1.0}))
    calls.add(1000.0)
    assert log.fold("m", calls).usage == Usage({5: 3.0})


def test_versions_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_log, "VERSIONS_MAX", 2)
    log = UsageLog()
    for name in ("a", "b", "a", "c"):
        log.continue_from(name, Usage({5: float(ord(name)) + (name == "a")}))
    assert log.fold("b", Calls()).usage.gaps
    assert log.fold("c", Calls()).usage.gaps


def test_a_record_shows_calls_but_does_not_change_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("millstream.workers.models.loaded_models.time.monotonic", lambda: now)
    models = LoadedModels(offset_s=lambda: 500.0)
    model = LoadedModel(manifest(), State.READY)
    models.set(model)
    [first] = models.records()
    assert (first.last_used, first.usage) == (0.0, {})
    for at in (1001.0, 1003.0):
        model.calls.add(at)
        now = at
        [record] = models.records()
        assert record is first
    now = 1000.0 + USAGE_PUBLISHED_S
    [record] = models.records()
    assert record.last_used == 1503.0
    assert Usage.unpack(record.usage) == Usage().with_gap(2.0)
    [again] = models.records()
    assert again is record


def test_instants_are_published_anew_when_the_clock_of_redis_was_set() -> None:
    offset_s = [500.0]
    models = LoadedModels(offset_s=lambda: offset_s[0])
    used, failed = manifest(), manifest("failed")
    model = LoadedModel(used, State.READY, loaded_at=100.0)
    model.calls.add(101.0)
    models.set(model)
    models.set(LoadedModel(failed, State.FAILED, "broken", retry_at=130.0))
    before = models.records()
    assert [(one.loaded_at, one.last_used, one.retry_at) for one in before] == [(600.0, 601.0, 0.0), (0.0, 0.0, 630.0)]
    offset_s[0] += 0.1  # drift
    assert all(one is two for one, two in zip(models.records(), before, strict=True))
    offset_s[0] -= 3600.0
    instants = [(one.loaded_at, one.last_used, one.retry_at) for one in models.records()]
    assert instants == [(-2999.9, -2998.9, 0.0), (0.0, 0.0, -2969.9)]


def test_a_record_is_made_again_when_runs_corrected_the_profile() -> None:
    models = LoadedModels()
    model = LoadedModel(manifest(), State.READY, measured={1: 0.01})
    models.set(model)
    [first] = models.records()
    for seconds, runs, published in ((0.011, 1, 0.01), (0.03, 2, 0.03), (0.03, 3, 0.03)):
        model.measured[1], model.calls.runs = seconds, runs
        [record] = models.records()
        assert record.profile == {1: published}
        assert (record is first) is (runs == 1), "noise changes nothing"
    [again] = models.records()
    assert again is record
