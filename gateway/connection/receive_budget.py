"""receive_budget: a bound on the bytes of request bodies that a gateway is receiving, over all protocols.

bytes of a body ─> counted here ─> complete body ─> infer handler; Admission counts it from then on
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter

#: a body up to this size is received even when the budget is spent; the number of connections bounds these
SMALL_BYTES_MAX = 64 * 1024


class ReceiveBudget:
    """The receive budget of one gateway: bytes of bodies that the infer handler does not have yet.

    Args:
        bytes_max: Limit on all bodies together; a body that grows beyond the limit is refused.
        refused: Counts these refusals; None: they are not counted.
    """

    __slots__ = ("_refused", "bytes", "bytes_max")

    def __init__(self, bytes_max: int, refused: Counter | None = None) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self._refused = refused

    def refusal(self) -> Failure:
        """Count and return the refusal of a body for which there is no room."""
        if self._refused is not None:
            self._refused.add()
        return Failure(Code.UNAVAILABLE, f"{self.bytes_max} bytes are being received; try again later", retry_after_s=1)

    @contextmanager
    def reserve(self) -> Iterator[BodyReservation]:
        """Yield a reservation of 0 bytes, which grows with a body, and release it at the end."""
        reservation = BodyReservation(self)
        try:
            yield reservation
        finally:
            reservation.resize(0)


class BodyReservation:
    """The share of the budget that one body takes. Make it with `ReceiveBudget.reserve`."""

    __slots__ = ("_receive_budget", "size")

    def __init__(self, receive_budget: ReceiveBudget) -> None:
        self._receive_budget = receive_budget
        self.size = 0

    def grow(self, size_bytes: int) -> None:
        """Reserve more bytes. Raises Failure(UNAVAILABLE) if the budget is exceeded and this body is not small."""
        self.resize(self.size + size_bytes)
        if self._receive_budget.bytes > self._receive_budget.bytes_max and self.size > SMALL_BYTES_MAX:
            raise self._receive_budget.refusal()

    def resize(self, size_bytes: int) -> None:
        """Set the share to `size_bytes`."""
        self._receive_budget.bytes += size_bytes - self.size
        self.size = size_bytes
