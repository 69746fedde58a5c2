"""Predicts when a lane answers, and decides when a batch leaves it, how many rows it takes, and how many leave. Pure.

workers' report, other lanes in use ─> credits, batch_rows
waiting requests, batches in flight, time ─> rows_to_take ─> rows of the next batch, HOLD or EXPIRE
rows of an efficient run ─(other lanes of the pool in use)─> shared_rows ─(a deadline is near)─>
LatencyEstimator.rows_within ─(the version has preferred sizes)─> preferred_rows, or a wait for more requests

put(run) ─> free_at, the instant at which a worker can begin the next batch <─ replied(run), which corrects `slowdown`
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.gateway.scheduling.batching.batcher import Batcher
from millstream.gateway.scheduling.batching.queue_policy import QueueRules
from millstream.gateway.scheduling.request import Request
from millstream.services.model.manifest import ModelConfig
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


DEPTH = 2  # batches in flight per instance: one runs, the next waits at the worker
SHORT_RUN_S = 0.001  # shorter runs end before a batch sent ahead could arrive
#: Shorter runs are comparable to the queue's round trip. A worker asks for more when it starts a run, with the reply
#: that frees a slot: the slot is refilled one run plus one round trip later. One extra batch fills the gap.
LONG_RUN_S = 0.02

#: Bounds a run while other lanes of the pool are in use, because they wait for it. If TURN_RUNS times the run of one
#: row is longer, that is the bound: splitting a batch into runs that are hardly shorter gains nothing.
TURN_S = 0.01
TURN_RUNS = 1.5
IN_USE_S = 1.0  # a lane counts as in use for this long after its last batch

HOLD = 0  # returned by `rows_to_take`: no batch leaves now
EXPIRE = -1  # returned by `rows_to_take`: the request with the earliest deadline cannot be answered in time


class Contention:
    """Which lanes of one pool are in use. Instants are seconds on one clock."""

    __slots__ = ("_last", "_last_at", "_other_at")

    def __init__(self) -> None:
        self._last: object = None  # the lane that put last
        self._last_at = float("-inf")
        self._other_at = float("-inf")  # when another lane put its last batch

    def put(self, lane: object, now: float) -> None:
        """Record that a lane put a batch."""
        if lane is not self._last:
            self._last, self._other_at = lane, self._last_at
        self._last_at = now

    def others_active(self, lane: object, now: float) -> bool:
        """Whether a lane other than `lane` is in use."""
        at = self._other_at if lane is self._last else self._last_at
        return now - at < IN_USE_S


class DispatchPolicy:
    """Decides the size and number of one lane's batches. Instants are seconds on the lane's clock, passed in.

    `credits`: batches that may be in flight; `depth`: how many of one instance. `batch_rows`: rows that run together
    now. `others_active`: whether other lanes of the pool are in use.
    """

    __slots__ = (
        "_delay_s",
        "_has_queue_rules",
        "_preferred",
        "_profile",
        "_rows_ahead_min",
        "_rows_efficient",
        "_rows_max",
        "_streams",
        "batch_rows",
        "credits",
        "depth",
        "estimator",
        "instances",
        "others_active",
    )

    def __init__(self, config: ModelConfig, rows_max: int, *, batching: bool, streams: int = 0) -> None:
        """Args:
        rows_max: the most rows of a batch.
        batching: whether requests of the version may share a run.
        streams: requests that an instance answers at once, as in a manifest.
        """
        self.instances = 0
        self.credits = 0
        self.depth = DEPTH
        self.batch_rows = rows_max
        self.others_active = False
        self.estimator = LatencyEstimator()
        self._profile = Profile({})
        self._rows_max = rows_max
        self._rows_efficient = rows_max
        self._rows_ahead_min = 0  # rows that a batch must have to leave while every instance has one
        self._preferred = config.rows_preferred if batching else ()
        self._delay_s = config.queue_delay_ms_max / 1000
        self._streams = streams
        self._has_queue_rules = QueueRules.needed(config)

    def update(self, instances: int, profile: Profile, rows_efficient: int, *, batching_off: bool) -> None:
        """Apply what the workers report.

        Args:
            instances: ready instances.
            profile: measured run times.
            rows_efficient: rows of an efficient run.
            batching_off: each request runs alone, because rows of this version were found to influence each other.
        """
        self.instances = instances
        self._profile = profile
        self._rows_efficient = 1 if batching_off else min(self._rows_max, max((rows_efficient, *self._preferred)))
        self._resize()

    def share_pool(self, others_active: bool) -> None:
        """Resize batches after a change of whether other lanes of the pool are in use."""
        self.others_active = others_active
        self._resize()

    def _resize(self) -> None:
        """Set `batch_rows` and `credits`. A lane alone in its pool runs as many rows as are efficient."""
        profile = self._profile
        rows = shared_rows(profile, self._rows_efficient) if self.others_active else self._rows_efficient
        self.batch_rows = rows
        gap = SHORT_RUN_S <= profile.predict(rows) < LONG_RUN_S
        self.depth = self._streams or (DEPTH + 1 if gap else DEPTH)
        self.credits = self.instances * self.depth
        self.estimator.update(self.instances, profile, rows)

    def run_s(self, rows: int) -> float:
        """Return the measured seconds of a run of `rows`; 0 while nothing was measured."""
        return self._profile.predict(rows)

    @property
    def full_batch_s(self) -> float:
        """Measured seconds of a full batch; 0 while nothing was measured."""
        return self.run_s(self.batch_rows)

    @property
    def row_s(self) -> float:
        """Measured seconds of a row in a full batch; 0 while nothing was measured."""
        return self.full_batch_s / self.batch_rows

    def record_put(self, rows: int, run_s: float, now: float) -> None:
        """Record that a batch left. By the profile, its run takes `run_s`."""
        # A batch sent ahead hides the queue's round trip behind the run before it. Shorter runs than the round trip
        # hide nothing: then a batch with fewer rows than the last one only costs more for each request.
        self._rows_ahead_min = min(rows, self.batch_rows) if run_s < SHORT_RUN_S else 0
        self.estimator.put(run_s, now)

    def rows_to_take(self, waiting: Batcher, in_flight: int, now: float) -> int:
        """Return the most rows of the batch to send now, or HOLD, or EXPIRE.

        Args:
            waiting: the waiting requests, at least one.
            in_flight: number of the lane's batches without a reply, less than `credits`.
            now: the current instant.
        """
        estimator = self.estimator
        first = waiting.earliest()
        start = max(estimator.free_at, now)
        if self._has_queue_rules:
            # `deadline` ends the wait in the queue; `answer_by` is the deadline of the answer.
            left_s, late = first.answer_by - start, False
        else:
            left_s = first.deadline - start
            late = in_flight > 0 and left_s < self._least_s(first, waiting.rows)
        if late or first.deadline <= now:
            return EXPIRE
        if in_flight >= self.instances and waiting.rows < self._rows_ahead_min:
            return HOLD
        rows = self.batch_rows if estimator.ample_s <= left_s else estimator.rows_within(left_s)
        if self._delay_s or self._preferred:
            return self._configured_rows(rows, waiting, now)
        return rows

    def _configured_rows(self, rows: int, waiting: Batcher, now: float) -> int:
        """Return `rows` as the version's preferred sizes and queue delay change them; HOLD: the expirer tries again.

        After the queue delay all waiting requests are sent: as in Triton, a preferred size is worth no longer wait.
        """
        if self._delay_s and now - waiting.oldest_arrival() >= self._delay_s:
            return rows
        if self._preferred:
            sent = preferred_rows(self._preferred, waiting.sums(now, rows), waiting.rows)
        else:
            sent = rows if waiting.rows >= self.batch_rows else None
        if sent is None:
            return HOLD if self._delay_s else rows
        return min(sent, rows)  # a larger request is sent all the same

    def _least_s(self, first: Request, rows_waiting: int) -> float:
        """Return the seconds that must be left for `first` to join the next batch.

        While the other requests can fill a batch, no smaller batch is sent for `first`: it would make the others late.
        """
        if rows_waiting - first.rows >= self.batch_rows:
            return self.estimator.planned_s(first)
        return self.estimator.run_s(first.rows)


def shared_rows(profile: Profile, rows_efficient: int) -> int:
    """Return the rows that run together while other lanes of the pool are in use: at most `rows_efficient`."""
    within = profile.rows_within(max(TURN_S, TURN_RUNS * profile.predict(1)), rows_efficient)
    # Workers may ask for a size that was never measured: the profile predicts no gain for it. Try small steps.
    return min(rows_efficient, 2 * within) if within == profile.largest else within


def preferred_rows(preferred: Sequence[int], sums: Sequence[int], rows_waiting: int) -> int | None:
    """Return the rows of the batch to send of a version with preferred sizes; None: more requests may make one.

    Requests are never split, so a batch is one of the `sums`. The largest that is a preferred size is sent. If there is
    none, requests that cannot make one any more are sent: because they are more rows than the largest size, of which as
    many as are within it, or because the next request cannot join them.

    Args:
        preferred: the preferred sizes.
        sums: rows of the first waiting request, of the first two, … as far as they fit into one batch.
        rows_waiting: rows of all waiting requests.

    Source: Triton, dynamic_batch_scheduler.cc, GetDynamicBatch.
    """
    fitting = [rows for rows in sums if rows in preferred]
    if fitting:
        return fitting[-1]
    largest, together = max(preferred), sums[-1]
    if together >= largest:
        return max((rows for rows in sums if rows <= largest), default=sums[0])
    return together if rows_waiting > together else None
