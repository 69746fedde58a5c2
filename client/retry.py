"""Repeats calls that are safe to repeat, within the caller's timeout. Pure: clock and random numbers are passed in.

refused connection ─> again after a growing pause with jitter
429 or 503 with Retry-After ─> again after that time and some jitter
connection closed before a reply ─> again if the call changes nothing
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from millstream.client.call import NO_REPLY, Call, Pause, Reply, Steps, T, Timeouts
from millstream.client.errors import Cause, ConnectionFailed, ServerError, Timeout
from millstream.client.replies import failure_of
from millstream.services.errors import Failure, invalid
from millstream.services.process.waits import backoff_s

PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 5.0
JITTER = 0.25  # share of Retry-After that is added at most, so that refused clients do not return all at once
CONNECT_S_MAX = 10.0
STALL_S_MAX = 60.0
TIMEOUT_S_MAX = 1e8  # three years: a longer timeout is none
_REFUSED = {429, 503}


class Budget:
    """The time that an operation with all its calls may take. `timeout_s` None: no limit."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        try:
            limit_s = math.inf if timeout_s is None else float(timeout_s)
        except (TypeError, ValueError):
            limit_s = math.nan
        if not limit_s >= 0:
            raise invalid(f"a timeout is a number of seconds, not {timeout_s!r}")
        self.timeout_s = limit_s if limit_s <= TIMEOUT_S_MAX else None
        self._clock = clock
        self._deadline = math.inf if self.timeout_s is None else clock() + self.timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left; infinity without a limit."""
        return self._deadline - self._clock()

    def timeouts(self, call: Call) -> Timeouts:
        """Return the limits of an attempt that starts now."""
        left = self.left_s()
        total = None if math.isinf(left) else left
        read = min(left, math.inf if call.read_s is None else call.read_s)
        return Timeouts(total, None if math.isinf(read) else read, min(left, STALL_S_MAX), min(left, CONNECT_S_MAX))


@dataclass(frozen=True, slots=True)
class Retries:
    """How often calls are repeated. `random` returns numbers from 0 to 1."""

    attempts_max: int
    random: Callable[[], float]

    def pause_s(self, failure: Failure, call: Call, attempt: int) -> float | None:
        """Return the seconds to wait after attempt number `attempt` (from 1) failed; None: do not repeat."""
        if call.once or attempt >= self.attempts_max:
            return None
        if isinstance(failure, ServerError):
            if failure.status not in _REFUSED or failure.retry_after_s is None:
                return None
            return failure.retry_after_s * (1 + JITTER * self.random())
        if isinstance(failure, ConnectionFailed) and (
            failure.cause is Cause.REFUSED or (failure.cause is Cause.CLOSED and call.repeatable)
        ):
            return backoff_s(attempt, PAUSE_S_MIN, PAUSE_S_MAX, self.random)
        return None


def with_retries(steps: Steps[T], retries: Retries, budget: Budget) -> Steps[T]:
    """Run a procedure: its calls get timeouts, and are repeated; its failures are those of the last attempts."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                yield Pause(max(0.0, min(step.seconds, budget.left_s())), step.why)
                step = steps.send(NO_REPLY)
                continue
            try:
                reply = yield from _attempts(step, retries, budget)
            except Failure as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


def _attempts(call: Call, retries: Retries, budget: Budget) -> Steps[Reply]:
    """Send a call until it is answered with a 2xx status. Raises the Failure of the last attempt."""
    attempt = 0
    while True:
        attempt += 1
        if budget.left_s() <= 0:
            raise Timeout(f"{call.method} {call.path}: {budget.timeout_s:g} s passed before it was sent")
        failure: Failure | None
        try:
            reply = yield replace(call, timeouts=budget.timeouts(call))
            failure = failure_of(reply, call)
        except ConnectionFailed as error:
            failure = error
        if failure is None:
            return reply
        pause_s = retries.pause_s(failure, call, attempt)
        if pause_s is None or pause_s >= budget.left_s():
            raise failure
        yield Pause(pause_s, f"{call.method} {call.path}: {failure.message}; sent again in {pause_s:.3g} s")
