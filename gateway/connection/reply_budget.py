"""reply_budget: bytes of replies that a gateway holds for its clients, over all protocols, until the transport has them."""

from __future__ import annotations

from contextvars import ContextVar

from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter

#: a reply that takes no more is given even when the budget is spent: the number of connections and calls bounds those
SMALL_BYTES_MAX = 64 * 1024


class ReplyBudget:
    """The reply budget of one gateway.

    Args:
        bytes_max: what unread replies may take together. One alone may take more.
        refused: counts replies that are not given for lack of room.
    """

    __slots__ = ("_refused", "bytes", "bytes_max")

    def __init__(self, bytes_max: int, refused: Counter | None = None) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
        self._refused = refused

    def room(self, size_bytes: int) -> bool:
        """Whether a reply of this size may be held, too."""
        return size_bytes <= SMALL_BYTES_MAX or not self.bytes or self.bytes + size_bytes <= self.bytes_max

    def full(self) -> Failure:
        """What is answered instead of a reply for which there is no room, counted."""
        if self._refused is not None:
            self._refused.add()
        unread = f"{self.bytes} bytes of replies wait for clients that do not read them; try again later"
        return Failure(Code.UNAVAILABLE, unread, retry_after_s=1)

    def take(self, size_bytes: int) -> None:
        """Hold a reply. Raises Failure(UNAVAILABLE)."""
        if not self.room(size_bytes):
            raise self.full()
        self.bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """Hold it no longer."""
        self.bytes -= size_bytes


class ReplyPermit:
    """What one call holds of the budget."""

    __slots__ = ("_reply_budget", "size_bytes")

    def __init__(self, reply_budget: ReplyBudget) -> None:
        self._reply_budget = reply_budget
        self.size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Hold more. Raises Failure(UNAVAILABLE)."""
        self._reply_budget.take(size_bytes)
        self.size_bytes += size_bytes

    def resize(self, size_bytes: int) -> None:
        """Hold exactly so much: the reply has another form now."""
        self._reply_budget.bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes

    def give_back(self) -> None:
        """The transport has the reply, or nobody will get it. Idempotent."""
        self._reply_budget.bytes -= self.size_bytes
        self.size_bytes = 0


#: of the HTTP request that this task answers
PERMIT: ContextVar[ReplyPermit | None] = ContextVar("permit", default=None)
