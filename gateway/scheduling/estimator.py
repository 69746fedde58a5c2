"""When a lane will have run what is before a request: measured run times, corrected by how fast replies really come. Pure.

put(run) ─> free_at, the instant at which a worker could begin the next batch <─ replied(run), which also sets the pace
"""

from __future__ import annotations

from millstream.gateway.scheduling.request import Request
from millstream.services.model.profile import Profile

PACE_SHARE = 1 / 16  # of the newest reply in the pace
PACE_MIN = 0.25
OUTLIER = 4.0  # times the pace: longer waits count as that
SWINGS = 3.0  # mean swings of the pace that are allowed for
PACE_MAX = 64.0  # a lane that gets less of the workers than that waits for them as if it got that


class LatencyEstimator:
    """Predictions for the batches of one lane. Instants and durations are seconds.

    `pace`: real seconds for each predicted one. Above 1 where runs are slower than at warm-up, or where other lanes and
    other gateways share the workers. `full_s`: a run of as many rows as run together, at that pace. `step_s`: how long
    such a run keeps the next one waiting; with two instances half of it. `margin_s`: what an answer may come later.
    """

    __slots__ = (
        "_busy",
        "_count",
        "_instances",
        "_profile",
        "_rows_full",
        "_since",
        "_swing",
        "_work_s",
        "free_at",
        "full_s",
        "margin_s",
        "pace",
        "step_s",
    )

    def __init__(self) -> None:
        self.pace = 1.0
        self.free_at = 0.0
        self.full_s = 0.0
        self.step_s = 0.0
        self.margin_s = 0.0
        self._swing = 0.0  # mean distance of the ratios of real to predicted from the pace
        self._profile = Profile({})
        self._rows_full = 1
        self._instances = 0
        self._count = 0  # batches that are out
        self._work_s = 0.0  # what they run, as predicted
        self._since = 0.0  # of the last reply, or of the put that ended an idle time
        self._busy = False  # whether it was a reply

    def place(self, instances: int, profile: Profile, rows_full: int) -> None:
        """What is known of the lane's instances. `rows_full`: that run together."""
        # Of a size that ran: what is predicted for others may change without any run being faster.
        ran = min(rows_full, self._profile.largest)
        known_s, measured_s = self._profile.predict(ran), profile.predict(ran)
        self._profile, self._rows_full = profile, rows_full
        if instances != self._instances:
            self._instances, self._busy = instances, False
        elif known_s and measured_s:
            # Workers correct their profiles by what runs really take: that is in the pace already.
            self.pace = min(max(self.pace * known_s / measured_s, PACE_MIN), PACE_MAX)
        self._scale()

    def _scale(self) -> None:
        full_s = self._profile.predict(self._rows_full)
        self.full_s = full_s * self.pace
        self.step_s = self.full_s / max(1, self._instances)
        self.margin_s = full_s * self._swing * SWINGS

    def put(self, run_s: float, now: float) -> None:
        """A batch left that runs for `run_s` by its profile."""
        if not self._count:
            self._since, self._busy, self._work_s = now, False, 0.0
        self._count += 1
        self._work_s += run_s
        self._look_ahead()

    def replied(self, run_s: float, now: float) -> None:
        """It came back."""
        at_once = min(self._count, max(1, self._instances))
        if run_s:
            ratio = (now - self._since) * at_once / run_s
            # After an idle time the way through the queue is in it, which says nothing of how fast many are served.
            if self._busy or ratio < self.pace:
                # One pause, of Redis or of a worker, is no pace.
                off = min(max(ratio, PACE_MIN), PACE_MAX, self.pace * OUTLIER) - self.pace
                self.pace += off * PACE_SHARE
                self._swing += (abs(off) - self._swing) * PACE_SHARE
                self._scale()
        self._since, self._busy = now, True
        self.gone(run_s)

    def gone(self, run_s: float) -> None:
        """It is out no more: it came back, or was forgotten."""
        self._count -= 1
        self._work_s = max(0.0, self._work_s - run_s)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """The next batch begins when so many are done that an instance is free, the last of which began at `_since`."""
        count, instances = self._count, self._instances
        if count < instances or not count:
            self.free_at = 0.0
        else:
            before = (count - instances + 1) / count
            self.free_at = self._since + self._work_s * before * self.pace / max(1, instances)

    def run_s(self, rows: int) -> float:
        """How long a run of `rows` takes, at the pace."""
        return self._profile.predict(rows) * self.pace

    def rows_within(self, seconds: float) -> int:
        """The most rows that run in that time, but at least one."""
        return self._profile.rows_within(seconds / self.pace, self._rows_full)

    def planned_s(self, request: Request) -> float:
        """The longest run that a request is to be part of: half of its time, since it may come when one has just begun.

        (As in Nexus, Shen et al. 2019. A request that allows no more than a run of its own gets that.)
        """
        timeout_s = request.deadline - request.arrival
        if 2 * self.full_s <= timeout_s:
            return self.full_s
        return max(timeout_s / 2, self.run_s(request.rows))

    def answer_at(self, rows_ahead: int, request: Request) -> float:
        """When a request is answered that came now and waits behind `rows_ahead`."""
        start = max(self.free_at, request.arrival) + rows_ahead // self._rows_full * self.step_s
        return start + self.planned_s(request) + self.margin_s
