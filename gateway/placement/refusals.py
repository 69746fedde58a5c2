"""The failures that callers of a version get which is not loaded for them. Pure."""

from __future__ import annotations

import math

from millstream.services.errors import Code, Failure
from millstream.services.placement.views import Refusal, RefusalKind

_WITHOUT_MEMORY = frozenset({RefusalKind.TOO_LARGE, RefusalKind.NOTHING_EVICTABLE})


class PassedOn(Failure):
    """A pool would have to unload models for a version, and another pool need not: that one is to load it."""

    def __init__(self, pool: str, other: str) -> None:
        self.other = other
        super().__init__(Code.MEMORY, f"pool {pool} has no memory free, and pool {other} has or loads it")


def failure_of(model: str, refusal: Refusal) -> Failure:
    """Return the failure of an inference: 503 with the reason; 429 if the load only takes too long."""
    if refusal.kind is RefusalKind.TOO_SLOW:
        return too_slow(model, refusal.retry_after_s)
    code = Code.MEMORY if refusal.kind in _WITHOUT_MEMORY else Code.UNAVAILABLE
    message = f"model '{model}' cannot be loaded: {refusal.reason}"
    return Failure(code, message, retry_after_s=refusal.retry_after_s or None)


def too_slow(model: str, load_s: float) -> Failure:
    """Return the failure of a request whose deadline comes before the end of the load."""
    return Failure(
        Code.OVERLOADED,
        f"model '{model}' is loading, about {about_s(load_s)}, longer than the request may wait",
        retry_after_s=load_s,
    )


def about_s(seconds: float) -> str:
    """Return a predicted duration for people: "4 s"."""
    return f"{seconds:.1f} s" if seconds < 1 else f"{math.ceil(seconds)} s"
