"""Applies a version's priority levels and queue policies to its waiting requests. Pure.

prepare (priority, deadline) ─> enter ─> waits in the batcher ─> leave ─> sent; or its wait ends: requeued, refused

While a request waits, `deadline` is the end of its wait and `answer_by` the deadline of its answer. `leave` sets
`deadline` back to `answer_by`. Limits on the number of waiting requests are those of one gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from millstream.gateway.scheduling.batching.batcher import DELAYED
from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import ModelConfig, QueuePolicy

RETRY_AFTER_S = 0.1


class QueueRules:
    """The queue rules of one version in one gateway. Build it only if `needed` returns True."""

    def __init__(self, config: ModelConfig) -> None:
        self._levels = config.priority_levels
        self._default = config.priority_default
        self._policy = config.queue
        self._policies = config.queue_by_priority
        self._limited = _has_policy(config)
        self._timeout_s = config.timeout_ms_default / 1000
        self._counts: Counter[int] = Counter()

    @staticmethod
    def needed(config: ModelConfig) -> bool:
        """Whether the config has priority levels or queue policies."""
        return bool(config.priority_levels) or _has_policy(config)

    def prepare(self, request: Request) -> None:
        """Set a request's priority and deadline by the rules. Raises Failure(OVERLOADED) when too many requests wait.

        A priority that is not one of the levels is replaced by the default, as in Triton. With a queue policy the
        request's own timeout is no deadline: it only shortens the wait, if the policy allows that.
        """
        if self._levels and not 1 <= request.priority <= self._levels:
            request.priority = self._default
        request.level = request.priority
        request.answer_by = request.wait_until = request.deadline
        if not self._limited:
            return
        policy = self._policy_of(request)
        if policy.requests_max and self._counts[request.level] >= policy.requests_max:
            raise Failure(Code.OVERLOADED, "Exceeds maximum queue size", retry_after_s=RETRY_AFTER_S)
        requested_s = request.deadline - request.arrival
        request.deadline = request.answer_by = request.arrival + self._timeout_s
        wait_s = policy.timeout_ms_default / 1000 or self._timeout_s
        if policy.timeout_override:
            wait_s = min(wait_s, requested_s)
        request.wait_until = min(request.answer_by, request.arrival + wait_s)

    def enter(self, request: Request) -> None:
        """Record that a request waits from now on."""
        request.deadline = request.wait_until
        if not request.part:
            self._counts[request.level] += 1

    def leave(self, requests: Iterable[Request]) -> None:
        """Record that requests no longer wait."""
        for request in requests:
            request.deadline = request.answer_by
            if request.part:
                continue
            self._counts[request.level] -= 1
            if not self._counts[request.level]:
                del self._counts[request.level]

    def requeue_as_delayed(self, request: Request, now: float) -> bool:
        """Return whether a request at the end of its wait waits again, behind all others. If so, set its priority."""
        if now >= request.answer_by or self._policy_of(request).timeout_action != "delay":
            return False
        request.priority = DELAYED
        request.wait_until = request.answer_by
        return True

    def _policy_of(self, request: Request) -> QueuePolicy:
        return self._policies.get(request.level, self._policy)


def _has_policy(config: ModelConfig) -> bool:
    return config.queue != QueuePolicy() or bool(config.queue_by_priority)
