"""How soon a model is likely to be called again, from the times between its calls so far. Pure.

calls ─> Usage.called(now) ─> gaps in a histogram of logarithmic buckets ─> next_use_probability, expected_at

A histogram of idle times for each model, with a heavy-tailed prior for the few first calls, is the predictor of
"Serverless in the Wild" (Shahrad et al., USENIX ATC 2020). Buckets grow by a quarter of an octave, so that a model
that is called like clockwork stands out within a few calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

GAP_S_MIN = 0.1  # gaps up to this are one bucket: calls of one burst
BUCKETS_PER_OCTAVE = 4
BUCKET_MAX = 100  # about 39 days
#: Weight of the prior, in calls: P(no call within a further h | none for a) = a0 / (a0 + h), a0 = a + PRIOR_S.
PRIOR_CALLS = 1.0
PRIOR_S = 60.0
HALVE_AT = 64  # a histogram with so many gaps is halved, so that a model may change its habits
CLOCKWORK_CALLS_MIN = 4  # gaps before a model counts as called like clockwork
CLOCKWORK_SHARE = 0.8  # of the gaps that must be in neighbouring buckets


def bucket_of(gap_s: float) -> int:
    """Return the bucket of a gap."""
    if gap_s <= GAP_S_MIN:
        return 0
    return min(BUCKET_MAX, 1 + int(BUCKETS_PER_OCTAVE * math.log2(gap_s / GAP_S_MIN)))


def bucket_end_s(bucket: int) -> float:
    """Return the largest gap of a bucket."""
    return float(GAP_S_MIN * 2 ** (bucket / BUCKETS_PER_OCTAVE))


@dataclass(frozen=True, slots=True)
class Usage:
    """The gaps between the calls of one model: bucket -> count."""

    gaps: Mapping[int, float] = field(default_factory=dict)

    def with_gap(self, gap_s: float) -> Usage:
        """Return the usage after a call that came `gap_s` after the call before it."""
        gaps = dict(self.gaps)
        if sum(gaps.values()) >= HALVE_AT:
            gaps = {bucket: count / 2 for bucket, count in gaps.items() if count >= 1}
        bucket = bucket_of(gap_s)
        gaps[bucket] = gaps.get(bucket, 0.0) + 1
        return Usage(gaps)

    def next_use_probability(self, idle_s: float, horizon_s: float) -> float:
        """Return the probability of a call within `horizon_s`, for a model without a call for `idle_s`."""
        longer = within = 0.0
        for bucket, count in self.gaps.items():
            end_s = bucket_end_s(bucket)
            if end_s > idle_s:
                longer += count
                if end_s <= idle_s + horizon_s:
                    within += count
        prior = horizon_s / (idle_s + PRIOR_S + horizon_s)
        return (within + PRIOR_CALLS * prior) / (longer + PRIOR_CALLS)

    @property
    def period_s(self) -> float:
        """The time between calls of a model that is called like clockwork; 0 for every other model."""
        total = sum(self.gaps.values())
        if total < CLOCKWORK_CALLS_MIN:
            return 0.0
        bucket, _ = max(self.gaps.items(), key=lambda item: (item[1], item[0]))
        near = {one: self.gaps.get(one, 0.0) for one in (bucket - 1, bucket, bucket + 1)}
        if bucket <= 1 or sum(near.values()) < CLOCKWORK_SHARE * total:
            return 0.0
        return sum(count * _middle_s(one) for one, count in near.items()) / sum(near.values())

    def pack(self) -> dict[str, float]:
        """Return it as a JSON object."""
        return {str(bucket): round(count, 3) for bucket, count in self.gaps.items()}

    @staticmethod
    def unpack(packed: Mapping[str, float]) -> Usage:
        """Return the usage that `pack` wrote. Raises ValueError if it is not one."""
        gaps = {int(bucket): float(count) for bucket, count in packed.items()}
        if any(not 0 <= bucket <= BUCKET_MAX or not 0 <= count < math.inf for bucket, count in gaps.items()):
            raise ValueError("not a histogram of gaps")
        return Usage(gaps)


def _middle_s(bucket: int) -> float:
    return math.sqrt(bucket_end_s(bucket) * bucket_end_s(max(0, bucket - 1)))


NO_USAGE = Usage()
