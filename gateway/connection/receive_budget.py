"""receive_budget: bytes of request bodies that a gateway is receiving, over all protocols. Bounded before anything is admitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter

#: a body that takes no more is held even when the budget is spent: the number of connections bounds those
SMALL_BYTES_MAX = 64 * 1024


class ReceiveBudget:
    """The receive budget of one gateway: bodies that are not yet with the infer handler.

    Args:
        bytes_max: what all bodies may take together; whoever goes beyond is refused.
        refused: counts these refusals.
    """

    __slots__ = ("_refused", "bytes", "bytes_max")

    def __init__(self, bytes_max: int, refused: Counter | None = None) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self._refused = refused

    def full(self) -> Failure:
        """The refusal of a body for which there is no room, counted."""
        if self._refused is not None:
            self._refused.add()
        return Failure(Code.UNAVAILABLE, f"{self.bytes_max} bytes are being received; try again later", retry_after_s=1)

    @contextmanager
    def holding(self) -> Iterator[HeldBody]:
        """A body that grows within the budget until the block ends."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            held.resize(0)


class HeldBody:
    """One body's share of the budget. Make it with `ReceiveBudget.holding`."""

    __slots__ = ("_receive_budget", "size")

    def __init__(self, receive_budget: ReceiveBudget) -> None:
        self._receive_budget = receive_budget
        self.size = 0

    def grow(self, size_bytes: int) -> None:
        """Take more. Raises Failure(UNAVAILABLE) when all bodies together take too much and this one is not small."""
        self.resize(self.size + size_bytes)
        if self._receive_budget.bytes > self._receive_budget.bytes_max and self.size > SMALL_BYTES_MAX:
            raise self._receive_budget.full()

    def resize(self, size_bytes: int) -> None:
        """Hold exactly so many bytes."""
        self._receive_budget.bytes += size_bytes - self.size
        self.size = size_bytes
