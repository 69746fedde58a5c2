"""What earlier races say of a candidate: seconds of its compilation scaled by the model's size, and its gain."""

from __future__ import annotations

import pytest

from millstream.plugins.compile.candidate import Candidate
from millstream.plugins.compile.race.estimate import (
    GAIN_UNKNOWN,
    LATE_FACTOR,
    PRIORS,
    SIZE_FACTOR_MAX,
    TRIALS_USED,
    UNKNOWN,
    by_promise,
    estimate_of,
    estimates_from,
)
from millstream.plugins.compile.stored.race_parts import StoredReport, Trial, trials_of
from millstream.plugins.compile.targets import TARGETS

INT8 = Candidate(target="openvino-int8", lossy=True)
IREE = Candidate(target="iree", lossy=False)
NEW = Candidate(target="cuda", lossy=False)


def trial(
    of: Candidate, seconds: float, gain: float | None = 0.0, model_bytes: int = 100, *, late: bool = False
) -> Trial:
    return Trial(
        target=of.target, candidate=of.key, seconds=seconds, gain=gain, model_bytes=model_bytes, late=late
    )  # fmt: skip


def test_seconds_are_the_median_and_gains_the_mean_of_the_trials() -> None:
    found = estimates_from([trial(IREE, 1.0, 2.0), trial(IREE, 9.0), trial(IREE, 3.0, 1.0)], 100)[IREE.key]
    assert (found.seconds, found.gain, found.trials) == (3.0, 1.0, 3)


def test_seconds_grow_with_the_size_of_the_model_within_bounds() -> None:
    assert estimates_from([trial(IREE, 2.0)], 400)[IREE.key].seconds == pytest.approx(4.0)
    assert estimates_from([trial(IREE, 2.0)], 25)[IREE.key].seconds == pytest.approx(1.0)
    assert estimates_from([trial(IREE, 2.0)], 10**15)[IREE.key].seconds == 2.0 * SIZE_FACTOR_MAX
    assert estimates_from([trial(IREE, 2.0, model_bytes=0)], 10**15)[IREE.key].seconds == 2.0
    assert estimates_from([trial(IREE, 2.0)], 0)[IREE.key].seconds == 2.0


def test_models_of_similar_size_count() -> None:
    far = [trial(IREE, 60.0, 5.0, 10**9) for _ in range(20)]
    near = [trial(IREE, 1.0, 0.5, 90 + at) for at in range(TRIALS_USED)]
    found = estimates_from([*far, *near], 100)[IREE.key]
    assert found.seconds == pytest.approx(1.0, rel=0.1)
    assert found.gain == pytest.approx(0.5)


def test_a_compilation_that_was_ended_takes_longer_than_its_limit_and_may_gain() -> None:
    found = estimates_from([trial(NEW, 4.0, None, late=True)], 100)[NEW.key]
    assert (found.seconds, found.gain) == (4.0 * LATE_FACTOR, GAIN_UNKNOWN)
    found = estimates_from([trial(INT8, 0.5, None, late=True)], 100)[INT8.key]
    assert (found.seconds, found.gain) == (PRIORS[INT8.target].seconds, PRIORS[INT8.target].gain), "0.5 s says little"


def test_a_candidate_without_trials_is_as_its_target_and_a_new_target_is_worth_a_try() -> None:
    other = Candidate(target="iree", flags={"level": 3}, lossy=False)
    known = estimates_from([trial(other, 7.0, 2.0)], 100)
    assert estimate_of(IREE, known).seconds == 7.0
    assert estimate_of(IREE, known).gain == (2.0 + PRIORS["iree"].gain) / 2
    assert estimate_of(IREE, {}) == PRIORS["iree"]
    assert estimate_of(NEW, known) == UNKNOWN


def test_targets_with_priors_are_targets() -> None:
    assert PRIORS.keys() <= {target.name for target in TARGETS}


def test_the_cheap_and_promising_come_first_by_earlier_races_or_as_such_targets_do() -> None:
    known = estimates_from([trial(IREE, 1.0, 3.0), trial(INT8, 20.0)], 100)
    assert by_promise([INT8, NEW, IREE], known) == [IREE, NEW, INT8]
    assert by_promise([IREE, NEW, INT8], {}) == [INT8, NEW, IREE]


def test_a_report_has_a_trial_for_each_candidate_that_was_tried() -> None:
    rows = [
        {"target": "a", "candidate": "a-1", "verdict": "won", "compile_s": 4.0, "ratio": 3.5},
        {"target": "b", "candidate": "b-1", "verdict": "lost", "compile_s": 2.0, "ratio": 0.3},
        {"target": "c", "candidate": "c-1", "verdict": "inaccurate", "compile_s": 1.0, "ratio": 4.0},
        {"target": "d", "candidate": "d-1", "verdict": "failed", "compile_s": 5.0, "late": True},
        {"target": "e", "candidate": "e-1", "verdict": "skipped", "compile_s": 0.0},
        {"target": "f", "candidate": "f-1", "verdict": "skipped", "compile_s": 3.0, "ratio": 2.0},
        {"target": "g", "candidate": "g", "verdict": "unavailable"},
        {"target": "h", "candidate": "h", "verdict": "failed"},
    ]
    found = trials_of(StoredReport.model_validate({"rows": rows, "model_bytes": 7}))
    told = {one.candidate: (one.seconds, one.gain, one.late) for one in found}
    assert told == {
        "a-1": (4.0, 2.5, False),
        "b-1": (2.0, 0.0, False),
        "c-1": (1.0, 0.0, False),
        "d-1": (5.0, None, True),
        "f-1": (3.0, 1.0, False),
    }
    assert {one.model_bytes for one in found} == {7}
    assert trials_of(StoredReport()) == ()
