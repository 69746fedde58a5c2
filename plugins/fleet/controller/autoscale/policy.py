"""Decides how many workers a pool needs. Pure.

PoolFacts ─> envelope ─> needs of arrivals and backlog ─> up at once, down after `down_s` ─> limits ─> Decision

One formula: n workers answer what arrives in a window within the window and the latency target if
work(window) <= n x (window + slack). Windows shorter than a worker's start do not count: a burst that the workers of
now have answered before a further one could serve is not worth a start.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from millstream.plugins.fleet.controller.autoscale.decision import Decision, PoolFacts, Reason, ScaleLimits
from millstream.plugins.fleet.controller.autoscale.history import WINDOWS_S, Envelope, Largest, Recurrence

UTILISATION = 0.8  # share of a worker's time that is planned for runs: the rest takes what full batches do not
#: Workers go only when those that stay would be busy for at most this share of what is planned: without it a load
#: between two sizes would change the pool again and again.
SHRINK_SHARE = 0.9
#: Longer windows than this share of `down_s` do not count: workers would stay for both, one after the other.
LONGEST_SHARE = 0.25
RECOVER_S = 10.0  # in which a backlog is to be worked off, once further workers serve
#: Share of a worker's start: the window whose rate counts as that of now, once a backlog is worth a start.
RECENT_SHARE = 0.2
#: Share of `down_s` after a change within which no worker goes: a pool shrinks in few steps.
PAUSE_SHARE = 0.25
START_S_MIN, START_S_MAX = 1.0, 600.0
_TINY = 1e-6  # workers: rounding errors start none


class Need(NamedTuple):
    """How many workers something needs, not rounded, and why."""

    workers: float
    reason: Reason
    line: str


class PoolPolicy:
    """The policy of one pool. Call `decide` about once a second; instants must not decrease.

    Args:
        pool: its name.
        limits: what is allowed; may be replaced between two calls.
        kept: workers that stay for the first `down_s`: what an earlier leader wanted, or what runs already.
        explained: whether decisions carry their arithmetic; simulations need none.
    """

    def __init__(self, pool: str, limits: ScaleLimits, kept: int = 0, *, explained: bool = True) -> None:
        self.pool = pool
        self.limits = limits
        self._envelope = Envelope()
        self._needed = Largest()
        self._recurrence = Recurrence()
        self._largest = {window_s: Largest() for window_s in WINDOWS_S}
        self._kept = kept
        self._wanted: int | None = None
        self._changed_at = -math.inf
        self._explained = explained

    def decide(self, facts: PoolFacts, now: float) -> Decision:
        """Return how many workers the pool needs now."""
        limits, envelope = self.limits, self._envelope
        envelope.add(now, facts.work_s, facts.rows)
        if self._explained:
            for window_s, largest in self._largest.items():
                largest.add(now, envelope.rate(window_s))
                largest.forget(now - WINDOWS_S[-1])
        start_s = min(max(facts.start_s, START_S_MIN), START_S_MAX)
        slack_s = max(limits.latency_s - facts.run_s, facts.run_s)
        arrivals = self._of_arrivals(start_s, slack_s)
        backlog = self._of_backlog(facts, start_s)
        need = max(arrivals, backlog, key=lambda one: one.workers)
        if self._wanted is None:  # earlier needs are not known: what runs stays
            self._wanted = min(max(self._kept, facts.ready), limits.workers_max)
            self._needed.add(now, self._wanted * SHRINK_SHARE)
        self._needed.add(now, need.workers)
        lately = self._needed.within(now, limits.down_s)[1]
        self._recurrence.needed(_whole(need.workers), _whole(lately / SHRINK_SHARE), now)
        self._needed.forget(now - max(limits.down_s, self._recurrence.keep_s))
        wanted, reason, lines = self._settle(need, now)
        if not limits.bounded:
            wanted, reason = facts.running, Reason.UNBOUNDED.value
            lines[-1] = f"no limits are set for this pool (MILLSTREAM_POOLS): its {wanted} workers stay"
            limits = replace(limits, workers_min=wanted, workers_max=wanted)
        if wanted != self._wanted:
            self._changed(wanted, now)
        row_s = facts.row_s
        capacity = facts.ready / row_s if row_s else 0.0
        rate = envelope.rate(start_s)
        return Decision(
            self.pool,
            wanted,
            facts.ready,
            limits.workers_min,
            limits.workers_max,
            facts.queue_rows,
            facts.oldest_wait_s,
            envelope.rows_per_s(start_s),
            capacity,
            rate / facts.ready if facts.ready else float(rate > 0),
            reason,
            now,
            start_s,
            self._explain(facts, slack_s, arrivals, backlog, lines),
        )

    def _of_arrivals(self, start_s: float, slack_s: float) -> Need:
        """Return the most that a window needs which ends now, of those that are as long as a worker's start."""
        envelope = self._envelope
        best, at = 0.0, start_s
        longest_s = max(start_s, min(self.limits.down_s * LONGEST_SHARE, envelope.known_s))
        if envelope.rows_per_s(longest_s):
            best = 2 * _TINY  # whatever arrives needs a worker, also if its run time is not known
        for window_s in sorted({start_s, *WINDOWS_S}):
            if start_s <= window_s <= longest_s:
                need = envelope.rate(window_s) * window_s / (window_s + slack_s) / UTILISATION
                if need > best + _TINY:
                    best, at = need, window_s
        work, slack = _plain(envelope.rate(at) * at), _plain(slack_s)
        line = (
            f"arrivals: {_plain(envelope.rate(at))} workers busy over {_plain(at)} s; {work} s of work / "
            f"({_plain(at)} s + {slack} s) / {UTILISATION:.0%} = {_plain(best)} workers"
        )
        return Need(best, Reason.ARRIVALS, line)

    def _of_backlog(self, facts: PoolFacts, start_s: float) -> Need:
        """Return what it takes to work off in RECOVER_S what still waits when a further worker could serve."""
        rate = self._envelope.rate(start_s)
        left_s = facts.queue_work_s + (rate - facts.ready) * start_s
        work = f"{_plain(facts.queue_work_s)} s of work"
        waits = f"backlog: {work} + ({_plain(rate)} - {facts.ready}) x {_plain(start_s)} s"
        if not facts.queue_rows or (left_s <= 0 and facts.ready):
            left = _plain(max(0.0, left_s))
            return Need(0.0, Reason.BACKLOG, f"{waits} = {left} s when a further worker could serve")
        now_rate = rate
        if facts.queue_work_s > facts.ready * start_s:
            # What waits now is worth a start, whatever arrives later: follow the rate of now, not the mean of a start.
            now_rate = max(rate, self._envelope.rate(start_s * RECENT_SHARE))
        need = now_rate + left_s / RECOVER_S
        return Need(
            max(need, 2 * _TINY),
            Reason.BACKLOG,
            f"{waits} = {_plain(left_s)} s; "
            f"{_plain(now_rate)} + {_plain(left_s)} s / {RECOVER_S:g} s = {_plain(need)} workers",
        )

    def _settle(self, need: Need, now: float) -> tuple[int, str, list[str]]:
        """Return how many workers are wanted, why, and the rest of the arithmetic."""
        limits = self.limits
        needed = _whole(need.workers)
        before = self._wanted or 0
        kept, reason, lines = self._kept_now(before, now)
        if now - self._changed_at < limits.down_s * PAUSE_SHARE and kept:
            kept = before
        wanted, reason = max((needed, need.reason), (kept, reason), key=lambda one: one[0])
        if wanted == needed:
            reason = need.reason if needed else Reason.IDLE
        lines.insert(0, f"needed now: {_plain(need.workers)}, so {needed}")
        limited = min(max(wanted, limits.workers_min), limits.workers_max)
        if limited != wanted:
            lines.append(f"limits {limits.workers_min} to {limits.workers_max}: {wanted} becomes {limited}")
            reason = Reason.MAXIMUM if limited < wanted else reason if reason is Reason.IDLE else Reason.MINIMUM
        lines.append(f"wanted: {limited} ({reason.value})")
        return limited, reason.value, lines

    def _kept_now(self, before: int, now: float) -> tuple[int, Reason, list[str]]:
        """Return how many of the workers stay that are not needed now, why, and the arithmetic."""
        down_s, keep_s = self.limits.down_s, self._recurrence.keep_s
        needed_at, largest = self._needed.within(now, down_s)
        kept = min(before, _whole(largest / SHRINK_SHARE))
        age_s = now - needed_at
        lines = [
            f"needed in the last {down_s:g} s: up to {_plain(largest)}, {age_s:.0f} s ago; of {before}, {kept} stay"
        ]
        if keep_s <= down_s:
            return kept, Reason.HELD, lines
        needed_at, largest = self._needed.within(now, keep_s)
        recurring = min(before, _whole(largest / SHRINK_SHARE))
        if largest <= 1 or recurring <= kept:  # a pool that may have no worker keeps none for a single call
            return kept, Reason.HELD, lines
        lines.append(
            f"bursts recur: what was needed in the last {keep_s:.0f} s stays: up to {_plain(largest)}, "
            f"{now - needed_at:.0f} s ago; of {before}, {recurring} stay"
        )
        return recurring, Reason.RECURRING, lines

    def _changed(self, wanted: int, now: float) -> None:
        """Note a change of the number of workers. Call it before `wanted` is replaced."""
        assert self._wanted is not None
        if wanted > self._wanted:
            self._recurrence.grew(now)
        else:
            self._recurrence.shrank(now - max(self.limits.down_s, self._recurrence.keep_s))
        self._wanted, self._changed_at = wanted, now

    def _explain(
        self, facts: PoolFacts, slack_s: float, arrivals: Need, backlog: Need, lines: list[str]
    ) -> tuple[str, ...]:
        """Return the arithmetic of a decision, line by line."""
        if not self._explained:
            return ()
        return (*self._facts_lines(facts, slack_s), arrivals.line, backlog.line, *lines)

    def _facts_lines(self, facts: PoolFacts, slack_s: float) -> list[str]:
        start_s = min(max(facts.start_s, START_S_MIN), START_S_MAX)
        capacity = facts.ready / facts.row_s if facts.row_s else 0.0
        row = f"{_plain(facts.row_s * 1000)} ms" if facts.row_s else "unknown"
        oldest, run = _plain(facts.oldest_wait_s), f"{_plain(facts.run_s * 1000)} ms"
        largest = ", ".join(
            f"{window_s:g} s {_plain(peak)}"
            for window_s, values in self._largest.items()
            if (peak := values.within(self._envelope.end, WINDOWS_S[-1])[1]) and window_s <= self._envelope.known_s
        )
        return [
            f"workers: {facts.ready} ready; a further one serves after {_plain(start_s)} s",
            f"capacity: a row takes {row}, so the ready workers answer {_plain(capacity)} rows/s",
            f"queue: {facts.queue_rows:g} rows, {_plain(facts.queue_work_s)} s of work, oldest {oldest} s",
            f"latency: target {_plain(self.limits.latency_s)} s - longest run {run}: slack {_plain(slack_s)} s",
            f"largest rates of the last 10 min, by window, in busy workers: {largest or 'none yet'}",
        ]


def _whole(workers: float) -> int:
    return math.ceil(workers - _TINY)


def _plain(number: float) -> str:
    """Return a number with three digits and without an exponent."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{float(f'{number:.3g}'):.12f}".rstrip("0").rstrip(".")
