"""What one client may make a connection do, the account of frames that are no work, and how long it may be
silent: before the preface, within a frame, and between frames.

work done for the client, time ─> earn ─> balance ─> spend ─> frames that are no work; overdrawn: ENHANCE_YOUR_CALM

Frames that are no work: windows, PING, SETTINGS, resets, frames without effect.
Source: RFC 9113, sections 6.5.3 (SETTINGS_TIMEOUT), 6.7 (PING) and 10.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.gateway.http2.events import ConnectionFault, ErrorCode


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a connection. A client that exceeds one gets GOAWAY with ENHANCE_YOUR_CALM, or what the line says.

    The defaults are those of a server; tests use smaller ones.
    """

    #: streams whose call has not ended; a further one gets REFUSED_STREAM, and the client sends it again later
    streams_max: int = 1024
    #: bytes that a client may send of a stream, and of all streams, before the server has consumed them
    stream_window_bytes: int = 1024 * 1024
    connection_window_bytes: int = 4 * 1024 * 1024
    #: payload of DATA, which is passed on as it arrives, so that long frames take no memory; and of other frames
    frame_bytes_max: int = 1024 * 1024
    header_frame_bytes_max: int = 64 * 1024
    #: names, values and 32 bytes for each field; the call is refused beyond (RFC 9113, section 6.5.2)
    header_list_bytes_max: int = 16 * 1024
    #: the same, beyond which the connection ends: a block of 4 KiB can stand for 16 MB (header bomb)
    header_bomb_bytes: int = 64 * 1024
    #: a header block as sent
    header_block_bytes_max: int = 32 * 1024
    #: the account of frames that are no work: its first balance, for what `streams_max` calls may need before one of
    #: them is answered; and what each second adds, up to that balance
    account: int = 16 * 1024
    account_per_s: float = 32 * 1024
    #: seconds until the preface, and until SETTINGS are acknowledged (SETTINGS_TIMEOUT)
    preface_s_max: float = 10.0
    settings_ack_s_max: float = 20.0
    #: seconds for which a frame or a header block may be incomplete
    frame_s_max: float = 60.0
    #: seconds without a byte received, after which a PING is sent, and for which its answer may take
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    #: a reply may take this time and a second for each READ_RATE_MIN of it; if the client takes less than READ_RATE_MIN
    #: of all replies in this time, all that have waited so long are reset
    stall_s_max: float = 60.0


READ_RATE_MIN = 64 * 1024  # bytes a second; a client that reads as much is not slow

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


class FrameAccount:
    """The account of one connection. What work earned does not lapse: windows for many replies may come at once.

    Args:
        limits: the limits of the connection.
        now: the current instant, in seconds.
    """

    __slots__ = ("_at", "_first", "_per_s", "balance")

    def __init__(self, limits: ConnectionLimits, now: float) -> None:
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


#: payloads of our PING frames
KEEPALIVE_PING = b"liveness"
DRAIN_PING = b"draining"


class ConnectionClocks:
    """The clocks of one connection.

    Args:
        limits: the limits of the connection.
        now: the current instant, in seconds.
    """

    __slots__ = ("_began", "_limits", "_partial_since", "_pinged", "_received", "settings_acknowledged")

    def __init__(self, limits: ConnectionLimits, now: float) -> None:
        self.settings_acknowledged = False
        self._limits = limits
        self._began = self._received = now
        self._pinged: float | None = None
        self._partial_since: float | None = None

    def received(self, now: float, *, complete: bool, partial: bool) -> None:
        """Note that bytes came.

        Args:
            now: the current instant.
            complete: whether a frame is complete with them.
            partial: whether a frame or header block is incomplete after them.
        """
        self._received = now
        self._pinged = None
        if not partial:
            self._partial_since = None
        elif complete or self._partial_since is None:
            self._partial_since = now

    def check(self, now: float, *, begun: bool, partial: bool) -> bool:
        """Return whether a PING is due. Raises ConnectionFault if the client was silent for too long.

        Args:
            now: the current instant.
            begun: whether the preface has come.
            partial: whether a frame or header block is incomplete.
        """
        limits = self._limits
        if not begun and now >= self._began + limits.preface_s_max:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no preface came")
        if not self.settings_acknowledged and now >= self._began + limits.settings_ack_s_max:
            raise ConnectionFault(ErrorCode.SETTINGS_TIMEOUT, "SETTINGS are not acknowledged")
        if partial and self._partial_since is not None and now >= self._partial_since + limits.frame_s_max:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a frame or header block does not end")
        if self._pinged is not None:
            if now >= self._pinged + limits.keepalive_timeout_s:
                raise ConnectionFault(ErrorCode.NO_ERROR, "PING is not answered")
            return False
        if now < self._received + limits.keepalive_s:
            return False
        self._pinged = now
        return True
