"""sampler: decides which requests have a trace. Pure.

head: before the request, by its caller's decision or by the trace id        tail: after it, slow or failed requests
Source: OpenTelemetry specification, "Trace SDK", section Sampling (parent-based, trace id ratio).
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.services.tracing.traceparent import has_parent, is_sampled

_ID_BITS = slice(19, 35)  # the digits of a traceparent that the ratio is compared with: 64 random bits
_IDS = float(1 << 64)  # as many numbers are in them
_SURE = frozenset({0.0, 1.0})
#: traces of a second that only the tail sampler wants: an overload must not make tracing expensive
TAIL_RATE_MAX = 100


@dataclass(frozen=True, slots=True)
class HeadSampler:
    """Decides by what is known before the request."""

    ratio: float = 1.0  # share of the requests that begin a trace, or of all if `parent_based` is False
    parent_based: bool = True  # a caller's decision holds

    def sampled(self, traceparent: bytes, *, reads: bool) -> bool:
        """Whether a request is traced. `reads`: it is a GET or HEAD, such as a health check.

        Such requests are traced only where their caller is: health checks and scrapes would be most of the traces.
        """
        if has_parent(traceparent):
            if self.parent_based:
                return is_sampled(traceparent)
        elif reads:
            return False
        if self.ratio in _SURE:
            return self.ratio == 1.0
        return int(traceparent[_ID_BITS], 16) < self.ratio * _IDS


class TailSampler:
    """Selects slow and failed requests that the head sampler left out, at most TAIL_RATE_MAX in a second.

    Args:
        slow_s: a request that takes this long is slow; 0: neither slow nor failed requests are selected.
    """

    def __init__(self, slow_s: float) -> None:
        self._slow_s = slow_s
        self._second = 0
        self._selected = 0
        self.refused = 0  # requests beyond the limit

    def selected(self, seconds: float, now: float, *, failed: bool) -> bool:
        """Whether a request that took `seconds` until the instant `now` is traced."""
        if not self._slow_s or not (failed or seconds >= self._slow_s):
            return False
        if int(now) != self._second:
            self._second, self._selected = int(now), 0
        if self._selected >= TAIL_RATE_MAX:
            self.refused += 1
            return False
        self._selected += 1
        return True
