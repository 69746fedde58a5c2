"""Decides which requests have a trace, when they have ended. Pure.

head: by its caller's decision, or by the trace id ─no─> tail: slow and failed requests ─no─> no trace
Source: OpenTelemetry specification, "Trace SDK", section Sampling (parent-based, trace id ratio).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream.services.traceparent import Trace, is_sampled

_IDS = 1 << 64  # as many numbers has the part of a trace id that the ratio is compared with: its last 64 bits
_ID_DIGITS = slice(19, 35)  # the same part of a traceparent
#: traces of a second that only the tail wants: an overload must not make tracing expensive
TAIL_RATE_MAX = 100


@dataclass(frozen=True, slots=True)
class HeadSampler:
    """Decides by what is known before the request."""

    ratio: float = 1.0  # share of the requests that begin a trace, or of all if `parent_based` is False
    parent_based: bool = True  # a caller's decision holds

    @property
    def ids_sampled(self) -> int:
        """How many ids are sampled: those below this number."""
        return int(self.ratio * _IDS)

    def sampled(self, traceparent: bytes) -> bool:
        """Whether a request with a caller's traceparent is traced."""
        if self.parent_based:
            return is_sampled(traceparent)
        return int(traceparent[_ID_DIGITS], 16) < self.ids_sampled


class Sampler:
    """Selects the requests that are traced: those of the head sampler, then slow and failed ones.

    Of the latter at most TAIL_RATE_MAX in a second.

    Args:
        head: decides before a request.
        slow_s: a request that takes this long is slow; 0: neither slow nor failed requests are selected.
        refused: called for a slow or failed request beyond the limit.
    """

    def __init__(self, head: HeadSampler, slow_s: float, refused: Callable[[], None]) -> None:
        self._head = head
        self._ids_sampled = head.ids_sampled
        self._has_tail = slow_s > 0
        self._slow_s = slow_s or float("inf")
        self._refused = refused
        self._second = 0
        self._selected = 0

    def selected(
        self, trace: Trace | None, seconds: float, now: float, *, failed: bool, invalid: bool = False, reads: bool
    ) -> bool:
        """Whether a request that took `seconds` until the instant `now` is traced. `reads`: it is a GET or HEAD.

        Of those that begin a trace the head selects no GET and HEAD: health checks and scrapes would be most of them.
        All in one function, since it runs for each request.
        """
        if isinstance(trace, int):
            if trace % _IDS < self._ids_sampled and not reads:
                return True
        elif trace is not None and self._head.sampled(trace):
            return True
        if seconds < self._slow_s and not failed:
            return False
        return self._has_tail and self._has_room(now)

    def _has_room(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._selected = int(now), 0
        if self._selected >= TAIL_RATE_MAX:
            self._refused()
            return False
        self._selected += 1
        return True
