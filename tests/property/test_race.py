"""plugins/compile/race on a virtual clock: budget, drift, noise, crashes, and the same winner for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.plugins.compile.candidate import Candidate, Compiled
from millstream.plugins.compile.race.choice import GAIN_MIN, Measured, choose
from millstream.plugins.compile.race.estimate import Estimate
from millstream.plugins.compile.race.gate import Judgement
from millstream.plugins.compile.race.race import LateError, LostError, Prepared, Race, Result
from millstream.plugins.compile.race.report import BASELINE, RaceEvent, variant_for
from millstream.plugins.compile.race.schedule import ENTRY_SHARE, Budget, entry_order
from millstream.plugins.compile.race.statistics import Round, interval, overall, ratio_of, weighted

COMPILED = Compiled(backend="onnxruntime", runtime="none")
WEIGHTS = {1: 1.0, 4: 1.0, 16: 2.0}
BASE_S = {1: 0.01, 4: 0.03, 16: 0.1}


class Entry(NamedTuple):
    """A candidate of the virtual track. `fails`: the call that raises."""

    speed: float
    compile_s: float = 1.0
    lossy: bool = False
    single: bool = False
    fails: str = ""
    hangs: bool = False


class VirtualTrack:
    """A machine whose speed drifts and is noisy; calls take virtual time."""

    def __init__(self, entries: Sequence[Entry], seed: int, noise: float = 0.0, drift: float = 0.0) -> None:
        self.clock_s = 100.0
        self.entries = {candidate_of(at, entry).key: entry for at, entry in enumerate(entries)}
        self.random = random.Random(seed)
        self.noise, self.drift = noise, drift
        self.judge_s = 0.3
        self.judged: list[str] = []
        self.events: list[RaceEvent] = []

    def now(self) -> float:
        return self.clock_s

    def spend(self, seconds: float, seconds_max: float) -> None:
        self.clock_s += min(seconds, seconds_max)
        if seconds > seconds_max:
            raise TimeoutError

    def compile(self, candidate: Candidate, seconds_max: float) -> Prepared:
        entry = self.entries[candidate.key]
        try:
            self.spend(1e9 if entry.hangs else entry.compile_s, seconds_max)
        except TimeoutError:
            raise LateError(seconds_max) from None
        self.fail(entry, "compile")
        return Prepared(COMPILED, candidate.key, entry.compile_s, 10, cached=False)

    def judge(self, key: str, seconds_max: float) -> tuple[Judgement, bool]:
        self.judged.append(key)
        self.spend(self.judge_s, seconds_max)
        self.fail(self.entries[key], "judge")
        return Judgement({}, "wrong" if self.entries[key].fails == "gate" else ""), self.entries[key].single

    def round(self, key: str, sizes: Sequence[int], seconds_max: float) -> Round:
        entry, found, left = self.entries[key], {}, seconds_max
        for rows in sizes:
            blocks = [self.block(BASE_S[rows] / speed) for speed in (1.0, entry.speed, entry.speed, 1.0)]
            self.spend(sum(blocks), left)
            left -= sum(blocks)
            found[rows] = ratio_of((blocks[0], blocks[3]), (blocks[1], blocks[2]))
        if self.random.random() < 0.5:
            self.fail(entry, "round")
        return found

    def block(self, seconds: float) -> float:
        slow = 1.0 + self.drift * (self.clock_s - 100.0)
        return seconds * slow * self.random.lognormvariate(0.0, self.noise)

    def fail(self, entry: Entry, call: str) -> None:
        if entry.fails == call:
            raise LostError(f"it crashed in {call}", "segmentation fault")

    def tell(self, event: RaceEvent) -> None:
        self.events.append(event)


def candidate_of(at: int, entry: Entry) -> Candidate:
    return Candidate(target=f"target{at}", lossy=entry.lossy)


def key_of(at: int) -> str:
    return candidate_of(at, Entry(1.0)).key


def race(
    track: VirtualTrack,
    entries: Sequence[Entry],
    seconds: float = 120.0,
    estimates: Mapping[str, Estimate] | None = None,
) -> Result:
    candidates = [candidate_of(at, entry) for at, entry in enumerate(entries)]
    return Race(candidates, WEIGHTS, Budget(track.now(), seconds), track, seed=1, estimates=estimates).run()


def known(entries: Sequence[Entry]) -> dict[str, Estimate]:
    """Return true estimates, as a race of the same version before gives them."""
    return {
        key_of(at): Estimate(seconds=entry.compile_s, gain=max(0.0, entry.speed - 1), trials=1)
        for at, entry in enumerate(entries)
    }


ENTRIES = st.builds(
    Entry,
    speed=st.floats(0.05, 8.0),
    compile_s=st.floats(0.0, 60.0),
    lossy=st.booleans(),
    single=st.booleans(),
    fails=st.sampled_from(["", "", "", "compile", "judge", "gate", "round"]),
    hangs=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=60, deadline=None)
@given(entries=st.lists(ENTRIES, max_size=12), seconds=st.floats(0.5, 300.0), seed=st.integers(0, 99))
def test_a_race_ends_within_its_budget_and_every_candidate_has_one_row(
    entries: list[Entry], seconds: float, seed: int
) -> None:
    track = VirtualTrack(entries, seed, noise=0.2, drift=0.01)
    result = race(track, entries, seconds)
    assert track.now() - 100.0 <= seconds * (1 + 1e-9)
    assert sorted(row.candidate for row in result.rows) == sorted(map(key_of, range(len(entries))))
    serving = set(result.choice.table.values()) - {BASELINE}
    assert {row.candidate for row in result.rows if row.verdict == "won"} == serving
    for row in result.rows:
        assert row.why or row.verdict == "won"
        assert row.compiled is not None or row.candidate not in serving
        if row.candidate in serving and row.single:
            assert all(variant_for(result.choice.table, rows) != row.candidate for rows in (2, 3, 16, 64))
    assert (result.choice.winner is None) == (not serving)


@settings(max_examples=40, deadline=None)
@given(
    others=st.lists(st.floats(0.2, 2.0), min_size=1, max_size=10),
    at=st.integers(0, 10),
    noise=st.floats(0.0, 0.08),
    drift=st.floats(-0.005, 0.05),
    seed=st.integers(0, 999),
)
def test_the_best_wins_under_noise_and_drift(
    others: list[float], at: int, noise: float, drift: float, seed: int
) -> None:
    entries = [Entry(speed) for speed in others]
    entries.insert(min(at, len(entries)), best := Entry(3.0))
    result = race(VirtualTrack(entries, seed, noise, drift), entries)
    assert result.choice.winner == key_of(entries.index(best))
    assert result.choice.ratio == pytest.approx(3.0, rel=0.15)


@settings(max_examples=30, deadline=None)
@given(
    speeds=st.lists(st.floats(0.2, 1.0), min_size=1, max_size=8),
    noise=st.floats(0.0, 0.05),
    seed=st.integers(0, 999),
)
def test_nothing_changes_where_nothing_is_faster(speeds: list[float], noise: float, seed: int) -> None:
    entries = [Entry(speed) for speed in speeds]
    choice = race(VirtualTrack(entries, seed, noise), entries).choice
    assert (choice.winner, choice.table, choice.ratio) == (None, {}, 1.0)


@settings(max_examples=30, deadline=None)
@given(entries=st.lists(ENTRIES, max_size=8), seed=st.integers(0, 99))
def test_the_same_race_has_the_same_result(entries: list[Entry], seed: int) -> None:
    assert race(VirtualTrack(entries, seed, 0.1), entries) == race(VirtualTrack(entries, seed, 0.1), entries)


@settings(max_examples=30, deadline=None)
@given(call=st.sampled_from(["compile", "judge", "gate", "round"]), losers=st.integers(1, 5), seed=st.integers(0, 99))
def test_crashes_of_losers_change_nothing(call: str, losers: int, seed: int) -> None:
    good = [Entry(1.5), Entry(2.0)]
    bad = [Entry(9.0, fails=call) for _ in range(losers)]
    result = race(VirtualTrack([*good, *bad], seed, 0.02), [*good, *bad])
    assert result.choice.winner == key_of(1)
    lost = {row.candidate: row for row in result.rows if row.candidate in {key_of(2 + at) for at in range(losers)}}
    assert {row.verdict for row in lost.values()} == {"inaccurate" if call == "gate" else "failed"}
    assert {row.compiled for row in lost.values()} == {None}
    if call != "gate":
        assert {row.stderr for row in lost.values()} == {"segmentation fault"}


def test_a_hanging_compilation_leaves_time_for_the_others() -> None:
    entries = [Entry(2.0, hangs=True), Entry(2.0, hangs=True), Entry(3.0)]
    result = race(VirtualTrack(entries, 1), entries)
    assert result.choice.winner == key_of(2)


def test_with_many_candidates_a_compilation_has_time_to_end() -> None:
    """Two equal parts of the time for entries are 6 s here: none of them would be compiled."""
    entries = [Entry(3.0, compile_s=8.0) for _ in range(24)]
    result = race(VirtualTrack(entries, 1), entries)
    assert result.choice.winner is not None
    assert sum(row.verdict in {"won", "lost"} for row in result.rows) >= 3


def test_what_one_candidate_of_a_target_did_not_meet_the_others_are_not_given() -> None:
    """They would take as long, and the time of other targets."""
    slow = [Candidate(target="slow", flags={"at": at}, lossy=False) for at in range(5)]
    quick = [Candidate(target=f"quick{at}", lossy=False) for at in range(5)]
    track = VirtualTrack([], 1)
    track.entries = {one.key: Entry(4.0, hangs=True) for one in slow} | {one.key: Entry(1.5, 3.0) for one in quick}
    result = Race([*slow, *quick], WEIGHTS, Budget(track.now(), 120.0), track, seed=1).run()
    compiled = [event.candidate for event in track.events if event.stage == "compiling"]
    assert compiled[: 1 + len(quick)] == [slow[0].key, *(one.key for one in quick)]
    assert result.choice.winner in {one.key for one in quick}
    (last,) = [row for row in result.rows if row.candidate == slow[-1].key]
    assert (last.verdict, last.compile_s) == ("skipped", 0.0)
    assert last.why.startswith("another candidate of its target took longer than")


def test_a_long_compilation_is_set_aside_and_tried_after_the_others() -> None:
    entries = [Entry(4.0, compile_s=30.0), *(Entry(1.5) for _ in range(5))]
    result = race(VirtualTrack(entries, 1), entries)
    assert result.choice.winner == key_of(0)
    assert {row.verdict for row in result.rows} == {"won", "lost"}


def test_a_compilation_that_takes_too_long_says_how_long_and_what_to_do() -> None:
    entries = [Entry(4.0, hangs=True), *(Entry(1.5) for _ in range(5))]
    result = race(VirtualTrack(entries, 1), entries)
    (late,) = [row for row in result.rows if row.candidate == key_of(0)]
    assert late.verdict == "failed"
    assert late.compile_s > 60 * ENTRY_SHARE  # tried twice
    assert late.why.endswith(f"allow more seconds (--race-seconds 240), or --targets {key_of(0)}")


def test_in_a_short_budget_the_cheap_and_promising_are_compiled_first() -> None:
    """Six expensive candidates that gain nothing stand before the best one."""
    entries = [*(Entry(0.5, compile_s=4.0) for _ in range(6)), Entry(3.5, compile_s=5.0), Entry(1.2, compile_s=0.1)]
    assert race(VirtualTrack(entries, 1), entries, seconds=30).choice.winner != key_of(6)
    result = race(VirtualTrack(entries, 1), entries, 30, known(entries))
    assert result.choice.winner == key_of(6)
    assert {row.estimate_s for row in result.rows} == {4.0, 5.0, 0.1}


def test_a_compilation_that_earlier_races_saw_gets_the_time_that_it_takes() -> None:
    """An equal part of the budget is 8 s here."""
    entries = [Entry(4.0, compile_s=20.0), *(Entry(1.1, compile_s=0.5) for _ in range(17))]
    track = VirtualTrack(entries, 1)
    result = race(track, entries, 120, known(entries))
    assert result.choice.winner == key_of(0)
    compiling = [event.candidate for event in track.events if event.stage == "compiling"]
    assert compiling.count(key_of(0)) == 1, "its first try is long enough"


def test_a_compilation_that_the_budget_cannot_hold_is_not_begun_and_says_what_it_takes() -> None:
    entries = [Entry(9.0, compile_s=300.0), *(Entry(1.5) for _ in range(5))]
    track = VirtualTrack(entries, 1)
    result = race(track, entries, 120, known(entries))
    assert key_of(0) not in {event.candidate for event in track.events if event.stage == "compiling"}
    (row,) = [row for row in result.rows if row.candidate == key_of(0)]
    assert (row.verdict, row.compile_s, row.estimate_s) == ("skipped", 0.0, 300.0)
    assert row.why.startswith("by earlier races it takes 300 s to compile")
    assert row.why.endswith(f"(--race-seconds 1000), or --targets {key_of(0)}")
    entries[0] = Entry(9.0, compile_s=40.0)  # more than half of the time for entries, which only the last one may take
    assert race(VirtualTrack(entries, 1), entries, 120, known(entries)).choice.winner == key_of(0)


@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(ENTRIES, min_size=1, max_size=12),
    seconds=st.floats(0.5, 300.0),
    seed=st.integers(0, 99),
    wrong=st.dictionaries(
        st.integers(0, 11), st.builds(Estimate, seconds=st.floats(0, 1e6), gain=st.floats(0, 1e6)), max_size=12
    ),
)
def test_a_race_with_wrong_estimates_ends_within_its_budget_and_every_candidate_has_one_row(
    entries: list[Entry], seconds: float, seed: int, wrong: dict[int, Estimate]
) -> None:
    track = VirtualTrack(entries, seed, noise=0.2, drift=0.01)
    result = race(track, entries, seconds, {key_of(at): one for at, one in wrong.items()})
    assert track.now() - 100.0 <= seconds * (1 + 1e-9)
    assert sorted(row.candidate for row in result.rows) == sorted(map(key_of, range(len(entries))))
    assert all(row.why or row.verdict == "won" for row in result.rows)


def test_a_slow_candidate_is_measured_once_before_the_others_enter() -> None:
    track = VirtualTrack(entries := [Entry(0.2), Entry(0.3), Entry(1.5), Entry(2.0), Entry(2.5)], 1)
    result = race(track, entries)
    rounds = {row.candidate: row.rounds for row in result.rows}
    assert (rounds[key_of(0)], rounds[key_of(1)]) == (1, 1)
    (slowest,) = [row for row in result.rows if row.candidate == key_of(0)]
    assert slowest.why == "slower than others after 1 round"


def test_a_compilation_that_failed_has_its_seconds_in_the_report() -> None:
    class Failing(VirtualTrack):
        def compile(self, candidate: Candidate, seconds_max: float) -> Prepared:
            self.spend(3.0, seconds_max)
            raise LostError("no such operator")

    [row] = race(Failing(entries := [Entry(2.0)], 1), entries).rows
    assert (row.verdict, row.compile_s) == ("failed", 3.0)


@settings(max_examples=30, deadline=None)
@given(speeds=st.lists(st.floats(0.3, 2.5), min_size=4, max_size=12), seed=st.integers(0, 99))
def test_the_fastest_are_judged_first_where_judging_takes_long(speeds: list[float], seed: int) -> None:
    entries = [*map(Entry, speeds), Entry(4.0)]
    track = VirtualTrack(entries, seed, 0.02)
    track.judge_s = 21.0  # ResNet-18's shape in one thread
    result = race(track, entries)
    assert track.judged[0] == result.choice.winner == key_of(len(speeds))
    assert len(track.judged) < len(entries)
    for row in result.rows:
        if row.candidate not in track.judged:
            assert (row.verdict, row.compiled) == ("lost", None)
            assert "slower than others" in row.why
            assert row.ratio is not None


def test_where_the_fastest_is_wrong_the_next_is_judged() -> None:
    entries = [Entry(2.0), Entry(4.0, fails="gate"), Entry(3.0, fails="judge")]
    track = VirtualTrack(entries, 1)
    track.judge_s = 21.0
    assert race(track, entries).choice.winner == key_of(0)
    assert track.judged == [key_of(1), key_of(2), key_of(0)]


def test_without_time_to_judge_any_nothing_changes_and_the_rows_say_so() -> None:
    entries = [Entry(2.0), Entry(4.0)]
    track = VirtualTrack(entries, 1)
    track.judge_s = 500.0
    result = race(track, entries)
    assert result.choice.winner is None
    assert {row.verdict for row in result.rows} == {"skipped"}
    assert all(row.why == "the budget of 120 s ended before it was judged (--race-seconds 240)" for row in result.rows)


def test_candidates_that_find_no_time_are_skipped_and_say_so() -> None:
    entries = [Entry(2.0, compile_s=8.0) for _ in range(6)]
    result = race(VirtualTrack(entries, 1), entries, seconds=20)
    skipped = [row for row in result.rows if row.verdict == "skipped"]
    assert skipped
    assert all("the budget of 20 s ended" in row.why for row in skipped)


def test_progress_names_stage_candidate_round_and_ratios() -> None:
    track = VirtualTrack(entries := [Entry(2.0), Entry(1.0)], 1)
    race(track, entries)
    stages = [event.stage for event in track.events]
    assert stages[:3] == ["compiling", "measuring", "measuring"]
    assert stages.index("judging") > stages.index("compiling", 1)
    assert track.events[-1].ratios[key_of(0)] == pytest.approx(2.0, abs=0.01)
    assert track.events[-1].round > 2
    assert track.events[-1].total == 2


def measured(key: str, ratios: dict[int, float], *, lossy: bool = False, single: bool = False) -> Measured:
    return Measured(key, lossy, single, (ratios,) * 6)


def test_the_table_takes_the_best_at_each_size_where_that_pays() -> None:
    small, large = measured("small", {1: 3.0, 16: 0.8}), measured("large", {1: 0.8, 16: 3.0})
    choice = choose([small, large], {1: 1.0, 16: 1.5})
    assert choice.table == {1: "small", 16: "large"}
    assert choice.winner == "large"
    assert choice.ratio == pytest.approx(3.0)


def test_one_variant_serves_all_sizes_where_a_second_would_gain_little() -> None:
    one, other = measured("one", {1: 2.0, 16: 2.0}), measured("other", {1: 2.05, 16: 1.0})
    assert choose([one, other], {1: 1.0, 16: 1.0}).table == {1: "one", 16: "one"}


def test_a_candidate_slower_at_one_size_shares_with_the_baseline() -> None:
    choice = choose([measured("one", {1: 0.5, 16: 4.0})], {1: 1.0, 16: 1.0})
    assert choice.table == {1: BASELINE, 16: "one"}
    assert choice.ratio == pytest.approx(2.0)


def test_a_lossy_candidate_must_gain_five_percent_over_an_exact_one() -> None:
    exact = measured("exact", {1: 2.0})
    assert choose([exact, measured("lossy", {1: 2.08}, lossy=True)], {1: 1.0}).winner == "exact"
    assert choose([exact, measured("lossy", {1: 2.2}, lossy=True)], {1: 1.0}).winner == "lossy"


def test_a_candidate_of_single_rows_never_gets_a_batch() -> None:
    choice = choose([measured("one", {1: 4.0}, single=True)], {1: 1.0})
    assert [variant_for(choice.table, rows) for rows in (1, 2, 64)] == ["one", BASELINE, BASELINE]


@given(st.floats(1.001, GAIN_MIN - 0.001))
def test_less_than_five_percent_changes_nothing(ratio: float) -> None:
    choice = choose([measured("one", {1: ratio, 4: ratio})], {1: 1.0, 4: 1.0})
    assert choice.winner is None
    assert "one" in choice.why


def test_too_few_rounds_change_nothing() -> None:
    assert choose([Measured("one", False, False, ({1: 9.0},) * 4)], {1: 1.0}).winner is None


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=50), st.integers(0, 9))
def test_an_interval_contains_its_median_and_is_equal_for_equal_seeds(ratios: list[float], seed: int) -> None:
    found = interval(ratios, seed)
    assert min(ratios) <= found.low <= found.median * (1 + 1e-12)
    assert found.median <= found.high * (1 + 1e-12)
    assert found.high <= max(ratios) * (1 + 1e-12)
    assert interval(ratios, seed) == found


def test_a_steady_drift_cancels_in_a_round() -> None:
    blocks = [1.0 + 0.3 * at for at in range(4)]  # the machine becomes slower from block to block
    assert ratio_of((blocks[0], blocks[3]), (blocks[1] / 2, blocks[2] / 2)) == pytest.approx(2.0)


def test_sizes_count_by_their_weights() -> None:
    assert weighted({1: 2.0, 4: 8.0}, {1: 1.0, 4: 1.0}) == pytest.approx(4.0)
    assert weighted({1: 2.0, 4: 8.0}, {1: 3.0, 16: 9.0}) == pytest.approx(2.0)
    assert overall([{1: 2.0}], {1: 1.0}).median == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no batch size was measured"):
        weighted({2: 1.0}, {1: 1.0})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=12))
def test_every_target_enters_before_a_second_candidate_of_any(pairs: list[tuple[str, int]]) -> None:
    candidates = [Candidate(target=target, flags={"at": at}, lossy=False) for target, at in pairs]

    order = entry_order(candidates)

    assert {one.key for one in order} == {one.key for one in candidates}
    assert len(order) == len({one.key for one in candidates})
    turns = [[other.target for other in order[:at]].count(one.target) for at, one in enumerate(order)]
    assert turns == sorted(turns)
