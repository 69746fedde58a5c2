"""Predicts when a lane answers a request, from measured run times and from the real rate of replies. Pure.

put(run) ─> free_at, the instant at which a worker can begin the next batch <─ replied(run), which corrects `slowdown`
"""

from __future__ import annotations

from millstream.gateway.scheduling.request import Request
from millstream.services.model.profile import Profile

SLOWDOWN_SHARE = 1 / 16  # weight of the newest reply in the slowdown, a moving average
SLOWDOWN_MIN = 0.25
SLOWDOWN_MAX = 64.0  # bounds the predictions of a lane that gets less than 1/64 of its workers' time
OUTLIER = 4.0  # a ratio above this many times the slowdown is cut to it
UNTRIED_MARGIN = 2.0  # a run of more than twice the rows that ever ran may take this many times its prediction
DEVIATIONS = 3.0  # how many mean deviations of the slowdown `margin_s` covers


class LatencyEstimator:
    """Predictions for the batches of one lane. Instants and durations are seconds.

    `slowdown`: real seconds per predicted second. It is above 1 where runs are slower than at warm-up, or where other
    lanes and gateways share the workers. `full_s`: a run of a full batch, with the slowdown. `ample_s`: the time that a
    deadline must leave for such a run. `step_s`: how long it delays the next one; half of it with two instances.
    `margin_s`: how much later than predicted an answer may come. `free_at`: when a worker can begin the next batch;
    0: now.
    """

    __slots__ = (
        "_busy",
        "_count",
        "_deviation",
        "_instances",
        "_profile",
        "_rows_full",
        "_since",
        "_work_s",
        "ample_s",
        "free_at",
        "full_s",
        "margin_s",
        "slowdown",
        "step_s",
    )

    def __init__(self) -> None:
        self.slowdown = 1.0
        self.free_at = 0.0
        self.full_s = 0.0
        self.ample_s = 0.0
        self.step_s = 0.0
        self.margin_s = 0.0
        self._deviation = 0.0  # mean distance of real per predicted seconds from the slowdown
        self._profile = Profile({})
        self._rows_full = 1
        self._instances = 0
        self._count = 0  # batches in flight
        self._work_s = 0.0  # seconds of their predicted runs
        self._since = 0.0  # instant of the last reply, or of the put that ended an idle time
        self._busy = False  # whether `_since` is the instant of a reply

    def update(self, instances: int, profile: Profile, rows_full: int) -> None:
        """Apply the number of instances and their profile. `rows_full`: rows of a full batch."""
        # Compare a measured size: the prediction for other sizes may change without a change of any run time.
        ran = min(rows_full, self._profile.largest)
        known_s, measured_s = self._profile.predict(ran), profile.predict(ran)
        self._profile, self._rows_full = profile, rows_full
        if instances != self._instances:
            self._instances, self._busy = instances, False
        elif known_s and measured_s:
            # Workers correct their profiles by real run times, which the slowdown contains already.
            self.slowdown = min(max(self.slowdown * known_s / measured_s, SLOWDOWN_MIN), SLOWDOWN_MAX)
        self._scale()

    def _scale(self) -> None:
        full_s = self._profile.predict(self._rows_full)
        self.full_s = full_s * self.slowdown
        self.ample_s = self.full_s * (UNTRIED_MARGIN if self._rows_full > 2 * self._profile.largest else 1)
        self.step_s = self.full_s / max(1, self._instances)
        self.margin_s = full_s * self._deviation * DEVIATIONS

    def put(self, run_s: float, now: float) -> None:
        """Record that a batch was put. By the profile, its run takes `run_s`."""
        if not self._count:
            self._since, self._busy, self._work_s = now, False, 0.0
        self._count += 1
        self._work_s += run_s
        self._predict_free()

    def replied(self, run_s: float, now: float) -> None:
        """Record the reply to a batch, and correct the slowdown."""
        parallel = min(self._count, max(1, self._instances))
        if run_s:
            ratio = (now - self._since) * parallel / run_s
            # After an idle time the ratio contains the queue's round trip, which does not count under load.
            if self._busy or ratio < self.slowdown:
                # The bound by OUTLIER: a single pause of Redis or of a worker is no slowdown.
                off = min(max(ratio, SLOWDOWN_MIN), SLOWDOWN_MAX, self.slowdown * OUTLIER) - self.slowdown
                self.slowdown += off * SLOWDOWN_SHARE
                self._deviation += (abs(off) - self._deviation) * SLOWDOWN_SHARE
                self._scale()
        self._since, self._busy = now, True
        self.removed(run_s)

    def removed(self, run_s: float) -> None:
        """Record that a batch is no longer in flight: it has a reply, or was forgotten."""
        self._count -= 1
        self._work_s = max(0.0, self._work_s - run_s)
        self._predict_free()

    def _predict_free(self) -> None:
        """Set `free_at`: the next batch begins when enough batches are done for an instance to be free."""
        count, instances = self._count, self._instances
        if count < instances or not count:
            self.free_at = 0.0
        else:
            before = (count - instances + 1) / count
            self.free_at = self._since + self._work_s * before * self.slowdown / max(1, instances)

    def run_s(self, rows: int) -> float:
        """Return the seconds of a run of `rows`, with the slowdown."""
        return self._profile.predict(rows) * self.slowdown

    def rows_within(self, seconds: float) -> int:
        """Return the largest number of rows, at least 1, whose run takes at most `seconds`, with UNTRIED_MARGIN."""
        profile, seconds = self._profile, seconds / self.slowdown
        known = 2 * profile.largest
        if self._rows_full <= known:
            return profile.rows_within(seconds, self._rows_full)
        return max(profile.rows_within(seconds, known), profile.rows_within(seconds / UNTRIED_MARGIN, self._rows_full))

    def planned_s(self, request: Request) -> float:
        """Return the longest run that a request should be part of: half of its timeout, or a run of its own if longer.

        Half the timeout, because a request may arrive when a run has just begun (as in Nexus, Shen et al. 2019).
        """
        timeout_s = request.deadline - request.arrival
        if 2 * self.full_s <= timeout_s:
            return self.full_s
        return max(timeout_s / 2, self.run_s(request.rows))

    def answer_at(self, rows_ahead: int, request: Request) -> float:
        """Return when a request is answered that arrives now and waits behind `rows_ahead` rows."""
        start = max(self.free_at, request.arrival) + rows_ahead // self._rows_full * self.step_s
        return start + self.planned_s(request) + self.margin_s
