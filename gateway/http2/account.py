"""account: what a client may still send that is no work: windows, PING, SETTINGS, resets, frames without effect.

work done for the client, time ─> earn ─> balance ─> spend ─> frames that are no work; overdrawn: ENHANCE_YOUR_CALM
"""

from __future__ import annotations

from millstream.gateway.http2.faults import ConnectionFault, ErrorCode
from millstream.gateway.http2.limits import Limits

# What frames cost: 1 is about a microsecond. DATA costs only if it is empty, HEADERS only if they begin no call.
FRAME = 1  # WINDOW_UPDATE, PRIORITY, CONTINUATION, GOAWAY, frames of unknown types, RST_STREAM of an ended stream
PING = 8
EMPTY_DATA = 16
HEADERS = 8
SETTINGS = 64  # may change the windows of all streams
RESET = 6
#: What each second of a call's life takes off the cost of its reset. A rapid reset makes room in `streams_max` at once,
#: for the next call; a call that waited has counted there meanwhile.
RESET_DISCOUNT = 2000.0

# What work earns: more than a client that gets it may need, so that it never spends all, however fast it is.
OPENED = 4  # gives window before there is data. Less than RESET, lest rapid resets pay for themselves.
DATA_SENT = 12  # gives window on the stream and on the connection, and measures the path with PING
EARNING_BYTES = 1024  # of this data; gives window for a part of a frame
ANSWERED = 32  # resets some other calls


class Account:
    """The account of one connection. What work earned does not lapse: windows for many replies may come at once.

    Args:
        limits: the limits of the connection.
        now: the current instant, in seconds.
    """

    __slots__ = ("_at", "_first", "_per_s", "balance")

    def __init__(self, limits: Limits, now: float) -> None:
        self._first = self.balance = float(limits.account)
        self._per_s = limits.account_per_s
        self._at = now

    def spend(self, cost: float, frames: str, now: float) -> None:
        """Subtract the cost of a frame. `frames`: its kind, for people.

        Raises ConnectionFault(ENHANCE_YOUR_CALM) if the account is overdrawn.
        """
        if self.balance < self._first:
            self.balance = min(self._first, self.balance + (now - self._at) * self._per_s)
        self._at = now
        self.balance -= cost
        if self.balance < 0:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"too many {frames}")

    def spend_reset(self, opened_at: float, now: float) -> None:
        """Subtract the cost of the reset of a call that began at `opened_at`. Raises ConnectionFault like `spend`."""
        self.spend(max(FRAME, RESET - (now - opened_at) * RESET_DISCOUNT), "resets of streams", now)

    def earn(self, amount: int) -> None:
        """Add what work earns."""
        self.balance += amount
