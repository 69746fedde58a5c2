"""How soon a model is likely to be called again, from the times between its calls so far. Pure.

calls ─> Usage.with_gap ─> gaps in a histogram of logarithmic buckets ─> next_use_probability, period_s

A histogram of idle times for each model, with a heavy-tailed prior for what the histogram does not know, is the
predictor of "Serverless in the Wild" (Shahrad et al., USENIX ATC 2020). Buckets grow by a quarter of an octave, so
that a gap is known to a fifth. Beside it, a mean and a mean deviation (as TCP keeps them of round trips, RFC 6298)
tell models that are called like clockwork from all others, and give their period more exactly than a bucket does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

GAP_S_MIN = 1.0  # gaps up to this are one bucket: calls of one burst, between which no model is unloaded
BUCKETS_PER_OCTAVE = 4
BUCKET_MAX = 100  # about a year
#: Weight of the prior, in calls: P(no call within a further h | none for a) = a0 / (a0 + h), where a0 = a + scale.
#: Three: with one, a model with one or two gaps, as most are, is judged by accident (docs/multi-model.md).
PRIOR_CALLS = 3.0
PRIOR_S = 60.0  # scale of the prior for a model without a gap; with gaps: their mean
HALVE_AT = 64  # a histogram with this number of gaps is halved, so that it follows a model that changes its habits
DEVIATION_GAIN = 0.25  # weight of the newest gap in mean and mean deviation
CLOCKWORK_GAPS_MIN = 6  # gaps before a model counts as called like clockwork
CLOCKWORK_DEVIATION = 0.1  # largest mean deviation of its gaps, as a share of their mean
CLOCKWORK_SPREAD = 3.0  # mean deviations around the expected instant within which the call comes
CLOCKWORK_SPREAD_MIN = 0.01  # at least this share of the period

_MEAN, _DEVIATION, _COUNT = "mean", "deviation", "count"  # in the packed form, beside the buckets


def bucket_of(gap_s: float) -> int:
    """Return the bucket of a gap."""
    if gap_s <= GAP_S_MIN:
        return 0
    return min(BUCKET_MAX, math.ceil(BUCKETS_PER_OCTAVE * math.log2(gap_s / GAP_S_MIN)))


def bucket_end_s(bucket: int) -> float:
    """Return the largest gap of a bucket."""
    return float(GAP_S_MIN * 2 ** (bucket / BUCKETS_PER_OCTAVE))


_ENDS_S = tuple(bucket_end_s(bucket) for bucket in range(BUCKET_MAX + 1))


@dataclass(frozen=True, slots=True)
class Usage:
    """The gaps between the calls of one model.

    Args:
        gaps: bucket -> number of gaps; halved now and then, so not whole.
        mean_s: mean of the gaps that are longer than GAP_S_MIN, the last ones weighing most.
        deviation_s: their mean deviation from that mean.
        count: number of gaps in the mean.
    """

    gaps: Mapping[int, float] = field(default_factory=dict)
    mean_s: float = 0.0
    deviation_s: float = 0.0
    count: int = 0

    def with_gap(self, gap_s: float) -> Usage:
        """Return the usage after a call that came `gap_s` after the call before it."""
        bucket = bucket_of(gap_s)
        if bucket == 0:
            return self._with_burst_gap()
        gaps = dict(self.gaps)
        if sum(gaps.values()) - gaps.get(0, 0.0) >= HALVE_AT:
            gaps = {one: number / 2 for one, number in gaps.items() if number >= 1}
        gaps[bucket] = gaps.get(bucket, 0.0) + 1
        if self.count == 0:
            return Usage(gaps, gap_s, gap_s / 2, 1)
        error_s = gap_s - self.mean_s
        return Usage(
            gaps,
            self.mean_s + DEVIATION_GAIN * error_s,
            self.deviation_s + DEVIATION_GAIN * (abs(error_s) - self.deviation_s),
            self.count + 1,
        )

    def _with_burst_gap(self) -> Usage:
        """Count a gap within a burst. A long burst must not push the gaps between bursts out of the histogram."""
        number = self.gaps.get(0, 0.0)
        if number >= HALVE_AT:
            return self
        return Usage({**self.gaps, 0: number + 1}, self.mean_s, self.deviation_s, self.count)

    def next_use_probability(self, idle_s: float, horizon_s: float) -> float:
        """Return the probability of a call within `horizon_s`, for a model without a call for `idle_s`."""
        until_s = idle_s + horizon_s
        prior = horizon_s / (until_s + self.scale_s) if horizon_s else 0.0
        period_s = self.period_s
        if period_s:
            spread_s = max(self.deviation_s * CLOCKWORK_SPREAD, CLOCKWORK_SPREAD_MIN * period_s)
            if idle_s < period_s + spread_s:
                expected = min(1.0, max(0.0, (until_s - period_s + spread_s) / (2 * spread_s)))
                return (self.count * expected + PRIOR_CALLS * prior) / (self.count + PRIOR_CALLS)
        longer = within = 0.0
        for bucket, number in self.gaps.items():
            end_s = _ENDS_S[bucket]
            if end_s <= idle_s:
                continue
            # The gaps of a bucket are taken as spread evenly between its ends.
            start_s = _ENDS_S[bucket - 1] if bucket else 0.0
            if start_s < idle_s:
                number *= (end_s - idle_s) / (end_s - start_s)
                start_s = idle_s
            longer += number
            if end_s <= until_s:
                within += number
            elif start_s < until_s:
                within += number * (until_s - start_s) / (end_s - start_s)
        return (within + PRIOR_CALLS * prior) / (longer + PRIOR_CALLS)

    @property
    def scale_s(self) -> float:
        """The time in which a call is likely, for a model whose histogram does not say more."""
        if self.count:
            return self.mean_s
        return GAP_S_MIN if self.gaps else PRIOR_S

    @property
    def period_s(self) -> float:
        """The time between calls of a model that is called like clockwork; 0 for every other model."""
        if self.count < CLOCKWORK_GAPS_MIN or self.deviation_s > CLOCKWORK_DEVIATION * self.mean_s:
            return 0.0
        return self.mean_s

    def pack(self) -> dict[str, float]:
        """Return it as a JSON object; empty for no usage."""
        packed = {str(bucket): round(number, 3) for bucket, number in self.gaps.items()}
        if self.count:
            packed |= {_MEAN: round(self.mean_s, 3), _DEVIATION: round(self.deviation_s, 3), _COUNT: self.count}
        return packed

    @staticmethod
    def unpack(packed: Mapping[str, float]) -> Usage:
        """Return the usage that `pack` wrote; names that a later release adds are left out. Raises ValueError."""
        gaps = {int(name): float(number) for name, number in packed.items() if not name.isalpha()}
        mean_s, deviation_s, count = (float(packed.get(name, 0.0)) for name in (_MEAN, _DEVIATION, _COUNT))
        values = (*gaps.values(), mean_s, deviation_s, count)
        if any(not 0 <= bucket <= BUCKET_MAX for bucket in gaps) or any(not 0 <= value < math.inf for value in values):
            raise ValueError("not a histogram of gaps")
        return Usage(gaps, mean_s, deviation_s, int(count))


NO_USAGE = Usage()
