"""The rules of other autoscalers, as their documentation and sources say, and Millstream's policy behind the same call.

Every rule is told once a second what a scraper would see, and returns the workers that it wants.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol

from millstream.plugins.fleet.controller.autoscale.decision import PoolFacts, ScaleLimits
from millstream.plugins.fleet.controller.autoscale.policy import PoolPolicy


class Worker(NamedTuple):
    """What a worker is like."""

    rows_per_s: float
    run_s: float  # of a full batch
    start_s: float


class Seen(NamedTuple):
    """One second as scalers see it."""

    rows: float  # that arrived
    inside: float  # rows that wait or run
    ready: int
    busy: float  # share of the time in which ready workers ran


class Rule(Protocol):
    """Decides how many workers there should be."""

    name: str

    def wanted(self, seen: Seen, now: float) -> int: ...


class Millstream:
    """The product's policy: it is told run times and start times, as it measures them."""

    def __init__(self, worker: Worker, most: int, latency_s: float, down_s: float) -> None:
        self.name = "Millstream"
        self._worker = worker
        limits = ScaleLimits(1, most, latency_s, down_s)
        self._policy = PoolPolicy("cpu", limits, explained=False)

    def wanted(self, seen: Seen, now: float) -> int:
        row_s = 1 / self._worker.rows_per_s
        facts = PoolFacts(
            rows=seen.rows,
            work_s=seen.rows * row_s,
            queue_rows=seen.inside,
            queue_work_s=seen.inside * row_s,
            ready=seen.ready,
            start_s=self._worker.start_s,
            run_s=self._worker.run_s,
            row_s=row_s,
        )
        return self._policy.decide(facts, now).wanted


class Knative:
    """KPA: mean concurrency over 60 s; over 6 s in panic mode, from twice the capacity on, without scale-in for 60 s.

    Source: config-autoscaler and pkg/autoscaler/scaling/autoscaler.go of knative/serving; a decision every 2 s.
    """

    STABLE_S, PANIC_S, TICK_S = 60, 6, 2
    UP_RATE, DOWN_RATE = 1000.0, 2.0

    def __init__(self, worker: Worker, most: int, utilisation: float) -> None:
        self.name = "Knative"
        self._target = worker.rows_per_s * worker.run_s * utilisation
        self._most = most
        self._inside: deque[float] = deque(maxlen=self.STABLE_S)
        self._panic_until = 0.0
        self._panic_most = 0
        self._wanted = 1

    def wanted(self, seen: Seen, now: float) -> int:
        self._inside.append(seen.inside)
        if now % self.TICK_S:
            return self._wanted
        recent = list(self._inside)[-self.PANIC_S :]
        ready = max(1, seen.ready)
        low, high = math.floor(ready / self.DOWN_RATE), math.ceil(ready * self.UP_RATE)
        stable = math.ceil(sum(self._inside) / len(self._inside) / self._target)
        panic = math.ceil(sum(recent) / len(recent) / self._target)
        stable, panic = min(max(stable, low), high), min(max(panic, low), high)
        if panic / ready >= 2:
            self._panic_until = now + self.STABLE_S
        if now < self._panic_until:
            self._panic_most = max(self._panic_most, panic)
            wanted = max(self._panic_most, ready)
        else:
            self._panic_most, wanted = 0, stable
        self._wanted = min(max(1, wanted), self._most)
        return self._wanted


class RayServe:
    """Ray Serve: mean ongoing requests over 30 s, up if that held for 30 s, down if it held for 600 s.

    Source: AutoscalingConfig and autoscaling_policy.py of ray-project/ray; metrics every 10 s.
    """

    LOOK_BACK_S, METRICS_S, UP_S, DOWN_S = 30, 10, 30, 600

    def __init__(self, worker: Worker, most: int, utilisation: float) -> None:
        self.name = "Ray Serve"
        self._target = worker.rows_per_s * worker.run_s * utilisation
        self._most = most
        self._inside: deque[float] = deque(maxlen=self.LOOK_BACK_S)
        self._ongoing = 0.0
        self._wanted = 1
        self._since_up = self._since_down = math.inf

    def wanted(self, seen: Seen, now: float) -> int:
        self._inside.append(seen.inside)
        if not now % self.METRICS_S:
            self._ongoing = sum(self._inside) / len(self._inside)
        desired = min(max(1, math.ceil(self._ongoing / self._target)), self._most)
        self._since_up = min(self._since_up, now) if desired > self._wanted else math.inf
        self._since_down = min(self._since_down, now) if desired < self._wanted else math.inf
        if now - self._since_up >= self.UP_S or now - self._since_down >= self.DOWN_S:
            self._wanted = desired
            self._since_up = self._since_down = math.inf
        return self._wanted


class HpaOnCpu:
    """HPA: every 15 s, workers x use / target, 10 % tolerance, up by 4 or 100 % in 15 s, down after 5 min.

    Source: kubernetes.io, Horizontal Pod Autoscaling; the use is the mean of 30 s that metrics-server last scraped.
    """

    SYNC_S, USE_S, STABLE_S = 15, 30, 300
    TOLERANCE, UP_WORKERS = 0.1, 4

    def __init__(self, most: int, utilisation: float) -> None:
        self.name = "HPA on CPU"
        self._target = utilisation
        self._most = most
        self._busy: deque[float] = deque(maxlen=self.USE_S)
        self._desired: deque[tuple[float, int]] = deque()
        self._wanted = 1

    def wanted(self, seen: Seen, now: float) -> int:
        self._busy.append(seen.busy)
        if now % self.SYNC_S:
            return self._wanted
        ratio = sum(self._busy) / len(self._busy) / self._target
        ready = max(1, seen.ready)
        desired = self._wanted if abs(ratio - 1) <= self.TOLERANCE else math.ceil(ready * ratio)
        desired = min(desired, max(self._wanted + self.UP_WORKERS, self._wanted * 2), self._most)
        self._desired.append((now, max(1, desired)))
        while self._desired[0][0] < now - self.STABLE_S:
            self._desired.popleft()
        self._wanted = max(one for _, one in self._desired) if desired < self._wanted else desired
        return self._wanted
