"""A race: which candidate is compiled, judged and measured when, and who wins. Pure; a Track does the work.

candidates ─> compile ─> first rounds ─> judge, the fastest first ─> halving ─> final ─> rows, choice
Judging takes longer than a few rounds, so that slow candidates get no verdict on their answers when time is short. The
same code runs under the tests' virtual clock. A candidate that is lost hurts nothing but itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from millstream.plugins.compile.candidate import Candidate, Compiled
from millstream.plugins.compile.race import reasons
from millstream.plugins.compile.race.choice import ROUNDS_MIN, Choice, Measured, choose
from millstream.plugins.compile.race.estimate import UNKNOWN, Estimate, estimate_of
from millstream.plugins.compile.race.gate import Judgement
from millstream.plugins.compile.race.report import RaceEvent, Row, Stage, Verdict
from millstream.plugins.compile.race.schedule import (
    AGAIN_MIN,
    COMPILE_PARTS,
    COMPILE_S_MIN,
    ESTIMATE_LEAST,
    FINALISTS,
    SLOW,
    Budget,
    entry_order,
    is_settled,
    ranking,
    rounds_in,
    survivors,
)
from millstream.plugins.compile.race.statistics import Round, by_size, median_ratio, overall


class LostError(Exception):
    """A candidate is out of the race: it crashed, hung, needed too much memory or cannot be compiled."""

    def __init__(self, why: str, stderr: str = "", verdict: Verdict = "failed") -> None:
        super().__init__(why)
        self.why = why
        self.stderr = stderr
        self.verdict: Verdict = verdict


class LateError(LostError):
    """A compilation took longer than it may. `seconds`: that it took."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it took longer than {seconds:.3g} s")
        self.seconds = seconds


class Prepared(NamedTuple):
    """A compiled candidate. `folder`: its folder's name in the cache; `seconds` is what it took to compile."""

    compiled: Compiled
    folder: str
    seconds: float
    size_bytes: int
    cached: bool
    stderr: str = ""


class Track(Protocol):
    """Where candidates run. Each call ends within its `seconds_max`, and a little for the end of a process.

    If that time is over and the candidate is not to blame, `judge` and `round` raise TimeoutError.
    """

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def compile(self, candidate: Candidate, seconds_max: float) -> Prepared:
        """Compile, or take what is compiled. Raises LostError, LateError if the time is over."""

    def judge(self, key: str, seconds_max: float) -> tuple[Judgement, bool]:
        """Return what the gate says, and whether rows influence each other. Raises LostError."""

    def round(self, key: str, sizes: Sequence[int], seconds_max: float) -> Round:
        """Measure baseline and candidate in the order A B B A at each size. Raises LostError."""

    def tell(self, event: RaceEvent) -> None:
        """Report progress."""


class Result(NamedTuple):
    """What came of a race: all rows, the fastest first, and what serves from now on."""

    rows: tuple[Row, ...]
    choice: Choice


class Race:
    """One race.

    Args:
        candidates: those of a target in the order in which they are tried; targets take turns.
        weights: batch size -> share of the runs; all sizes are measured.
        budget: of the whole race, from its beginning.
        estimates: by keys of candidates and names of targets, what earlier races say.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        weights: Mapping[int, float],
        budget: Budget,
        track: Track,
        seed: int = 0,
        estimates: Mapping[str, Estimate] | None = None,
    ) -> None:
        self._estimates = estimates or {}
        self._candidates = entry_order(candidates, self._estimates)
        self._weights = dict(sorted(weights.items()))
        self._budget = budget
        self._track = track
        self._seed = seed
        self._rows: dict[str, Row] = {}
        self._rounds: dict[str, list[Round]] = {}
        self._dropped: dict[str, list[Round]] = {}  # slower than others; they come back if those are lost
        self._cost_s: dict[str, float] = {}  # of the last round
        self._unjudged: set[str] = set()
        self._late: list[tuple[Candidate, float]] = []  # compilations that took longer than this limit
        self._late_s: dict[str, float] = {}  # target -> longest limit that one of its compilations did not meet
        self._long: list[Candidate] = []  # compilations that are expected to take longer than their limit

    def run(self) -> Result:
        """Race within the budget. Returns rows and choice; candidates that found no time are skipped."""
        self._enter_all()
        self._judge_all()
        rung = 1
        while len(alive := ranking(self._rounds, self._weights)) > FINALISTS:
            kept = survivors(self._rounds, self._weights)
            if len(kept) == len(alive) or not self._affords(kept, rounds_in(rung)):
                break
            self._drop(set(alive) - set(kept))
            for key in kept:
                self._measure(key, rounds_in(rung))
            rung += 1
        self._final()
        choice = choose(self._measured(), self._weights, self._seed)
        rows = [self._finished(row, choice) for row in self._rows.values()]
        rows.sort(key=lambda row: (row.verdict != "won", -(row.ratio or 0.0), row.candidate))
        return Result(tuple(rows), choice)

    def _now(self) -> float:
        return self._track.now()

    def _enter_all(self) -> None:
        """Compile all candidates for which there is time; those that take long are tried after the others."""
        for at, candidate in enumerate(self._candidates):
            expected_s, usual_s = self._expected_s(candidate), self._usual_s(candidate)
            limit_s = self._budget.compile_s_max(self._now(), len(self._candidates) - at, usual_s)
            late_s = self._late_s.get(candidate.target, 0.0) * AGAIN_MIN
            if limit_s and max(expected_s or 0.0, late_s) > limit_s:
                self._long.append(candidate)
                self._rows[candidate.key] = self._row_of(candidate)
            else:
                self._enter(candidate, limit_s)
        for candidate, limit_s in self._late:
            again_s = min(limit_s * COMPILE_PARTS, self._budget.entry_left_s(self._now()))
            if again_s >= limit_s * AGAIN_MIN:
                self._enter(candidate, again_s)
        for candidate in self._long:
            self._enter_long(candidate)

    def _enter_long(self, candidate: Candidate) -> None:
        """Try a candidate that is expected to take long with all the time that is left, unless that is hopeless."""
        late_s = self._late_s.get(candidate.target, 0.0)
        expected_s = max(self._expected_s(candidate) or 0.0, late_s * COMPILE_PARTS)
        left = self._budget.entry_left_s(self._now())
        if left >= max(COMPILE_S_MIN, ESTIMATE_LEAST * expected_s):
            self._enter(candidate, left)
            return
        why = reasons.compiles_too_long(expected_s, late_s, self._budget.seconds, candidate.key)
        self._rows[candidate.key] = self._rows[candidate.key].model_copy(update={"why": why})

    def _expected_s(self, candidate: Candidate) -> float | None:
        """Return what the compilation takes, by earlier races; None: they did not try its target."""
        known = candidate.key in self._estimates or candidate.target in self._estimates
        return estimate_of(candidate, self._estimates).seconds if known else None

    def _usual_s(self, candidate: Candidate) -> float | None:
        """Return what the compilation takes by earlier races, or as such targets do; None: nothing is known."""
        found = estimate_of(candidate, self._estimates)
        return None if found == UNKNOWN else found.seconds

    def _row_of(self, candidate: Candidate) -> Row:
        return Row(
            target=candidate.target,
            candidate=candidate.key,
            flags=candidate.flags,
            lossy=candidate.lossy,
            verdict="skipped",
            estimate_s=self._expected_s(candidate),
        )

    def _enter(self, candidate: Candidate, seconds_max: float) -> None:
        """Compile a candidate and measure it for the first time."""
        key = candidate.key
        earlier = self._rows.get(key)
        row = self._row_of(candidate)
        self._rows[key] = row
        if not seconds_max:
            self._rows[key] = row.model_copy(update={"why": reasons.not_compiled(self._budget.seconds)})
            return
        self._tell("compiling", key)
        began = self._now()
        try:
            prepared = self._track.compile(candidate, seconds_max)
        except LateError as late:
            if earlier is None:
                self._late.append((candidate, seconds_max))
            self._late_s[candidate.target] = max(seconds_max, self._late_s.get(candidate.target, 0.0))
            self._lose(key, late)
            seconds = late.seconds + (earlier.compile_s if earlier is not None else 0.0)
            why = reasons.compiled_late(late.why, self._budget.seconds, key)
            self._rows[key] = self._rows[key].model_copy(update={"compile_s": seconds, "late": True, "why": why})
            return
        except LostError as lost:
            self._lose(key, lost)
            self._rows[key] = self._rows[key].model_copy(update={"compile_s": self._now() - began})
            return
        self._rows[key] = row.model_copy(
            update={
                "compile_s": prepared.seconds,
                "cached": prepared.cached,
                "size_bytes": prepared.size_bytes,
                "folder": prepared.folder,
                "compiled": prepared.compiled,
                "stderr": prepared.stderr,
            }
        )
        self._rounds[key] = []
        self._unjudged.add(key)
        self._measure(key, rounds_in(0), entry=True)

    def _judge_all(self) -> None:
        """Judge what was measured, the fastest first; in a hurry as soon as one candidate passed.

        Those that are left are dropped.
        """
        order = ranking(self._rounds, self._weights)
        order += [key for key in self._rounds if key not in order]
        passed = False
        longest_s = 0.0
        for key in order:
            now = self._now()
            left = self._budget.judge_left_s(now) if passed else self._budget.left_s(now)
            if not self._rounds[key] or left <= 0 or (passed and longest_s > left):
                self._drop({key})
                continue
            if self._judge(key, left):
                passed = True
            longest_s = max(longest_s, self._now() - now)

    def _judge(self, key: str, seconds_max: float) -> bool:
        """Return whether a candidate passes the gate. One that does not is out of the race."""
        self._tell("judging", key)
        try:
            judgement, single = self._track.judge(key, seconds_max)
        except LostError as lost:
            self._lose(key, lost)
            return False
        except TimeoutError:
            self._drop({key})
            return False
        self._unjudged.discard(key)
        row = self._rows[key]
        why = judgement.why
        if not why and single and 1 not in self._weights:
            why = "its rows influence each other, and no run of this version has a single row"
        self._rows[key] = row.model_copy(
            update={
                "outputs": judgement.outputs,
                "cosine_min": judgement.cosine_min,
                "agreement_min": judgement.agreement_min,
                "single": single,
                "bounds": judgement.bounds,
                "verdict": "inaccurate" if judgement.why else "lost",
                "why": why,
                "compiled": None if judgement.why else row.compiled,
            }
        )
        if why:
            del self._rounds[key]
            return False
        if single:
            self._rounds[key] = [{1: found[1]} for found in self._rounds[key] if 1 in found]
            self._cost_s.pop(key, None)
        return True

    def _sizes(self, key: str) -> list[int]:
        return [1] if self._rows[key].single else list(self._weights)

    def _measure(self, key: str, rounds: int, *, entry: bool = False) -> None:
        """Measure a candidate while there is time; it is out of the race if that fails."""
        for _ in range(rounds):
            if key not in self._rounds:
                return
            left = self._budget.entry_left_s(self._now()) if entry else self._budget.left_s(self._now())
            if not left or self._cost_s.get(key, 0.0) > left:
                return
            began = self._now()
            try:
                self._rounds[key].append(self._track.round(key, self._sizes(key), left))
            except LostError as lost:
                self._lose(key, lost)
                return
            except TimeoutError:
                return
            self._cost_s[key] = self._now() - began
            self._tell("measuring", key)
            if entry and median_ratio(self._rounds[key], self._weights) < SLOW:
                return

    def _affords(self, keys: Sequence[str], rounds: int) -> bool:
        """Return whether a rung leaves the final its time."""
        costs = sorted((self._cost_s.get(key, 0.0) for key in keys), reverse=True)
        return sum(costs) * rounds + sum(costs[:FINALISTS]) * ROUNDS_MIN <= self._budget.left_s(self._now())

    def _final(self) -> None:
        """Measure the best, in turns, until their intervals are narrow or the budget ends."""
        alive = ranking(self._rounds, self._weights)
        self._drop(set(alive) - set(survivors(self._rounds, self._weights)))
        while True:
            self._recall()
            active = [key for key in self._rounds if not self._is_settled(key)]
            before = {key: len(rounds) for key, rounds in self._rounds.items()}
            for key in active:
                self._measure(key, 1)
            if not active or before == {key: len(rounds) for key, rounds in self._rounds.items()}:
                return

    def _recall(self) -> None:
        """Bring the best of the dropped back in place of finalists that were lost; unjudged ones where none is left."""
        while len(self._rounds) < FINALISTS:
            judged = {key: rounds for key, rounds in self._dropped.items() if key not in self._unjudged}
            best = ranking(judged, self._weights)[:1]
            if not best and not self._rounds:
                best = ranking(self._dropped, self._weights)[:1]
            left = self._budget.left_s(self._now())
            if not best or (best[0] in self._unjudged and not left):
                return
            [key] = best
            self._rounds[key] = self._dropped.pop(key)
            if key in self._unjudged and not self._judge(key, left) and key in self._dropped:
                return  # the budget ended

    def _is_settled(self, key: str) -> bool:
        return is_settled(self._rounds[key], self._weights, self._seed)

    def _drop(self, keys: set[str]) -> None:
        for key in sorted(keys):
            self._dropped[key] = self._rounds.pop(key)

    def _lose(self, key: str, lost: LostError) -> None:
        self._rounds.pop(key, None)
        update = {"verdict": lost.verdict, "why": lost.why, "compiled": None}
        self._rows[key] = self._rows[key].model_copy(update=update | ({"stderr": lost.stderr} if lost.stderr else {}))

    def _measured(self) -> list[Measured]:
        return [
            Measured(key, self._rows[key].lossy, self._rows[key].single, tuple(rounds))
            for key, rounds in self._rounds.items()
            if rounds
        ]

    def _finished(self, row: Row, choice: Choice) -> Row:
        """Return a row with its verdict and its ratios."""
        key = row.candidate
        rounds = self._rounds.get(key, self._dropped.get(key))
        if rounds is None:
            return row
        if not rounds:
            return row.model_copy(update={"verdict": "skipped", "why": reasons.not_measured(self._budget.seconds)})
        median, low, high = overall(rounds, self._weights, self._seed)
        ratios = {rows: tuple(found) for rows, found in by_size(rounds, self._seed).items()}
        update = {"rounds": len(rounds), "ratio": median, "ratio_low": low, "ratio_high": high, "ratios": ratios}
        row = row.model_copy(update=update)
        if key in self._unjudged:
            return row.model_copy(
                update={"compiled": None, **reasons.unjudged(len(rounds), choice, self._budget.seconds)}
            )
        if key in choice.table.values():
            sizes = ", ".join(str(size) for size, one in choice.table.items() if one == key)
            return row.model_copy(update={"verdict": "won", "why": f"serves batches of {sizes} rows"})
        return row.model_copy(
            update={"verdict": "lost", "why": reasons.lost(len(rounds), choice, dropped=key in self._dropped)}
        )

    def _tell(self, stage: Stage, key: str) -> None:
        ratios = {
            one: round(median_ratio(rounds, self._weights), 3)
            for one, rounds in {**self._dropped, **self._rounds}.items()
            if rounds
        }
        self._track.tell(
            RaceEvent(
                stage=stage,
                candidate=key,
                round=len(self._rounds.get(key, ())),
                done=len(self._rows) - len(self._rounds) - len(self._dropped),
                total=len(self._candidates),
                ratios=ratios,
                seconds=round(self._now() - self._budget.began, 3),
            )
        )
