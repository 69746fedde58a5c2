"""reply_budget: a bound on the bytes of replies in a gateway, over all protocols.

A reply counts from the moment when its tensors exist until the transport has sent it: clients may read slowly.
"""

from __future__ import annotations

from contextvars import ContextVar

from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter

#: a reply up to this size is sent even when the budget is spent; the number of connections and calls bounds these
SMALL_BYTES_MAX = 64 * 1024


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
