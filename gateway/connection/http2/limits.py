"""limits: what one client may make a connection do, and the allowances that bound how often.

A client that exceeds a limit gets GOAWAY with ENHANCE_YOUR_CALM, unless the limit says otherwise.
Source: RFC 9113, section 10.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.gateway.connection.http2.faults import ConnectionFault, ErrorCode


@dataclass(frozen=True)
class Rate:
    """`burst` frames at once, and `per_s` frames a second from then on."""

    burst: int
    per_s: float


@dataclass(frozen=True)
class Limits:
    """The limits of a connection. The defaults are those of a server; tests use smaller ones."""

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
    #: a header block as sent, and the CONTINUATION frames that it comes in
    header_block_bytes_max: int = 32 * 1024
    continuations_max: int = 8
    #: streams that the client resets (rapid reset): each costs a call that begins and ends
    resets: Rate = Rate(2048, 500)
    #: SETTINGS, each of which needs an acknowledgement
    settings: Rate = Rate(32, 1)
    #: PING, the same; gRPC clients send one for each bandwidth estimate
    pings: Rate = Rate(512, 64)
    #: DATA without data that does not end its stream
    empty_frames: Rate = Rate(128, 16)
    #: PRIORITY, frames of unknown types, and frames of streams that have ended
    ignored_frames: Rate = Rate(4096, 1024)
    #: WINDOW_UPDATE, beyond two for each DATA frame sent (window games: a byte of window for each frame)
    window_updates: Rate = Rate(8192, 1024)
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


class Allowance:
    """How many frames of a kind a client may still send: a token bucket.

    Args:
        rate: the burst, and the rate at which it fills again.
        kind: the kind of frame, for people.
        now: the current instant, in seconds.
    """

    __slots__ = ("_at", "_kind", "_left", "_rate")

    def __init__(self, rate: Rate, kind: str, now: float) -> None:
        self._rate = rate
        self._kind = kind
        self._left = float(rate.burst)
        self._at = now

    def take(self, now: float) -> None:
        """Count one frame. Raises ConnectionFault(ENHANCE_YOUR_CALM) where none is left."""
        if self._left < 1.0:
            self._left = min(self._rate.burst, self._left + (now - self._at) * self._rate.per_s)
            self._at = now
            if self._left < 1.0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._kind}")
        self._left -= 1.0

    def earn(self, frames: int) -> None:
        """Allow more frames, up to the burst."""
        self._left = min(self._rate.burst, self._left + frames)
