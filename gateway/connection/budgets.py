"""Bounds on the bytes of request bodies that a gateway is receiving, and of its replies, over all protocols.

bytes of a body ─> counted here ─> complete body ─> infer handler; Admission counts it from then on

One caller, a key or else an address, has at most SHARE times what is free for its large bodies: alone two thirds of the
budget, one of two callers two fifths. So a part is always free for others, whatever stalls.

A reply counts from the moment when its tensors exist until the transport has sent it: clients may read slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter

#: a body or reply up to this size passes even when its budget is spent; the number of connections bounds these
SMALL_BYTES_MAX = 64 * 1024
#: of what is free, which the large bodies of one caller may take; a single body may take all
SHARE = 2


class ReceiveBudget:
    """The receive budget of one gateway: bytes of bodies that the infer handler does not have yet.

    Args:
        bytes_max: Limit on all bodies together; a body that grows beyond the limit is refused.
        refused: Counts these refusals; None: they are not counted.
    """

    __slots__ = ("_large", "_refused", "bytes", "bytes_max")

    def __init__(self, bytes_max: int, refused: Counter | None = None) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self._large: dict[str, int] = {}  # caller -> bytes of its large bodies
        self._refused = refused

    def charge(self, caller: str | None, before_bytes: int, size_bytes: int) -> None:
        """Count a body of a caller that had `before_bytes` and now has `size_bytes`. None: it takes nobody's share."""
        self.bytes += size_bytes - before_bytes
        if caller is None:
            return
        if before_bytes > SMALL_BYTES_MAX or size_bytes > SMALL_BYTES_MAX:
            large = size_bytes if size_bytes > SMALL_BYTES_MAX else 0
            large += self._large.get(caller, 0) - (before_bytes if before_bytes > SMALL_BYTES_MAX else 0)
            if large:
                self._large[caller] = large
            else:
                self._large.pop(caller, None)

    def exceeds_share(self, caller: str | None, size_bytes: int) -> bool:
        """Return whether a body of a caller that was charged is too much beside the caller's other bodies."""
        held = 0 if caller is None else self._large.get(caller, 0)
        return size_bytes > SMALL_BYTES_MAX and held > size_bytes and held > SHARE * (self.bytes_max - self.bytes)

    def refusal(self) -> Failure:
        """Count and return the refusal of a body for which there is no room."""
        if self._refused is not None:
            self._refused.add()
        return Failure(Code.UNAVAILABLE, f"{self.bytes_max} bytes are being received; try again later", retry_after_s=1)

    @contextmanager
    def reserve(self, caller: str | None = None) -> Iterator[BodyReservation]:
        """Yield a reservation of 0 bytes, which grows with a body, and release it at the end.

        `caller`: who may let the body stall; None: it is complete, and is decoded.
        """
        reservation = BodyReservation(self, caller)
        try:
            yield reservation
        finally:
            reservation.resize(0)


class BodyReservation:
    """The share of the budget that one body takes. Make it with `ReceiveBudget.reserve`."""

    __slots__ = ("_receive_budget", "caller", "size")

    def __init__(self, receive_budget: ReceiveBudget, caller: str | None) -> None:
        self._receive_budget = receive_budget
        self.caller = caller
        self.size = 0

    def grow(self, size_bytes: int) -> None:
        """Reserve more bytes. Raises Failure(UNAVAILABLE) if the budget is exceeded and this body is not small."""
        self.resize(self.size + size_bytes)
        budget = self._receive_budget
        full = budget.bytes > budget.bytes_max and self.size > SMALL_BYTES_MAX
        if full or budget.exceeds_share(self.caller, self.size):
            raise budget.refusal()

    def resize(self, size_bytes: int) -> None:
        """Set the share to `size_bytes`."""
        self._receive_budget.charge(self.caller, self.size, size_bytes)
        self.size = size_bytes


class ReplyBudget:
    """The reply budget of one gateway.

    Args:
        bytes_max: Limit on all unread replies together. A single reply may be larger.
        refused: Counts replies that do not fit and are not sent; None: they are not counted.
    """

    __slots__ = ("_refused", "bytes", "bytes_max")

    def __init__(self, bytes_max: int, refused: Counter | None = None) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self._refused = refused

    def has_room(self, size_bytes: int) -> bool:
        """Whether a reply of `size_bytes` fits."""
        return size_bytes <= SMALL_BYTES_MAX or not self.bytes or self.bytes + size_bytes <= self.bytes_max

    def refusal(self) -> Failure:
        """Count and return the failure that is sent in place of a reply that does not fit."""
        if self._refused is not None:
            self._refused.add()
        unread = f"{self.bytes} bytes of replies wait for clients that do not read them; try again later"
        return Failure(Code.UNAVAILABLE, unread, retry_after_s=1)

    def take(self, size_bytes: int) -> None:
        """Count a reply. Raises Failure(UNAVAILABLE) if it does not fit."""
        if not self.has_room(size_bytes):
            raise self.refusal()
        self.bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Stop counting a reply."""
        self.bytes -= size_bytes


class ReplyPermit:
    """The share of the budget that one call takes."""

    __slots__ = ("_reply_budget", "size_bytes")

    def __init__(self, reply_budget: ReplyBudget) -> None:
        self._reply_budget = reply_budget
        self.size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Take `size_bytes` more. Raises Failure(UNAVAILABLE) if they do not fit."""
        self._reply_budget.take(size_bytes)
        self.size_bytes += size_bytes

    def resize(self, size_bytes: int) -> None:
        """Set the share to `size_bytes`: the reply has another form now."""
        self._reply_budget.bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes

    def release(self) -> None:
        """Give the share back: the transport has the reply, or it will not be sent. Idempotent."""
        self._reply_budget.bytes -= self.size_bytes
        self.size_bytes = 0


#: the permit of the HTTP request that the current task answers
PERMIT: ContextVar[ReplyPermit | None] = ContextVar("permit", default=None)
